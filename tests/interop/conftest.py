"""Tests against llama.cpp's own client and server, which `build.py` installs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from interop.cases import Seen, observe
from interop.peers import CppClient, Head, libraries

HERE = Path(__file__).parent
_MISSING = "llama.cpp's RPC is not installed: `make interop` builds it, with a C++ compiler"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder where there is no peer; in CI, where there must be, they fail."""
    if libraries() is None and os.environ.get("CARAVAN_INTEROP") != "required":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=_MISSING))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if libraries() is None:
        terminalreporter.section("interop: NOT TESTED", sep="!", red=True)
        terminalreporter.line(_MISSING)


@pytest.fixture(scope="session")
def folder() -> Path:
    """llama.cpp's libraries."""
    found = libraries()
    assert found is not None, _MISSING
    return found


@pytest.fixture(scope="session")
def alone(folder: Path, smollm2: Path) -> Seen:
    """What llama.cpp's kernels compute in one process, weights not repacked."""
    with CppClient(folder) as client:
        return observe(client, [], smollm2)


@pytest.fixture(scope="session")
def alone_default(smollm2: Path) -> Seen:
    """What the default engine's kernels compute in one process, weights not repacked."""
    with Head() as head:
        return observe(head, [], smollm2)
