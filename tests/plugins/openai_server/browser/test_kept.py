"""What the chat keeps: versions of turns, parts of answers, texts that are not sent yet."""

from __future__ import annotations

import json
import re
from typing import Any

from page_browser import answer_with, ask, await_end, fill_setting, open_page
from playwright.sync_api import Browser, FilePayload, Page, expect
from served import Served, serve

TEXTS = ".turn > .text"


def import_chats(page: Page, *conversations: object) -> None:
    content = {"format": "headstock-conversations", "version": 1, "conversations": conversations}
    page.locator("#import-file").set_input_files(
        {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(content).encode()}
    )


def edit_question(page: Page, text: str) -> None:
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited text").fill(text)
    page.get_by_role("button", name="Ask again").locator("visible=true").click()
    await_end(page)


def test_what_an_answer_replaces_stays_as_a_version(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        for number, text in enumerate(("One.", "Two.", "Three.")):
            answer_with(page, {"content": text})
            if number:
                page.get_by_role("button", name="Regenerate").locator("visible=true").click()
            else:
                ask(page, "First")
            await_end(page)
        page.get_by_role("button", name="Version before").click()
        expect(page.locator(TEXTS)).to_have_text(["First", "Two."])
        expect(page.locator(".version")).to_have_text("2 of 3")
        answer_with(page, {"content": "More."})
        ask(page, "Go on")
        await_end(page)
        answer_with(page, {"content": "Four."})
        edit_question(page, "Other")
        expect(page.locator(TEXTS)).to_have_text(["Other", "Four."])
        page.reload()
        page.get_by_role("button", name="Version before").click()
        # The version comes back with all that followed, and with its own versions.
        expect(page.locator(TEXTS)).to_have_text(["First", "Two.", "Go on", "More."])
        page.get_by_role("button", name="Version after").last.click()
        expect(page.locator(TEXTS)).to_have_text(["First", "Three."])
        with page.expect_download() as download:
            page.get_by_role("button", name="Export").click()
        page.get_by_role("button", name="New chat").click()
        import_chats(page, *json.loads(download.value.path().read_text())["conversations"])
        expect(page.locator(".version")).to_have_text(["1 of 2", "3 of 3"])
        page.get_by_role("button", name="Version after").first.click()
        expect(page.locator(TEXTS)).to_have_text(["Other", "Four."])
        bodies = answer_with(page, {"content": "Five."})
        ask(page, "Last")
        await_end(page)
        assert [each["content"] for each in bodies[0]["messages"]] == ["Other", "Four.", "Last"]


def test_versions_of_an_import_are_checked(browser: Browser, server: Served) -> None:
    turn: dict[str, Any] = {"role": "user", "content": "x"}
    nested: dict[str, Any] = turn
    for _ in range(120):
        nested = turn | {"others": {"before": [[nested]], "after": []}}
    faults = [
        (turn | {"others": 1}, "[0].others.before must be a list of lists of turns"),
        (turn | {"others": {"before": [[]], "after": []}}, ".before must be a list of lists"),
        (turn | {"others": {"before": [], "after": [[7]]}}, ".after[0][0].role must be user"),
        (nested, "has more than 100 versions within versions"),
    ]
    with open_page(browser, server) as page:
        for count, (fault, text) in enumerate(faults, start=1):
            import_chats(page, {"turns": [fault]})
            expect(page.locator(".turn.error")).to_have_count(count)
            expect(page.locator(".turn.error").last).to_contain_text(text)
        expect(page.locator("#conversations .name")).to_have_count(0)


def test_a_tab_that_closes_loses_little_of_its_answer(browser: Browser) -> None:
    with serve(script={"interval": 0.05}) as server, open_page(browser, server) as page:
        ask(page, "Tell a story.")
        expect(page.locator(".progress")).to_have_text(re.compile(r"\d+ tokens · \d+ tokens/s"))
        page.wait_for_timeout(1200)
        page.reload()
        expect(page.locator(".turn.assistant > .text")).to_contain_text("Once")
        expect(page.locator(".turn.assistant .facts")).to_have_text("broken off")


def test_a_text_that_is_not_sent_stays_with_its_conversation(
    browser: Browser, server: Served
) -> None:
    with open_page(browser, server, fine="500") as page:
        message = page.get_by_role("textbox", name="Message")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=500, body="-"))
        ask(page, "A question that fails")
        expect(page.locator(".turn.error")).to_have_text("the server said 500")
        page.reload()
        expect(message).to_have_value("A question that fails")
        answer_with(page, {"content": "One."})
        message.press("Enter")
        await_end(page)
        message.fill("A draft")
        page.get_by_role("button", name="New chat").click()
        expect(message).to_have_value("")
        page.locator("#conversations .name").click()
        expect(message).to_have_value("A draft")
        height = message.evaluate("area => area.offsetHeight")
        message.fill("line\n" * 8)
        assert message.evaluate("area => area.offsetHeight") > 2 * height


def test_a_server_that_comes_back_is_seen(browser: Browser, server: Served) -> None:
    with open_page(browser, server, fine="ERR_FAILED") as page:
        page.route("**/v1/**", lambda route: route.abort())
        ask(page, "Hello")
        expect(page.locator("#status")).to_have_text("the server cannot be reached")
        page.unroute("**/v1/**")
        expect(page.locator("#status")).to_have_text("serving")
        # Not finished: what is cut before its end says so, and can be asked again.
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(
                body='data: {"choices": [{"index": 0, "delta": {"content": "Half"}}]}\n\n'
            ),
        )
        page.get_by_role("textbox", name="Message").press("Enter")
        expect(page.locator(".turn.error").last).to_contain_text("ended before the answer did")
        expect(page.locator(".turn.assistant .facts").last).to_have_text("broken off")
        expect(page.get_by_role("button", name="Continue")).to_be_visible()


def test_enter_breaks_the_line_where_there_is_no_keyboard(browser: Browser, server: Served) -> None:
    with open_page(browser, server, is_mobile=True, has_touch=True) as page:
        ask(page, "Two")
        page.keyboard.type("lines")
        expect(page.get_by_role("textbox", name="Message")).to_have_value("Two\nlines")
        answer_with(page, {"content": "Yes."})
        page.get_by_role("button", name="Send").tap()
        expect(page.locator(TEXTS)).to_have_text(["Two\nlines", "Yes."])


def test_a_chat_of_two_tabs_is_one(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        answer_with(page, {"content": "One."})
        ask(page, "First")
        await_end(page)
        other = page.context.new_page()
        other.goto(page.url)
        answer_with(other, {"content": "Two."})
        other.locator("#conversations .name").click()
        ask(other, "Second")
        # At once, in windows beside each other.
        expect(page.locator(TEXTS)).to_have_text(["First", "One.", "Second", "Two."])


def test_a_cut_answer_goes_on(browser: Browser, server: Served) -> None:
    with open_page(browser, server) as page:
        fill_setting(page, "Temperature", "0")
        fill_setting(page, "Max tokens", "40")
        ask(page, "Tell a story of a girl and a dog.")
        await_end(page)
        whole = page.locator(".turn.assistant > .text").inner_text()
        fill_setting(page, "Max tokens", "15")
        page.get_by_role("button", name="Regenerate").locator("visible=true").click()
        expect(page.locator(".facts")).to_contain_text("15 tokens")
        fill_setting(page, "Max tokens", "25")
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_role("button", name="Continue").locator("visible=true").click()
        assert request.value.post_data_json["continue_final_message"] is True
        expect(page.locator(".facts")).to_contain_text("25 tokens")
        await_end(page)
        expect(page.locator(".turn.assistant > .text")).to_have_text(whole)
        # An answer that ended of itself has no rest.
        answer_with(page, {"content": " The end."})
        page.get_by_role("button", name="Continue").locator("visible=true").click()
        await_end(page)
        expect(page.get_by_role("button", name="Continue")).to_have_count(0)
        page.reload()
        expect(page.locator(".turn.assistant > .text")).to_have_text(f"{whole} The end.")
        expect(page.locator(".version")).to_have_text("2 of 2")


def test_chats_are_found_by_their_words(browser: Browser, server: Served) -> None:
    def make(title: str, text: str) -> dict[str, object]:
        return {"title": title, "turns": [{"role": "assistant", "content": text}]}

    with open_page(browser, server) as page:
        import_chats(page, make("Bread", "Flour and salt"), make("Soup", "Water and Salt"))
        names = page.locator("#conversations .name")
        for words, found in (("salt", 2), ("SALT water", 1), ("soup", 1), ("sugar", 0), ("", 2)):
            page.get_by_label("Search in all chats").fill(words)
            expect(names).to_have_count(found)
        page.get_by_role("textbox", name="Message").focus()
        page.keyboard.press("Control+k")
        page.keyboard.type("soup")
        expect(names).to_have_text(["Soup"])
        page.keyboard.press("Control+Shift+O")
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.get_by_role("textbox", name="Message")).to_be_focused()


def test_text_files_are_added_to_a_message(browser: Browser, server: Served) -> None:
    def make(name: str, content: bytes) -> FilePayload:
        return {"name": name, "mimeType": "", "buffer": content}

    message = "See\na.py:\n```\nprint(1)\n```\nb.md:\n````\n```x\n````\n"
    with open_page(browser, server) as page:
        field = page.get_by_role("textbox", name="Message")
        field.fill("See")
        files = [make("a.py", b"print(1)\n"), make("b.md", b"```x"), make("c.png", b"\x89PNG\xff")]
        page.locator("#files").set_input_files([*files, make("d.txt", b"x" * 2_000_000)])
        expect(page.locator(".turn.error")).to_have_text(
            [re.compile("c.png: no text in UTF-8"), re.compile("d.txt: .* more than 1 MB")]
        )
        expect(field).to_have_value(message)
        bodies = answer_with(page, {"content": "Yes."})
        field.press("Enter")
        await_end(page)
        assert bodies[0]["messages"] == [{"role": "user", "content": message.strip()}]
        # A file that is dropped does not take the place of the page.
        page.evaluate(
            """() => {
                const data = new DataTransfer();
                data.items.add(new File(["dropped"], "e.txt"));
                const options = { dataTransfer: data, bubbles: true, cancelable: true };
                document.querySelector("#log").dispatchEvent(new DragEvent("drop", options));
            }"""
        )
        expect(field).to_have_value("e.txt:\n```\ndropped\n```\n")


def test_chats_are_answered_at_once(browser: Browser) -> None:
    with serve(script={"interval": 0.05}) as server, open_page(browser, server) as page:
        answers = page.locator(".turn.assistant > .text")
        for text in ("First", "Second"):
            page.get_by_role("button", name="New chat").click()
            ask(page, text)
            expect(answers).to_contain_text("Once")
        names = page.locator("#conversations .name")
        expect(names).to_have_text(["Second", "First"])
        expect(page.locator("#conversations [aria-busy]")).to_have_count(2)
        # Stop is of the chat that is shown.
        page.keyboard.press("Escape")
        expect(page.locator(".facts")).to_contain_text("stopped")
        names.last.click()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        expect(answers).to_contain_text("Once")
        page.keyboard.press("Escape")
        expect(page.locator("#conversations [aria-busy]")).to_have_count(0)
        expect(page.locator(".facts")).to_contain_text("stopped")
