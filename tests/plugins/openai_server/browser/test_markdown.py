"""Markdown on the page: what it shows, and that nothing in it does anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from page_browser import answer_with, ask, await_end, open_page
from playwright.sync_api import Browser, Page, expect
from served import Served

TEXT = """# Title

Some **bold**, *soft*, ~~gone~~, `code`, [link](https://a.example/b?c=1&d=2), <b>raw</b>.

1. one
2. two
   - deep

- [x] done

> quote

```python
def f(x):
    return x < 2 & 1
```

| a | b |
|---|--:|
| 1 | 2 |

![picture](https://a.example/p.png)
"""
HOSTILE = (
    "<script>hit()</script>",
    "<SCRIPT SRC=//a.example/x.js></SCRIPT>",
    "<scr<script>ipt>hit()</scr</script>ipt>",
    "<img src=x onerror=hit()>",
    '<img src="https://a.example/x.png">',
    "<svg onload=hit()>",
    "<svg><script>hit()</script></svg>",
    '<svg><a xlink:href="javascript:hit()"><text>x</text></a></svg>',
    "<svg><animate onbegin=hit() attributeName=x dur=1s>",
    '<math><mtext></p><style><img src=x onerror="hit()"></style></mtext></math>',
    "<math><mi//xlink:href='data:x,<script>hit()</script>'>",
    '<form><math><mtext></form><form><mglyph><style></math><img src onerror="hit()">',
    "<iframe src=javascript:hit()></iframe>",
    "<iframe srcdoc='<script>parent.hit()</script>'></iframe>",
    "<object data=https://a.example/x></object><embed src=https://a.example/x>",
    "<link rel=stylesheet href=https://a.example/x.css>",
    "<style>@import 'https://a.example/x.css'; body { display: none }</style>",
    "<div style=\"background: url('https://a.example/x.png')\">x</div>",
    "<base href=https://a.example/>",
    "<meta http-equiv=refresh content='0;url=https://a.example/'>",
    "<form action=https://a.example/><input name=x><button>Send</button></form>",
    "<video src=https://a.example/x autoplay></video><audio src=https://a.example/y></audio>",
    "<details open ontoggle=hit()>x</details>",
    "<body onload=hit()><input autofocus onfocus=hit()><marquee onstart=hit()>",
    "<template><script>hit()</script></template><noscript><img src=x onerror=hit()></noscript>",
    "<a href=javascript:hit()>x</a><a id=element name=ask href=#>x</a>",
    "<!--><script>hit()</script>-->",
    "<![CDATA[<script>hit()</script>]]><?xml <script>hit()</script> ?>",
    "</div></main></body><script>hit()</script>",
    "[x](javascript:hit())",
    "[x](JaVaScRiPt:hit())",
    "[x](java&#x73;cript:hit())",
    "[x](&#1;javascript:hit())",
    "[x](java%0ascript:hit())",
    "[x](<java\tscript:hit()>)",
    "[x](vbscript:hit())",
    "[x](data:text/html;base64,PHNjcmlwdD5oaXQoKTwvc2NyaXB0Pg==)",
    "[x](blob:https://a.example/x) [x](file:///etc/passwd) [x](//a.example) [x](/live)",
    '[x](https://a.example/"onmouseover="hit()) [x](https://a.example "t" onclick=hit())',
    "![x](javascript:hit()) ![x](https://a.example/x.png) ![x](data:image/svg+xml,<svg/>)",
    '![x" onerror="hit()](https://a.example/x.png) ![<img src=x onerror=hit()>](x)',
    "[x][y]\n\n[y]: javascript:hit()",
    "<javascript:hit()> <https://a.example/<script>hit()</script>>",
    "`<img src=x onerror=hit()>`",
    '```"><img/src=x/onerror=hit()>\n<script>hit()</script>\n```',
    "```html\n</code></pre><script>hit()</script>\n```",
    "| <script>hit()</script> | [x](javascript:hit()) |\n|-|-|\n| <img src=x onerror=hit()> | y |",
    "# <script>hit()</script> [x](javascript:hit())\n\n> <img src=x onerror=hit()>",
    "- <svg onload=hit()>\n  <script>hit()</script>\n- [ ] <input type=image src=x onerror=hit()>",
    "$\\href{javascript:hit()}{x}$ $\\class{turn}{x}$ $\\id{prompt}{x}$ $\\label{prompt}x$",
    "$\\includegraphics{https://a.example/x.png}$ $\\url{https://a.example}$ $\\style{x}{y}$",
    "$\\text{<img src=x onerror=hit()>}$ $\\color{url(https://a.example)}x$ $\\data{x=y}{x}$",
    "$$\n<script>hit()</script>\n$$\n\n$\\def\\x{\\x\\x}\\x$ \\(" + "{" * 4000 + "\\)",
    "```js\nhit(`</code><script>hit()</script>`) // <img src=x onerror=hit()>\n```",
    "$$\\href{javascript:hit()}{x}$$ {{constructor.constructor('hit()')()}}",
    "&lt;script&gt;hit()&lt;/script&gt; \\<script>hit()\\</script>",
    "[a](https://a.example/`<script>hit()</script>`) **<b onclick=hit()>** _<i onclick=hit()>_",
    ">" * 3000 + "<img src=x onerror=hit()>",
    "\x00<scr\x00ipt>hit()</script>\ufeff<img src=x onerror=hit()>",
)
"""Markdown that would run a script, load something or change the page if it were taken as it is."""
INSPECT = """() => {
    const found = { tags: new Set(), attributes: new Set(), links: new Set(), hit: window.wasHit };
    for (const node of document.querySelectorAll("#log .turn.assistant *")) {
        found.tags.add(node.localName);
        for (const { name } of node.attributes) found.attributes.add(`${node.localName} ${name}`);
        if (node.href !== undefined) found.links.add(node.getAttribute("href"));
    }
    return Object.fromEntries(Object.entries(found).map(
        ([name, value]) => [name, value instanceof Set ? [...value] : value]));
}"""
MATH_TAGS = set(
    "math mrow mi mn mo ms mtext mspace mfrac msqrt mroot msup msub msubsup munder mover munderover"
    " mmultiscripts mprescripts none mtable mtr mtd mstyle mpadded mphantom".split()
)
MATH_ATTRIBUTES = set(
    "display displaystyle scriptlevel mathvariant stretchy fence separator form lspace rspace"
    " minsize maxsize largeop movablelimits symmetric accent accentunder width linethickness"
    " height depth voffset columnspan rowspan mathcolor style".split()
)
TAGS = {
    *MATH_TAGS,
    *("div", "span", "button", "details", "summary"),  # the page's own
    *("h1", "h2", "h3", "h4", "h5", "h6", "p", "br", "hr", "blockquote", "ul", "ol", "li"),
    *("pre", "code", "em", "strong", "del", "a", "table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {
    *(f"{tag} {name}" for tag in MATH_TAGS for name in MATH_ATTRIBUTES),
    *("span data-math", "span tabindex", "div hidden", "div aria-live"),
    *("a href", "a target", "a rel", "th align", "td align", "ol start", "code data-language"),
    *("div class", "span class", "details class", "details open", "details hidden"),
    *("button type", "button class", "button aria-label", "pre tabindex", "div tabindex"),
}


FORMULAS = r"""Money: $5 and $6, or $7. `$x$` \$y\$

Inline $O(n \log n)$ and \(\sqrt{2}\), no formula: $\nothing{x}$.

A block:
$$
a
- b
= \frac{1}{2}
$$
\[ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} \tag{1} \]
"""


def import_answers(page: Page, *turns: dict[str, Any]) -> None:
    content = {
        "format": "headstock-conversations",
        "version": 1,
        "conversations": [{"title": turns[0].get("content", ""), "turns": turns}],
    }
    file = {"name": "x.json", "mimeType": "", "buffer": json.dumps(content).encode()}
    page.locator("#import-file").set_input_files(file)  # type: ignore[arg-type]


def test_an_answer_is_shown_as_markdown_while_it_comes(browser: Browser, server: Served) -> None:
    pieces = [{"content": TEXT[at : at + 5]} for at in range(0, len(TEXT), 5)]
    with open_page(browser, server, permissions=["clipboard-write", "clipboard-read"]) as page:
        answer_with(page, *pieces)
        ask(page, "Show it")
        await_end(page)
        text = page.locator(".turn.assistant > .text")
        for tag, content in {
            "h1": "Title",
            "strong": "bold",
            "p em": "soft",
            "del": "gone",
            "p code": "code",
            "ol > li ul > li": "deep",
            "blockquote": "quote",
            "pre code": "def f(x):\n    return x < 2 & 1",
            "td:nth-child(2)": "2",
        }.items():
            expect(text.locator(tag)).to_have_text(content)
        expect(text).to_contain_text("<b>raw</b>")
        expect(text).to_contain_text("☑ done")
        expect(text.locator("td").nth(1)).to_have_attribute("align", "right")
        expect(text.locator(".code-head span")).to_have_text("python")
        link = text.get_by_role("link", name="link")
        expect(link).to_have_attribute("href", "https://a.example/b?c=1&d=2")
        expect(link).to_have_attribute("rel", "noopener noreferrer")
        expect(text.get_by_role("link", name="picture")).to_be_visible()
        page.get_by_role("button", name="Copy code").click()
        expect(page.get_by_role("button", name="Copy code")).to_have_text("Copied")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == "def f(x):\n    return x < 2 & 1"


def test_formulas_and_code_are_shown_as_such(browser: Browser, server: Served) -> None:
    code = "```python\ndef f(x):\n    return 'a' < x  # why\n```\n\n```strange\nreturn\n```"
    text = f"{FORMULAS}\n{code}\n"
    with open_page(browser, server) as page:
        answer_with(page, *({"content": text[at : at + 7]} for at in range(0, len(text), 7)))
        ask(page, "Show it")
        await_end(page)
        answer = page.locator(".turn.assistant > .text")
        expect(answer.locator("p").first).to_have_text("Money: $5 and $6, or $7. $x$ $y$")
        expect(answer.locator("math")).to_have_count(4)
        expect(answer.locator("[data-math=block] math")).to_have_count(2)
        expect(answer.locator("msqrt")).to_have_text("2")
        expect(answer.locator("mfrac")).to_have_text("12")
        expect(answer).to_contain_text(r"no formula: $\nothing{x}$.")
        expect(answer.locator(".hljs-keyword")).to_have_text(["def", "return"])
        expect(answer.locator(".hljs-string")).to_have_text("'a'")
        expect(answer.locator(".hljs-comment")).to_have_text("# why")
        expect(answer.locator("pre").last).to_have_text("return")


@pytest.mark.feature("W13")
def test_hostile_markdown_runs_loads_and_shows_nothing_of_its_own(
    browser: Browser, server: Served
) -> None:
    with open_page(browser, server) as page:
        requests: list[str] = []
        page.evaluate("() => { window.hit = () => { window.wasHit = true; }; }")
        page.on("request", lambda request: requests.append(request.url))
        page.on("dialog", lambda dialog: requests.append(dialog.message))
        call = dict.fromkeys(("id", "name", "arguments"), "<img src=x onerror=hit()>")
        import_answers(
            page,
            *({"role": "assistant", "content": text, "reasoning": text} for text in HOSTILE),
            {"role": "assistant", "content": "".join(HOSTILE)},
            {"role": "assistant", "content": "\n\n".join(HOSTILE), "facts": HOSTILE[0]},
            {"role": "assistant", "content": "the last", "tool_calls": [call]},
        )
        expect(page.locator(".turn.assistant > .text").last).to_have_text("the last")
        expect(page.locator(".turn.assistant")).to_have_count(len(HOSTILE) + 3)
        for each in page.get_by_text("Reasoning", exact=True).all()[:5]:
            each.click()
        page.wait_for_timeout(500)
        found = page.evaluate(INSPECT)
        assert set(found["tags"]) <= TAGS and set(found["attributes"]) <= ATTRIBUTES
        assert len(found["links"]) > 3
        assert all(each.startswith(("https://", "http://", "mailto:")) for each in found["links"])
        assert found["hit"] is None and requests == []
        assert page.title() == "headstock" and page.locator("script").count() == 1


def test_hostile_markdown_in_pieces_is_as_harmless(browser: Browser, server: Served) -> None:
    text = "\n\n".join(each for each in HOSTILE if len(each) < 1000)
    with open_page(browser, server) as page:
        page.evaluate("() => { window.hit = () => { window.wasHit = true; }; }")
        answer_with(page, *({"content": text[at : at + 3]} for at in range(0, len(text), 3)))
        ask(page, "Show it")
        await_end(page)
        found = page.evaluate(INSPECT)
        assert set(found["tags"]) <= TAGS and set(found["attributes"]) <= ATTRIBUTES
        assert found["hit"] is None


def test_markdown_that_is_nested_too_deeply_is_text(browser: Browser, server: Served) -> None:
    text = ">" * 30000
    with open_page(browser, server) as page:
        answer_with(page, {"content": text})
        ask(page, "Show it")
        await_end(page)
        expect(page.locator(".turn.assistant > .text")).to_have_text(text)
