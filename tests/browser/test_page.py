"""The page in a real browser: used by keyboard, in both themes and at both widths."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys

from browser.chromium import NARROW, WIDE
from browser.stage import WHOLE

ENTER, TAB, ESCAPE, SHIFT = Keys.ENTER, Keys.TAB, Keys.ESCAPE, Keys.SHIFT


def test_an_answer_by_keyboard(page, model):
    page.open()
    page.wait_text("smollm2", "#model")
    assert page.focus() == "prompt"
    page.type("How do I", SHIFT + ENTER + Keys.NULL + "reverse a list?", ENTER)
    page.wait_text(WHOLE, "#log")
    assert model.bodies[0]["messages"] == [{"role": "user", "content": "How do I\nreverse a list?"}]
    assert model.bodies[0]["stream"] is True and model.bodies[0]["model"] == "smollm2"
    # what the model writes is text, whatever it is
    assert "<script>window.bad = 1</script>" in page.text("article.answer")
    assert page.run("return window.bad") is None
    assert page.all("#log img") == page.all("#log script") == []
    assert page.text(".code pre").startswith("def reverse(node):\n    before = None\n")
    assert page.one("#log a").get_attribute("href") == "https://docs.python.org/3/"
    assert page.text("article.answer strong") == "safe"
    assert page.text("article.answer ol li:nth-child(2)").startswith("Or ask reversed,")
    assert "prompt 31, 12 of them cached" in page.text("#log")
    assert page.focus() == "prompt" and page.one("#log").get_attribute("aria-busy") == "false"


def test_an_answer_is_stopped_done_again_and_kept(page, model):
    page.open()
    page.type("endless numbers", ENTER)
    page.wait_text(" 20 ", "#log")
    assert page.text("#send") == "Stop"
    page.type(ESCAPE)
    page.wait(lambda: model.hung_up == 1)
    page.wait_text("stopped", "#log")
    assert page.focus() == "prompt" and page.text("#send") == "Send"
    stopped = page.text("article.answer .text")
    assert stopped.startswith("0 1 2 3")
    page.driver.refresh()
    assert page.text("article.answer .text") == stopped
    # again, and stopped with the button
    page.one("#again").click()
    page.wait_text(" 20 ", "#log")
    page.one("#send").click()
    page.wait(lambda: model.hung_up == 2)
    assert len(page.all("article.answer")) == 1
    first, second = (body["messages"] for body in model.bodies)
    assert first == second == [{"role": "user", "content": "endless numbers"}]


def test_settings_editing_and_clearing(page, model):
    page.open()
    page.one("#settings-button").send_keys(ENTER)
    page.one("#system").send_keys("Be brief.")
    page.one("#temperature").send_keys("0.5", ENTER)
    page.one("#max-tokens").send_keys("40", ENTER)
    assert model.bodies == []
    page.one("#prompt").send_keys("One", ENTER)
    page.wait_text(WHOLE, "#log")
    body = model.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"]) == (0.5, 40)
    page.one("article.own button").send_keys(ENTER)
    assert page.focus() == "prompt" and page.all("article") == []
    page.type(" more", ENTER)
    page.wait_text(WHOLE, "#log")
    assert model.bodies[1]["messages"][1:] == [{"role": "user", "content": "One more"}]
    page.one("#clear").click()
    assert page.all("article") == [] and page.text("#clear") == "Undo"
    page.one("#clear").click()
    assert len(page.all("article")) == 2
    page.driver.refresh()
    assert len(page.all("article")) == 2
    assert page.one("#temperature").get_attribute("value") == "0.5"


@pytest.mark.parametrize(
    ("asked", "told", "logged"),
    [
        ("full", "64 requests are waiting; try again in 7 s", "503"),
        ("breaks", "lost RPC1 at lab2:50052", ""),
    ],
)
def test_what_goes_wrong_is_told(page, model, asked, told, logged):
    page.open()
    page.type(asked, ENTER)
    page.wait_text(told, "#log")
    assert page.text("#send") == "Send"
    # the browser's own line about the status
    assert [logged in line for line in page.complaints()] == ([True] if logged else [])


def test_a_server_that_wants_a_key(page, model):
    model.key = "sesame"
    page.open()
    page.wait(lambda: page.one("#key").is_displayed())
    page.wait_text("The API key that this server wants is missing.", "#cluster")
    assert page.focus() == "key"
    page.type("wrong", ENTER)
    page.wait(lambda: page.one("#key").is_displayed())
    page.type(Keys.CONTROL + "a", Keys.NULL + "sesame", ENTER)
    page.wait_text("smollm2", "#model")
    assert page.focus() == "prompt" and not page.one("#key").is_displayed()
    page.type("Hello", ENTER)
    page.wait_text(WHOLE, "#log")
    assert page.text("#trouble") == ""
    assert all("401" in line for line in page.complaints())


def test_the_cluster(page, view):
    page.open()
    page.wait_text("RPC2", "#devices")
    card = page.text("#devices .card:nth-of-type(2)")
    for words in ("RPC0", "lab1:50052", "layers 0 to 9", "weights 33 MiB", "0.21 ms round trip"):
        assert words in card
    assert "layers 20 to 29 and the output" in page.text("#devices")
    assert "direct from RPC0, 0.11 ms round trip" in page.text("#devices")
    assert "by way of the server: direct copies are off" in page.text("#devices")
    assert page.text("#train").split() == ["RPC0", "RPC1", "RPC2"]
    assert (page.text("#busy-slots"), page.text("#queued")) == ("2/4", "3")
    assert "42 answers, 1 refused" in page.text("#totals")
    assert "1,112 tokens read again" in page.text("#losses")
    for path in page.all("#cluster .curve"):
        assert len(path.get_attribute("d").split("L")) == 60
    view.lost.add("RPC1")
    page.wait_text("the peer closed the connection", "#devices")
    assert "Waiting for RPC1 at lab2:50052 to come back" in page.text("#trouble")
    assert page.one("#news").get_attribute("textContent") == "RPC1 is lost."
    view.lost.clear()
    page.wait(lambda: page.one("#news").get_attribute("textContent") == "RPC1 is back.")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_looks(page, view, size, dark):
    name = f"{size[0]}-{'dark' if dark else 'light'}"
    view.lost.add("RPC1")
    page.open(size, dark)
    page.wait_text("RPC0" if size is WIDE else "Ask the model")
    page.picture(f"{name}-start")
    page.type("How do I reverse a linked list?", ENTER)
    page.wait_text(WHOLE, "#log")
    page.picture(f"{name}-chat")
    assert page.faint() == [] and not page.is_wider_than_the_window()
    if size is NARROW:
        assert not page.one("#cluster").is_displayed()
        page.one("[data-view=cluster]").click()
        assert page.one("#cluster").is_displayed() and not page.one("#chat").is_displayed()
        page.wait_text("RPC0", "#devices")
        page.picture(f"{name}-cluster")
        assert page.faint() == [] and not page.is_wider_than_the_window()


def test_the_theme_is_the_systems_until_another_is_chosen(page):
    page.open(dark=True)
    ground = "return getComputedStyle(document.body).backgroundColor"
    dark = page.run(ground)
    page.one("#theme").send_keys(ENTER)
    light = page.run(ground)
    assert light != dark
    assert page.one("#theme").get_attribute("aria-pressed") == "false"
    page.driver.refresh()
    assert page.run(ground) == light


def test_all_can_be_reached_by_keyboard_and_is_seen_to_be(page):
    page.open()
    page.run("document.querySelector('.skip').focus()")
    seen = []
    while page.run("return document.activeElement !== document.body") and len(seen) < 30:
        style = "getComputedStyle(document.activeElement)"
        assert page.run(f"return {style}.outlineStyle !== 'none'"), seen
        seen.append(page.focus() or page.run("return document.activeElement.className"))
        page.type(TAB)
    order = ["skip", "theme", "log", "prompt", "send", "settings-button", "cluster"]
    assert [name for name in seen if name in order] == order
    page.run("document.querySelector('.skip').focus()")
    page.type(ENTER)
    assert page.focus() == "prompt"
