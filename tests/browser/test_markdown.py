"""What the page makes of the text of a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SCRIPT = """
const [text, done] = arguments;
import("/static/markdown.js").then(({show}) => {
  const place = document.createElement("div");
  show(place, text);
  done(place.innerHTML);
}).catch((error) => done(`failed: ${error}`));
"""
CODE = (
    '<div class="code"><div class="code-head"><span>{}</span>'
    '<button class="plain" type="button">Copy</button></div>'
    '<pre tabindex="0"><code>{}</code></pre></div>'
)


@pytest.fixture(scope="module")
def rendered(driver, stage) -> Callable[[str], str]:
    driver.get(stage[0])
    return lambda text: driver.execute_async_script(SCRIPT, text)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("One\ntwo\n\nthree", "<p>One\ntwo</p><p>three</p>"),
        ("**a *b* c** `d*e*`", "<p><strong>a <em>b</em> c</strong> <code>d*e*</code></p>"),
        ("2*3*4, snake_case_name, a * b * c", "<p>2*3*4, snake_case_name, a * b * c</p>"),
        ("**not closed, `nor this", "<p>**not closed, `nor this</p>"),
        ("# A\n### B\ntext", "<h3>A</h3><h5>B</h5><p>text</p>"),
        (
            "- a\n- b\n  - c\n- d",
            "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
        ),
        ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        (
            "1. a\n   ```\n   x\n   ```",
            f'<ol start="1"><li><p>a</p>{CODE.format("", "x")}</li></ol>',
        ),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        (
            "```py\nif a:\n\n    b\n```\nc",
            f"{CODE.format('py', 'if a:' + chr(10) * 2 + '    b')}<p>c</p>",
        ),
        ("~~~\nnot closed <b>", CODE.format("", "not closed &lt;b&gt;")),
        (
            "<img src=x onerror=alert(1)> &amp;",
            "<p>&lt;img src=x onerror=alert(1)&gt; &amp;amp;</p>",
        ),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        (
            "[x](https://host/?a#b)",
            '<p><a href="https://host/?a#b" target="_blank" rel="noopener noreferrer">x</a></p>',
        ),
        ("", ""),
    ],
)
def test_elements_of_a_text(rendered, text, html):
    found = rendered(text)
    assert found == html


@pytest.mark.parametrize(
    "text",
    [
        *(
            mark * 20_000
            for mark in ("*", "`", "[", ">", "- ", "#", "~", "* a", "**a ", "`a", "\n")
        ),
        "- a\n" + "\n" * 5000,
        "# " + " #" * 10_000,
        " " * 20_000 + "x",
        "[a](https://" * 3000,
    ],
    ids=lambda text: repr(text[:6]),
)
def test_a_model_that_repeats_itself_stops_nothing(rendered, text):
    """The driver's own bound of 30 s is for those that would go on for ever."""
    assert not rendered(text).startswith("failed")
