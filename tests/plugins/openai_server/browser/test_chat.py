"""The chat of the page: conversations that stay, settings, turns, tool calls, export and import."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from page_browser import answer_with, ask, await_end, fill_setting, open_page, open_settings
from playwright.sync_api import Browser, Page, expect
from served import Served

NAMES = "#conversations .name"
TEXT = "# One\n\n[a](https://a.example) `b`\n\n> c\n\n```x\ny\n```"


def import_text(page: Page, text: str) -> None:
    page.locator("#import-file").set_input_files(
        {"name": "chats.json", "mimeType": "application/json", "buffer": text.encode()}
    )


def wrap(*conversations: Any) -> str:
    return json.dumps(
        {"format": "headstock-conversations", "version": 1, "conversations": conversations}
    )


@pytest.mark.feature("W13")
def test_conversations_stay_and_are_named_and_deleted(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        answer_with(page, {"content": "One."})
        ask(page, "First question")
        await_end(page)
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        ask(page, "Second question")
        await_end(page)
        expect(page.locator(NAMES)).to_have_text(["Second question", "First question"])
        page.get_by_role("button", name="Rename First question").click()
        page.keyboard.type("Renamed")
        page.keyboard.press("Enter")
        page.reload()
        expect(page.locator(NAMES)).to_have_text(["Second question", "Renamed"])
        expect(page.locator(".turn.user > .text")).to_have_text("Second question")
        page.get_by_role("button", name="Renamed", exact=True).click()
        expect(page.locator(".turn.user > .text")).to_have_text("First question")
        expect(page.locator(".turn.assistant > .text")).to_have_text("One.")
        expect(page.locator(".facts")).to_contain_text("first token 250 ms · 21 tokens")
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete Renamed").click()
        expect(page.locator(NAMES)).to_have_text(["Second question"])
        expect(page.locator(".turn")).to_have_count(0)
        page.reload()
        expect(page.locator(NAMES)).to_have_text(["Second question"])


def test_an_answer_comes_to_its_own_conversation(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        ask(page, "Tell a long story about a girl and a dog.")
        expect(page.locator(".turn.assistant > .text")).to_have_text(re.compile(r"\w{2}"))
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#conversations [aria-busy]")).to_have_count(0, timeout=600_000)
        expect(page.locator(".turn")).to_have_count(0)
        page.locator(NAMES).click()
        expect(page.locator(".turn.assistant .facts")).to_contain_text("tokens/s")


def test_a_tab_shows_what_another_one_kept(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        answer_with(page, {"content": "One."})
        ask(page, "First")
        await_end(page)
        other = page.context.new_page()
        other.goto(page.url)
        answer_with(other, {"content": "Two."})
        other.locator(NAMES).click()
        ask(other, "Second")
        await_end(other)
        expect(other.locator(".turn")).to_have_count(4)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(page.locator(".turn > .text")).to_have_text(["First", "One.", "Second", "Two."])
        page.reload()
        expect(page.locator(".turn")).to_have_count(4)


def test_settings_are_sent_and_stay(browser: Browser, server: Served) -> None:
    values = {
        "Temperature": ("temperature", "0.5", 0.5),
        "Top p": ("top_p", "0.9", 0.9),
        "Top k": ("top_k", "40", 40),
        "Min p": ("min_p", "0.05", 0.05),
        "Max tokens": ("max_tokens", "12", 12),
        "Seed": ("seed", "7", 7),
        "Presence penalty": ("presence_penalty", "0.1", 0.1),
        "Frequency penalty": ("frequency_penalty", "0.2", 0.2),
        "Repetition penalty": ("repetition_penalty", "1.1", 1.1),
        "Stop texts": ("stop", "###\n\\nUser:", ["###", "\nUser:"]),
    }
    wanted = {name: value for name, _, value in values.values()}
    with open_page(browser, server) as page:
        # By the real server, which refuses what it does not know.
        with page.expect_response("**/v1/chat/completions") as plain:
            ask(page, "What is 2 + 3?")
        await_end(page)
        for label, (_, text, _) in values.items():
            fill_setting(page, label, text)
        fill_setting(page, "System prompt", "Be kind.")
        page.reload()
        open_settings(page)
        expect(page.get_by_label("System prompt")).to_have_value("Be kind.")
        with page.expect_response("**/v1/chat/completions") as response:
            ask(page, "What is 3 + 3?")
        await_end(page)
        assert plain.value.request.post_data_json.keys() == {"messages", "stream", "stream_options"}
        body = response.value.request.post_data_json
        assert response.value.status == 200
        assert wanted.items() <= body.items()
        assert [each["role"] for each in body["messages"]] == [
            *("system", "user", "assistant", "user")
        ]
        page.get_by_role("button", name="Reset").click()
        bodies = answer_with(page, {"content": "Yes."})
        ask(page, "Again?")
        await_end(page)
        assert not wanted.keys() & bodies[0].keys()


def test_an_answer_is_made_again_and_turns_are_edited(browser: Browser, server: Served) -> None:
    texts = ".turn > .text"
    with open_page(browser, server, fine="500") as page:
        answer_with(page, {"content": "One."})
        ask(page, "First")
        await_end(page)
        bodies = answer_with(page, {"content": "Two."})
        page.get_by_role("button", name="Regenerate").click()
        expect(page.locator(texts)).to_have_text(["First", "Two."])
        await_end(page)
        assert bodies[0]["messages"] == [{"role": "user", "content": "First"}]
        ask(page, "Second")
        expect(page.locator(texts)).to_have_text(["First", "Two.", "Second", "Two."])
        await_end(page)
        # An error takes nothing away.
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, body="-"))
        page.get_by_role("button", name="Regenerate").locator("visible=true").click()
        expect(page.locator(".turn.error")).to_have_text("the server said 500")
        expect(page.locator(texts)).to_have_text(["First", "Two.", "Second", "Two."])
        # What was said before can be changed without another answer.
        page.get_by_role("button", name="Edit").nth(1).click()
        page.get_by_label("Edited text").fill("Three.")
        page.get_by_role("button", name="Keep").click()
        expect(page.locator(texts)).to_have_text(["First", "Three.", "Second", "Two."])
        bodies = answer_with(page, {"content": "Four."})
        page.get_by_role("button", name="Edit").nth(2).click()
        page.get_by_label("Edited text").fill("Third")
        page.get_by_role("button", name="Ask again").click()
        expect(page.locator(texts)).to_have_text(["First", "Three.", "Third", "Four."])
        await_end(page)
        assert [each["content"] for each in bodies[0]["messages"]] == ["First", "Three.", "Third"]
        page.reload()
        expect(page.locator(texts)).to_have_text(["First", "Three.", "Third", "Four."])


def test_reasoning_is_folded_and_a_call_of_a_tool_gets_its_result(
    browser: Browser, server: Served
) -> None:
    parts: list[dict[str, Any]] = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather"}},
        {"index": 0, "function": {"arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"Paris"}'}},
        {"index": 1, "id": "call_2", "type": "function", "function": {"name": "get_time"}},
    ]
    tool = {"type": "function", "function": {"name": "get_weather"}}
    with open_page(browser, server) as page:
        fill_setting(page, "Tools (JSON)", json.dumps([tool]))
        deltas = [{"reasoning": "Hm, "}, {"reasoning": "weather."}]
        deltas += [{"tool_calls": [part]} for part in parts]
        bodies = answer_with(page, *deltas, reason="tool_calls")
        ask(page, "How is the weather in Paris?")
        await_end(page)
        assert bodies[0]["tools"] == [tool]
        thought = page.locator(".thought > .text")
        expect(thought).to_be_hidden()
        page.get_by_text("Reasoning", exact=True).click()
        expect(thought).to_have_text("Hm, weather.")
        expect(page.locator(".call")).to_contain_text(['"city": "Paris"', "Call of get_time"])
        bodies = answer_with(page, {"content": "It rains."})
        message = page.get_by_role("textbox", name="Message")
        expect(message).to_have_attribute("placeholder", re.compile("Result of get_weather"))
        ask(page, "rain")
        expect(message).to_have_attribute("placeholder", re.compile("Result of get_time"))
        ask(page, "noon")
        expect(page.locator(".turn.assistant > .text").last).to_have_text("It rains.")
        call, *results = bodies[0]["messages"][1:]
        assert call["reasoning"] == "Hm, weather."
        assert [each["function"] for each in call["tool_calls"]] == [
            {"name": "get_weather", "arguments": '{"city": "Paris"}'},
            {"name": "get_time", "arguments": ""},
        ]
        assert results == [
            {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
            {"role": "tool", "content": "noon", "tool_call_id": "call_2"},
        ]
        expect(message).to_have_attribute("placeholder", re.compile("^Message"))
        fill_setting(page, "Tools (JSON)", "[{")
        ask(page, "Again?")
        expect(page.locator(".turn.error")).to_contain_text("tools: not JSON")


@pytest.mark.feature("W13")
def test_an_export_is_imported_elsewhere(browser: Browser, server: Served, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    with open_page(browser, server) as page:
        fill_setting(page, "System prompt", "Be kind.")
        answer_with(page, {"content": "**Yes.**", "reasoning": "Hm."})
        ask(page, "Is it so?")
        await_end(page)
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        download.value.save_as(path)
    with open_page(browser, server) as page:
        for count in (1, 2):  # the second time beside the first
            import_text(page, path.read_text())
            expect(page.locator(NAMES)).to_have_text(["Is it so?"] * count)
        page.reload()
        expect(page.locator(NAMES)).to_have_count(2)
        page.locator(NAMES).last.click()
        expect(page.locator(".turn.assistant > .text strong")).to_have_text("Yes.")
        expect(page.locator(".facts")).to_contain_text("21 tokens")
        expect(page.locator("#system")).to_have_value("Be kind.")


def test_a_file_that_is_no_export_is_refused_with_its_fault(
    browser: Browser, server: Served
) -> None:
    good = {"title": "Good", "turns": [{"role": "user", "content": "x"}]}
    faults: list[tuple[str, str]] = [
        ("{", "the file is not JSON"),
        ("[]", "no export of version 1"),
        ("null", "no export of version 1"),
        (json.dumps({"format": "headstock-conversations", "version": 2}), "no export of version 1"),
        (wrap().replace("[]", "7"), "conversations must be a list"),
        (wrap(good, None), "conversations[1] must be an object"),
        (wrap(good, {"title": 7}), "conversations[1].title must be a text"),
        (wrap(good, {"system": {}}), "conversations[1].system must be a text"),
        (wrap(good, {"turns": {}}), "conversations[1].turns must be a list"),
    ]
    turns: list[tuple[Any, str]] = [
        (None, ".role must be user, assistant or tool"),
        ({"role": "system", "content": "x"}, ".role must be user, assistant or tool"),
        ({"role": "__proto__", "content": "x"}, ".role must be user, assistant or tool"),
        ({"role": ["user"], "content": "x"}, ".role must be user, assistant or tool"),
        ({"role": "user", "content": ["x"]}, ".content must be a text"),
        ({"role": "assistant", "reasoning": 1}, ".reasoning must be a text"),
        ({"role": "assistant", "tool_calls": "x"}, ".tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [1]}, ".tool_calls[0] must be an object"),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, ".tool_calls[0].id must be a text"),
        ({"role": "tool", "tool_call_id": None}, ".tool_call_id must be a text"),
    ]
    faults += [
        (wrap(good, {"turns": [turn]}), f"conversations[1].turns[0]{fault}")
        for turn, fault in turns
    ]
    with open_page(browser, server) as page:
        for count, (text, fault) in enumerate(faults, start=1):
            import_text(page, text)
            expect(page.locator(".turn.error")).to_have_count(count)
            expect(page.locator(".turn.error").last).to_contain_text(fault)
        # Nothing of a file with a fault is kept.
        expect(page.locator(NAMES)).to_have_count(0)
        strange = good | {"id": "x", "updated": 1e300, "__proto__": {"turns": 1}, "more": "y"}
        import_text(page, wrap(strange))
        expect(page.locator(NAMES)).to_have_text(["Good"])


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chat_is_used_by_keyboard_and_can_be_read(
    browser: Browser, server: Served, width: int, height: int, scheme: Any
) -> None:
    viewport: Any = {"width": width, "height": height}
    with open_page(browser, server, viewport=viewport, color_scheme=scheme) as page:
        answer_with(page, {"content": TEXT, "reasoning": "Hm."})
        ask(page, "First")
        await_end(page)
        for name in ("Chats", "Settings"):
            button = page.get_by_role("button", name=name)
            panel = page.locator("#" + str(button.get_attribute("aria-controls")))
            is_open = panel.is_visible()
            for wanted in (not is_open, is_open):
                if wanted is is_open and not is_open and width == 390:
                    page.keyboard.press("Escape")
                else:
                    button.focus()
                    page.keyboard.press("Enter")
                expect(panel).to_be_visible(visible=wanted)
                expect(button).to_have_attribute("aria-expanded", str(wanted).lower())
                assert page.evaluate("document.documentElement.scrollWidth") == width
        # Tab reaches each control that is seen, in turn.
        page.locator("#theme").focus()
        reached = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.textContent"))
        assert {"Copy", "Edit", "Regenerate", "Chats", "Settings", "Send"} <= reached
        assert page.evaluate(CONTRASTS) == []


CONTRASTS = """() => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (rgb) => {
        const [r, g, b] = rgb.slice(0, 3).map((part) => {
            part /= 255;
            return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const found = [];
    for (const node of document.querySelectorAll("body *")) {
        const isText = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
        if (!isText || !node.checkVisibility() || node.disabled) continue;
        let back = node;
        while (parse(getComputedStyle(back).backgroundColor)[3] === 0) back = back.parentElement;
        const [a, b] = [getComputedStyle(node).color, getComputedStyle(back).backgroundColor]
            .map((text) => light(parse(text)));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.push([node.className || node.tagName, node.textContent, ratio]);
    }
    return found;
}"""
"""A function that finds the seen texts whose contrast is below that of WCAG AA."""
