"""From a name or a path to a file, and where the cache is."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from caravan.errors import ModelError
from caravan.models import resolve as resolve_package_function
from caravan.models.cache import cache_dir, models_dir
from caravan.models.catalog import SAMPLES
from caravan.models.resolve import resolve, sample_named


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny(asset, pip, monkeypatch):
    monkeypatch.setitem(SAMPLES, "tiny", asset)
    return asset


def test_existing_file_is_itself(tmp_path):
    file = tmp_path / "any.bin"
    file.touch()
    assert resolve(str(file)) == file
    assert resolve_package_function(file) == file


def test_sample_is_fetched_on_first_use(tiny, cache):
    assert resolve("tiny") == cache / "models" / "tiny.gguf"


def test_existing_file_wins_over_a_sample(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").touch()
    assert resolve("tiny") == Path("tiny")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["x" * 5000, "~no such user/m.gguf"])
def test_what_cannot_be_looked_at_is_an_error_of_ours(name):
    with pytest.raises(ModelError, match=f"cannot read {name[:9]}"):
        resolve(name)


def test_a_directory_that_must_not_be_looked_into(monkeypatch):
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelError, match=r"cannot read /root/m\.gguf: Permission denied"):
        resolve("/root/m.gguf")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError, match=r"no model file smollm3.*known names: smollm2"):
        resolve("smollm3")


def test_missing_file_lists_what_is_there(tmp_path):
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.txt").touch()
    with pytest.raises(ModelError, match=r"holds a\.gguf\)"):
        resolve(tmp_path / "missing.gguf")


def test_directory_is_not_a_model(tmp_path):
    with pytest.raises(ModelError, match="is a directory"):
        resolve(tmp_path)


def test_sample_named_knows_only_samples():
    assert sample_named("smollm2").licence == "Apache 2.0"
    with pytest.raises(ModelError, match="known names: smollm2"):
        sample_named("other")


def test_cache_is_where_caravan_cache_says(cache):
    assert cache_dir() == cache
    assert models_dir() == cache / "models"


@pytest.mark.skipif(sys.platform != "linux", reason="the rules of Linux")
def test_cache_follows_the_xdg_rules(tmp_path, monkeypatch):
    monkeypatch.delenv("CARAVAN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "caravan"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "caravan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "caravan"
