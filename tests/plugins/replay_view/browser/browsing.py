"""Pages in a headless Chromium that may reach nothing but the file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """The installed browser; the test is skipped when there is none."""
    for name in PROGRAMS:
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium is installed")


@contextmanager
def start_browser() -> Iterator[Browser]:
    """A headless Chromium; without its sandbox, which root may not use."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def open_page(
    browser: Browser, path: Path, fragment: str = "", *, fine: str = "-", **context: Any
) -> Iterator[Page]:
    """The file, opened and drawn. Errors, messages, dialogs and requests for anything else fail the
    test at the end, but for messages with `fine` in them.
    """
    settings = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"} | context
    opened = browser.new_context(**settings)
    page, complaints = opened.new_page(), list[str]()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    page.on(
        "request",
        lambda request: complaints.append(request.url) if request.url != address else None,
    )
    address = path.as_uri()
    page.goto(address + fragment)
    if settings.get("java_script_enabled", True):
        wait_for_frame(page)
    yield page
    opened.close()
    assert [each for each in complaints if fine not in each] == []


def wait_for_frame(page: Page) -> None:
    """Wait until what was asked for is drawn."""
    page.wait_for_timeout(60)
    # Beside other work a frame may take longer than that.
    page.evaluate(
        "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


def press_keys(page: Page, *keys: str) -> None:
    """Press keys one after the other."""
    for key in keys:
        page.keyboard.press(key)
    wait_for_frame(page)


def read_readout(page: Page) -> dict[str, str]:
    """What the bar says of the step, by name."""
    return texts_of(page, "#readout > div")


def request_facts(page: Page) -> dict[str, str]:
    """What is said of the chosen request, by name."""
    return texts_of(page, "dl.request > div")


def texts_of(page: Page, selector: str) -> dict[str, str]:
    """The names and values of elements that have one of each."""
    pairs = "all => all.map(e => [e.firstChild.textContent.trim(), e.lastChild.textContent])"
    return dict(page.eval_on_selector_all(selector, pairs))


def place_in_chart(page: Page, share: float) -> float:
    """Where a share of every plot's width lies in its canvas, in a window in which letters have
    their least size.
    """
    width: int = page.evaluate("() => document.getElementById('phases').clientWidth")
    gutter = round(min(max(width * 0.1, 52), 130))
    return gutter + share * (width - gutter - 20)


def move_pointer(page: Page, canvas: str, x: float, y: float) -> None:
    """Put the pointer to a place of a canvas."""
    page.locator(f"#{canvas}").scroll_into_view_if_needed()
    box = page.locator(f"#{canvas}").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + x, box["y"] + y)
    wait_for_frame(page)


def read_pixel(page: Page, canvas: str, x: float, y: float) -> list[int]:
    """The colour that is drawn at a place of a canvas, in pixels of the page."""
    script = """([id, x, y]) => {
      const drawn = document.getElementById(id).getContext("2d");
      return [...drawn.getImageData(Math.round(x), Math.round(y), 1, 1).data].slice(0, 3);
    }"""
    colour: list[int] = page.evaluate(script, [canvas, x, y])
    return colour


def read_colour(page: Page, name: str) -> list[int]:
    """A colour of the theme."""
    script = (
        "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"
    )
    text: str = page.evaluate(script, name)
    return [int(text[at : at + 2], 16) for at in (1, 3, 5)]
