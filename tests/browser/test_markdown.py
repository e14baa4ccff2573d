"""What the chat page makes of an answer's Markdown."""

from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

PAGE = Path(__file__).parents[2] / "shardmlx" / "server" / "pages" / "chat.html"


@pytest.fixture(scope="module")
def page(chrome: webdriver.Chrome) -> webdriver.Chrome:
    """The page as a file: this much works without a server."""
    chrome.get(PAGE.as_uri())
    return chrome


def shown(page: webdriver.Chrome, text: str, read: str) -> Any:
    """``read`` is JavaScript on the ``node`` that shows the text."""
    script = f"const node = element('div'); show(node, arguments[0]); return {read}"
    return page.execute_script(script, text)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
        ("# A *b*", "<h3>A <em>b</em></h3>"),
        ("**a *b*** c_d_e 2 * 3", "<p><strong>a <em>b</em></strong> c_d_e 2 * 3</p>"),
        ("`**a**` ``b`c`` \\*d\\*", "<p><code>**a**</code> <code>b`c</code> *d*</p>"),
        (
            "- a\n  - b\n- c",
            "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li><p>c</p></li></ul>",
        ),
        ("2. a\n\n   b", '<ol start="2"><li><p>a</p><p>b</p></li></ol>'),
        ("- a\n1. b", '<ul><li><p>a</p></li></ul><ol start="1"><li><p>b</p></li></ol>'),
        ("- a\n\nb", "<ul><li><p>a</p></li></ul><p>b</p>"),
        ("**unfinished", "<p>**unfinished</p>"),
        ("<b>a</b> &amp;", "<p>&lt;b&gt;a&lt;/b&gt; &amp;amp;</p>"),
    ],
)
def test_markdown(page: webdriver.Chrome, text: str, html: str) -> None:
    assert shown(page, text, "node.innerHTML") == html


def test_code_is_shown_as_it_is_even_before_its_end(page: webdriver.Chrome) -> None:
    code = "```python\nif a:\n    *b* = 1\n"
    read = "node.querySelector('pre').textContent"
    assert shown(page, code, read) == "if a:\n    *b* = 1\n"
    assert shown(page, code + "```\nafter", read) == "if a:\n    *b* = 1"


def test_what_stands_is_left_alone_when_more_text_comes(page: webdriver.Chrome) -> None:
    script = """
        const node = element('div');
        show(node, 'one\\n\\n- a');
        const first = node.firstChild;
        show(node, 'one\\n\\n- a\\n- b\\n\\nthree');
        return [node.firstChild === first, node.innerHTML];
    """
    same, html = page.execute_script(script)
    assert same
    assert html == "<p>one</p><ul><li><p>a</p></li><li><p>b</p></li></ul><p>three</p>"


@pytest.mark.parametrize("text", ["*", "**a ", "`", "_a", "- ", "1. ", "# ", "```\n", "  - a\n"])
def test_a_model_that_repeats_itself_does_not_hang_the_page(
    page: webdriver.Chrome, text: str
) -> None:
    assert shown(page, text * 5000, "node.childNodes.length") > 0
