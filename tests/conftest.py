"""Shared by all tests: the check for leaks, the sample model, no time limits."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from caravan.models import cache_dir

pytest_plugins = ("leaks",)

settings.register_profile("caravan", deadline=None)
settings.load_profile("caravan")


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts its background jobs with SIGINT ignored, and so would be all that they start:
    the tests press Ctrl-C. And what is cached of models and weights is not the user's."""
    _set_environment(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_environment(config: pytest.Config) -> None:
    """A cache of the tests' own, but for what is fetched; and no token."""
    own = Path(tempfile.mkdtemp(prefix="caravan-tests-"))
    for name in ("models", "lib"):
        fetched = cache_dir() / name
        fetched.mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(fetched)
    os.environ["CARAVAN_CACHE"] = str(own)
    os.environ.pop("CARAVAN_TOKEN", None)
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The sample model's file: CARAVAN_TEST_MODEL, or the user's cache, filled on first use."""
    given = os.environ.get("CARAVAN_TEST_MODEL")
    if given:
        return Path(given)
    from caravan.models import resolve

    return resolve("smollm2")


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of temporary files: a path that sockets have room for, with a blank in it."""
    path = Path(tempfile.mkdtemp(prefix="t ", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield path
    monkeypatch.setattr(tempfile, "tempdir", None)
    shutil.rmtree(path)
