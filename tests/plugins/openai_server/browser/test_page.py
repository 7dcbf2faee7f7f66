"""The page at `/` in a headless Chromium: chat, live view, keyboard, key and both themes."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from page_browser import answer_with, ask, fill_setting, open_page
from playwright.sync_api import Browser, Page, expect
from served import Served, serve

PICTURE = "HEADSTOCK_PICTURE"
"""The variable with a path to which the picture of the README is written."""


@pytest.mark.feature("W13")
def test_an_answer_comes_as_a_stream_and_the_chat_goes_on(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        expect(page.locator("#model")).to_have_text("demo")
        expect(page.get_by_role("textbox", name="Message")).to_be_focused()
        fill_setting(page, "Temperature", "0")
        ask(page, "What is 2 + 3?")
        answer = page.locator(".turn.assistant")
        expect(answer).to_contain_text("5")
        expect(answer.locator(".facts")).to_contain_text(re.compile(r"first token .* tokens/s"))
        ask(page, "What is 4 + 4?")
        expect(page.locator(".turn.assistant")).to_have_count(2)
        expect(page.locator(".turn.assistant .facts").nth(1)).to_contain_text("stop")
        assert server.wait_for_line(path="/v1/chat/completions")["status"] == 200
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 700)])
def test_a_long_chat_scrolls_above_the_message_field(
    browser: Browser, server: Served, width: int, height: int
) -> None:
    with open_page(browser, server, viewport={"width": width, "height": height}) as page:
        fill_setting(page, "Max tokens", "60")
        page.get_by_role("button", name="Close").locator("visible=true").click()
        for number in range(1, 7):
            ask(page, f"Tell story {number} of a girl and a dog.")
            expect(page.locator(".turn.assistant .facts")).to_have_count(number)
            expect(page.get_by_role("button", name="Send")).to_be_enabled()
        boxes = [
            page.locator(name).bounding_box() for name in ("#prompt", "#send", ".facts >> nth=-1")
        ]
        assert all(box and box["y"] >= 0 and box["y"] + box["height"] <= height for box in boxes)
        assert page.evaluate("document.documentElement.scrollHeight") <= height
        log = page.locator("#log")
        assert log.evaluate("log => log.scrollHeight - log.clientHeight") > 0
        log.evaluate("log => { log.scrollTop = 0; }")
        expect(page.locator(".turn").first).to_be_in_viewport()
        answer_with(page, {"content": "Yes."})
        ask(page, "Is it so?")
        expect(page.locator(".facts").last).to_be_in_viewport()


@pytest.mark.parametrize(("width", "columns"), [(1280, 5), (390, 2)])
def test_the_live_view_opens_full_and_in_even_rows(
    browser: Browser, server: Served, width: int, columns: int
) -> None:
    body = {"prompt": "Tom had a ball.", "max_tokens": 30, "ignore_eos": True, "stream": True}
    assert server.post("/v1/completions", body).status == 200
    while not sum(server.get("/live").json["history"]["output_rate"]):
        time.sleep(0.2)
    with open_page(browser, server, viewport={"width": width, "height": 844}) as page:
        page.get_by_role("tab", name="Live").click()
        # The first answer has all: before it there are no figures.
        caption = page.locator("figure[data-name=output_rate] figcaption")
        expect(caption).to_have_text(re.compile("Output tokens/s: [0-9.]+, at most [1-9]"))
        drawn = painted(page, "figure[data-name=output_rate] canvas")
        assert {colour(page, "--line"), colour(page, "--accent")} <= drawn
        # At once, since each poll makes new tiles.
        tops = page.locator("#tiles div").evaluate_all("tiles => tiles.map((t) => t.offsetTop)")
        assert len(tops) == 10 and set(Counter(tops).values()) == {columns}
        expect(page.locator("#model")).to_be_in_viewport()
        assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("height", [500, 900])
def test_the_live_view_scrolls_to_its_end(browser: Browser, server: Served, height: int) -> None:
    with open_page(browser, server, viewport={"width": 390, "height": height}) as page:
        page.get_by_role("tab", name="Live").click()
        page.locator("#charts").scroll_into_view_if_needed()
        expect(page.locator("#charts figure").last).to_be_visible()
        page.locator("#charts figure").last.scroll_into_view_if_needed()
        expect(page.locator("#charts figure").last).to_be_in_viewport(ratio=0.9)


def test_the_rate_of_an_answer_is_the_servers(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        answer_with(page, {"content": "Yes."})
        ask(page, "Is it so?")
        facts = page.locator(".turn.assistant .facts")
        expect(facts).to_contain_text("first token 250 ms · 21 tokens · 10 tokens/s")


def test_escape_stops_an_answer_and_frees_its_pages(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        ask(page, "Tell a long story about a girl and a dog.")
        expect(page.locator(".turn.assistant > .text")).to_have_text(re.compile(r"\w{2}"))
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        server.wait_for("headstock_kv_pages_live", 0)


def test_a_wrong_field_shows_the_servers_own_words(browser: Browser, server: Served) -> None:
    with open_page(browser, server, fine="400") as page:
        fill_setting(page, "Temperature", "9")
        ask(page, "Hello")
        expect(page.locator(".turn.error")).to_contain_text(
            "temperature: expected a number between 0 and 2"
        )


def test_a_question_without_an_answer_stays_and_is_sent_once(
    browser: Browser, server: Served
) -> None:
    question, sent = "What is 2 + 3?", list[Any]()
    with open_page(browser, server, fine="400") as page:
        page.on(
            "request",
            lambda request: sent.append(request.post_data_json) if request.method == "POST" else 0,
        )
        fill_setting(page, "Temperature", "9")
        ask(page, question)
        expect(page.locator(".turn.error")).to_contain_text(
            "temperature: expected a number between 0 and 2"
        )
        expect(page.locator(".turn.user.unanswered > .text")).to_have_text(question)
        expect(page.get_by_role("textbox", name="Message")).to_have_value(question)
        fill_setting(page, "Temperature", "0")
        page.get_by_role("textbox", name="Message").press("Enter")
        expect(page.locator(".turn.assistant")).to_contain_text("5")
        expect(page.get_by_role("textbox", name="Message")).to_have_value("")
        expect(page.locator(".turn.user")).to_have_count(2)
        assert [each["messages"] for each in sent] == [[{"role": "user", "content": question}]] * 2


@pytest.mark.feature("W13")
def test_what_a_model_writes_is_never_html(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        hostile = "<img src=x onerror=document.title='bad'>"
        ask(page, hostile)
        expect(page.locator(".turn.user > .text")).to_have_text(hostile)
        assert page.locator("img").count() == 0 and page.title() == "headstock"


def test_views_and_themes_are_reached_by_keys(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        page.locator("#log").focus()
        page.keyboard.press("l")
        expect(page.locator("#live")).to_be_visible()
        expect(page.get_by_role("tab", name="Live")).to_have_attribute("aria-selected", "true")
        page.get_by_role("tab", name="Live").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#chat")).to_be_visible()
        expect(page.get_by_role("tab", name="Chat")).to_be_focused()
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.keyboard.press("d")
        after = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert before != after
        page.reload()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after
    with open_page(browser, server, color_scheme="dark") as page:
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after


def painted(page: Page, canvas: str) -> set[str]:
    """The colours of a canvas."""
    script = """canvas => {
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const colours = new Set();
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] === 255) colours.add([data[i], data[i + 1], data[i + 2]].join());
        return [...colours];
    }"""
    return set(page.locator(canvas).evaluate(script))


def colour(page: Page, name: str) -> str:
    """A colour of the page's style, as pixels have it."""
    text = page.evaluate(
        "name => getComputedStyle(document.documentElement).getPropertyValue(name)", name
    ).strip()
    return ",".join(str(int(text[i : i + 2], 16)) for i in (1, 3, 5))


@pytest.mark.feature("W13")
def test_the_live_view_shows_what_runs(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        page.get_by_role("tab", name="Live").click()
        tiles = page.locator("#tiles")
        expect(tiles).to_contain_text("KV pool in use")
        text = "Once upon a time there was a little girl who lived near the woods with her dog."
        body = {"prompt": text, "n": 3, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        others = body | {"prompt": "Tom had a red ball.", "n": 1}
        with server.post_raw("/v1/completions", body), server.post_raw("/v1/completions", others):
            expect(tiles.locator("div", has_text="Running").locator("dd")).to_have_text("4")
            expect(page.locator("#tree-note")).to_contain_text("4 requests save")
            expect(page.locator("#charts figcaption").first).to_contain_text(
                re.compile(r"Output tokens/s: [1-9]")
            )
            page.wait_for_timeout(1500)
            assert colour(page, "--decode") in painted(page, "#lanes")
            wanted = {colour(page, name) for name in ("--free", "--one", "--shared")}
            assert wanted <= painted(page, "#pages")
            assert colour(page, "--shared") in painted(page, "#tree")
            if os.environ.get(PICTURE):
                page.wait_for_timeout(4000)
                page.screenshot(path=Path(os.environ[PICTURE]))
        expect(tiles.locator("div", has_text="Running").locator("dd")).to_have_text("0")
        expect(page.locator("#tree-note")).to_have_text("nothing runs")


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser) -> None:
    script = {"interval": 0.01}
    with (
        serve(key="secret", script=script) as server,
        open_page(browser, server, fine="401", viewport={"width": 390, "height": 844}) as page,
    ):
        expect(page.get_by_label("API key")).to_be_visible()
        for name in ("#key", "#login button", "#key-note"):
            box = page.locator(name).bounding_box()
            assert box and box["x"] >= 0 and box["x"] + box["width"] <= 390
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        expect(page.locator("#status")).to_contain_text("a valid key is needed")
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("demo")
        expect(page.locator("#login")).to_be_hidden()
        ask(page, "Hello")
        expect(page.locator(".turn.assistant")).to_contain_text("Once upon a time")
        page.reload()
        expect(page.locator("#model")).to_have_text("demo")
