"""The page of a real `caravan serve`: an answer, one that is stopped, one whose worker is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from browser.chromium import Page
from e2e import tiny
from e2e.processes import Command, children, family, kill, running, wait_for

# words of no meaning, and more of them than anybody waits for
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
SPLIT = "--split=memory"
OPTIONS = (SPLIT, "--local-workers", "2", "-t", "1", "-np", "2", "-c", "4096", "--temp", "0", "-q")
QUESTION = "What is it?"


@pytest.fixture
def server(tmp_path) -> Iterator[Command]:
    model = str(tiny.write(tmp_path / "tiny.gguf"))
    with running("serve", "-m", model, "-p", "0", "--chat-template", TEMPLATE, *OPTIONS) as command:
        wait_for(lambda: command.text.endswith("\n") or command.process.poll() is not None)
        yield command
        command.interrupt()


def ask(page: Page, most: str) -> None:
    """The question, anew, for an answer of so many tokens; empty: for as many as there is room."""
    field = page.one("#max-tokens")
    field.clear()
    field.send_keys(most)
    page.run("document.getElementById('clear').click()")
    page.one("#prompt").send_keys(QUESTION, Keys.ENTER)
    page.wait(lambda: page.all(".growing .text p"))


def test_with_two_workers(driver, server):
    page = Page(driver, server.text.split()[-1])
    page.open()
    page.one("#settings-button").click()
    page.wait_text("RPC1\nconnected", "#devices")
    ask(page, "300")
    page.wait_text("300 tokens", "#log")
    page.wait(lambda: page.text("#devices").count("busy") == 2)
    told = page.text("#devices")
    for words in ("layers 0 to 2", "layers 3 to 5 and the output", "direct from RPC0", "weights"):
        assert words in told
    # what is stopped has its slot no longer
    ask(page, "")
    page.type(Keys.ESCAPE)
    page.wait_text("stopped", "#log")
    told = ["#totals", "#busy-slots"]
    page.wait(lambda: [page.text(place)[:9] for place in told] == ["2 answers", "0/2"])
    # a worker's process dies under an answer, which goes on
    ask(page, "1500")
    worker = children(server.process.pid)[-1]
    for pid in family(worker):
        kill(pid)
    page.wait(lambda: not page.all(".growing"))
    assert "1500 tokens" in page.text("article.answer")
    page.wait_text("tokens read again", "#losses")
    page.picture("served")
    assert page.strangers() == page.complaints() == []
    driver.get("about:blank")
