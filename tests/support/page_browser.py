"""The page of a server, in a headless Chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from served import Served

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser; the test is skipped where none is installed."""
    paths = [path for name in PROGRAMS if (path := shutil.which(name))]
    if not paths:
        pytest.skip("no Chromium is installed")
    with sync_playwright() as playwright:
        # Without its sandbox, which root may not use.
        browser = playwright.chromium.launch(executable_path=paths[0], args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Browser, server: Served, *, fine: str = "-", **context: Any
) -> Iterator[Page]:
    """The page, opened. Messages on the console, which a broken policy gives too, errors, and
    requests to other servers fail the test, but for messages with `fine` in them.
    """
    settings = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"} | context
    opened = browser.new_context(**settings)
    page, complaints = opened.new_page(), list[str]()
    origin = f"http://127.0.0.1:{server.port}"
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: (
            complaints.append(request.url)
            if not request.url.startswith((origin, f"blob:{origin}"))
            else None
        ),
    )
    page.goto(origin)
    yield page
    opened.close()
    assert [each for each in complaints if fine not in each] == []


def ask(page: Page, text: str) -> None:
    """Send a message."""
    page.get_by_role("textbox", name="Message").fill(text)
    page.keyboard.press("Enter")


def await_end(page: Page) -> None:
    """Wait until no answer comes any more."""
    # Ten minutes end only what hangs.
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=600_000)


def open_settings(page: Page) -> None:
    """Show the settings beside the chat."""
    if not page.locator("#panel").is_visible():
        page.get_by_role("button", name="Settings").click()


def fill_setting(page: Page, label: str, value: str) -> None:
    """Set one of the settings."""
    open_settings(page)
    page.get_by_label(label, exact=True).fill(value)


def write_stream(*deltas: dict[str, Any], reason: str = "stop") -> str:
    """A stream that arrives in one piece, as it does from behind a proxy that holds it."""
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": each}]} for each in deltas]
    events += [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 9, "completion_tokens": 21, "total_tokens": 30},
            "timings": {"ttft": 0.25, "total": 2.25, "tokens_per_second": 9.3},
        },
    ]
    return "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"


def answer_with(page: Page, *deltas: dict[str, Any], reason: str = "stop") -> list[Any]:
    """Answer the page's chats with these deltas; return the list of the bodies that it sends."""
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(body=write_stream(*deltas, reason=reason))

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", answer)
    return bodies
