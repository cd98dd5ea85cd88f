"""A browser and a server for the tests of this folder; skipped, loudly, where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import chromium
from browser.chromium import Page
from browser.stage import Model, View, staged

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In CI, where there must be one, they fail."""
    if chromium.found() is None and os.environ.get("CARAVAN_INTEROP") != "required":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=chromium.MISSING))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if chromium.found() is None:
        terminalreporter.section("the page: NOT TESTED", sep="!", red=True)
        terminalreporter.line(chromium.MISSING)


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[str, Model, View]]:
    with staged() as found:
        yield found


@pytest.fixture(scope="module")
def driver() -> Iterator[chromium.webdriver.Chrome]:
    started = chromium.start()
    yield started
    started.quit()


@pytest.fixture
def model(stage) -> Iterator[Model]:
    """What answers, with nothing asked yet."""
    found = stage[1]
    found.bodies.clear()
    found.hung_up = 0
    yield found
    found.key = ""


@pytest.fixture
def view(stage) -> Iterator[View]:
    yield stage[2]
    stage[2].lost.clear()


@pytest.fixture
def page(driver, stage, model, view) -> Iterator[Page]:
    """The page, which asks nobody else and whose console has nothing to complain of."""
    found = Page(driver, stage[0])
    yield found
    assert found.strangers() == []
    assert found.complaints() == []
    # what still streams ends
    driver.get("about:blank")
