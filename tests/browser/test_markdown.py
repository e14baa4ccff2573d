"""What the chat page makes of an answer's Markdown."""

from collections.abc import Iterator
from typing import Any

import pytest
from selenium import webdriver

from tests.helpers.http_serving import serving


@pytest.fixture(scope="module")
def page(chrome: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    with serving() as server:
        chrome.get(server.address)
        chrome.execute_async_script(
            "const done = arguments[0];"
            "Promise.all([import('/page/elements.js'), import('/page/markdown.js')])"
            ".then((modules) => { Object.assign(window, ...modules); done(); });"
        )
        yield chrome


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
        (
            "> a\n> > b\nc",
            "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
        ),
        ("a\n\n---\n* * *\nb", "<p>a</p><hr><hr><p>b</p>"),
        ("**unfinished", "<p>**unfinished</p>"),
        ("<b>a</b> &amp;", "<p>&lt;b&gt;a&lt;/b&gt; &amp;amp;</p>"),
    ],
)
def test_markdown(page: webdriver.Chrome, text: str, html: str) -> None:
    assert shown(page, text, "node.innerHTML") == html


WHERE = 'target="_blank" title="{0}" rel="noopener noreferrer nofollow"'


@pytest.mark.parametrize(
    ("text", "label", "target", "after"),
    [
        ("https://a.org/b_c_d.", "https://a.org/b_c_d", "https://a.org/b_c_d", "."),
        ("<https://a.org/>", "https://a.org/", "https://a.org/", "&gt;"),
        ("[a *b*](http://a.org/c_(d))", "a *b*", "http://a.org/c_(d)", "<small> (a.org)</small>"),
        (
            "[https://bank.org](https://evil.org/x)!",
            "https://bank.org",
            "https://evil.org/x",
            "<small> (evil.org)</small>!",
        ),
    ],
)
def test_a_link_says_where_it_leads(
    page: webdriver.Chrome, text: str, label: str, target: str, after: str
) -> None:
    before = "&lt;" if text.startswith("<") else ""
    where = WHERE.format(target)
    html = f'<p>{before}<a href="{target}" {where}>{label}</a>{after}</p>'
    assert shown(page, text, "node.innerHTML") == html


@pytest.mark.parametrize(
    "target",
    [
        "javascript:alert`1`",
        "JAVASCRIPT:alert`1`",
        "data:text/html,<b>a</b>",
        "file:///etc/passwd",
        "//evil.org",
        "/v1/models",
        "https://bank.org@evil.org/",
        "https://user:secret@evil.org/",
        "blob:https://a.org/1",
    ],
)
def test_what_leads_nowhere_safe_is_no_link(page: webdriver.Chrome, target: str) -> None:
    text = f"[click]({target}) ![image]({target})"
    links = shown(page, text, "[...node.querySelectorAll('a')].map((each) => each.href)")
    assert [link for link in links if link != "https://bank.org"] == []
    assert shown(page, text, "node.querySelectorAll('img').length") == 0
    assert shown(page, text, "node.textContent") == text


def test_a_table(page: webdriver.Chrome) -> None:
    text = "so:\n| a | *b* | c |\n|---|:-:|--:|\n| 1 | x \\| y | `3` | 4 |\n| 2\n\nafter"
    html = shown(page, text, "node.innerHTML")
    assert html == (
        '<p>so:</p><div class="table" tabindex="0" role="group" aria-label="Table"><table>'
        '<thead><tr><th class="">a</th>'
        '<th class="center"><em>b</em></th><th class="right">c</th></tr></thead><tbody>'
        '<tr><td class="">1</td><td class="center">x | y</td><td class="right"><code>3</code></td>'
        '</tr><tr><td class="">2</td><td class="center"></td><td class="right"></td></tr></tbody>'
        "</table></div><p>after</p>"
    )


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


def test_a_model_that_repeats_itself_does_not_hang_the_page(page: webdriver.Chrome) -> None:
    repeated = (
        *("*", "**a ", "***", "*a", "`", "``a", "_a", "- ", "1. ", "# ", "```\n", "  - a\n", ">"),
        *("[", "[a](", "[a](b(", "https://", "http://.", "|", "|-", "| a\n", "a|b\n-|-\n", "> - "),
    )
    for text in repeated:
        assert shown(page, text * 5000, "node.childNodes.length") > 0
    # Spaces are where such an expression would search longest.
    for text in ("a|b\n-|-" + " " * 50_000 + "x", "*a" + " " * 50_000, "#" + " " * 50_000 + "\n"):
        assert shown(page, text, "node.childNodes.length") > 0


def test_lists_and_quotes_are_built_only_so_deep(page: webdriver.Chrome) -> None:
    depth = "(function deep(e) { return 1 + Math.max(0, ...[...e.children].map(deep)); })(node)"
    for text in ("> " * 5000 + "a", "- " * 5000 + "a", "> - " * 2500 + "a"):
        assert shown(page, text, depth) < 20
        assert shown(page, text, "node.textContent").endswith("a")
