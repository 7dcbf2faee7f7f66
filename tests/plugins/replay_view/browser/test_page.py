"""The page as a person meets it: nox -s browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core.record.runs import make_recorder, make_requests, make_run_limits, record_run
from playwright.sync_api import Browser
from plugins.replay_view.scripted_runs import HOSTILE, ONE_ROW, hostile_page, run_script
from toy_workloads import request

from headstock.cli.main import main
from headstock.scheduler import Arrived, Limits
from headstock_replay_view.history import History
from headstock_replay_view.page import render_html
from headstock_replay_view.page_data import collect_page_data

from .browsing import (
    move_pointer,
    open_page,
    place_in_chart,
    press_keys,
    read_colour,
    read_pixel,
    read_readout,
    request_facts,
    start_browser,
    wait_for_frame,
)

HEADER = {"model": "toy", "headstock": "1", "scheduler": "mixed", "cache": None}
TEXT, GRAPHICS = 4.5, 3.0
"""Least contrasts of WCAG 2.2 AA: of text, and of what must be seen to understand a picture."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    with start_browser() as started:
        yield started


def data_of_toy() -> dict[str, Any]:
    """Two requests of one row, as test_lanes has worked them out: steps 0 to 5 at 0, 10, 30, 60,
    100 and 900 ms.
    """
    a, b = request("a", [1] * 6, 3), request("b", [2] * 2, 1)
    script = [(0, [Arrived(a), Arrived(b)]), (10, []), (30, []), (60, []), (100, []), (900, [])]
    return collect_page_data(run_script(ONE_ROW, script), HEADER, "6 steps, identical")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two requests of one row."""
    return write_page(tmp_path_factory.mktemp("toy"), render_html(data_of_toy()))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Pages of 5, 200 and 5,000 requests."""
    folder = tmp_path_factory.mktemp("many")
    return {
        count: drawn(folder, make_run_limits(num_pages=90 if count == 200 else 300), count)
        for count in (5, 200, 5000)
    }


def drawn(folder: Path, engine: Limits, count: int) -> Path:
    """The page of a run of so many requests."""
    recording, page = folder / f"{count}.recording", folder / f"{count}.html"
    record_run(recording, engine, make_requests(count), 20_000)
    assert main(["replay-view", str(recording), "--html", str(page)]) == 0
    return page


def write_page(folder: Path, text: str) -> Path:
    """The text as a page."""
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    return page


def test_it_opens_at_the_busiest_step(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy) as page:
        assert (
            read_readout(page)["step"] == "0 (busiest)"
            and read_readout(page)["prompt tokens"] == "4"
        )
        assert page.locator("#verdict").text_content() == "6 steps, identical"
        tiles = page.locator(".tiles b").all_text_contents()
        assert tiles[:4] == ["4.44", "30.0 ms / 900 ms", "30.0 ms / 40.0 ms", "0.0%"]


def test_keys_move_between_steps(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy) as page:
        steps = []
        for key in ("End", "ArrowLeft", "Home", "ArrowLeft", "ArrowRight", "o", "b"):
            press_keys(page, key)
            steps.append(read_readout(page)["step"].split()[0])
        assert steps == ["5", "4", "0", "0", "1", "4", "0"]


def test_keys_move_between_requests_and_say_what_they_did(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy) as page:
        press_keys(page, "j", "j")
        assert page.locator("#request h3").text_content() == "b"
        facts = request_facts(page)
        assert facts["arrived"] == "step 0, 0 µs" and facts["admitted"] == "step 4, after 100 ms"
        assert (
            facts["first token"] == "step 5, after 900 ms"
            and facts["ended"] == "step 5, after 900 ms: length"
        )
        page.get_by_role("button", name="step 4, after 100 ms").click()
        wait_for_frame(page)
        assert read_readout(page)["step"] == "4" and page.url.endswith("#step=4&request=1")
        press_keys(page, "k")
        assert page.locator("#request h3").text_content() == "a"
        press_keys(page, "Escape")
        assert page.locator("#request h3").count() == 0


def test_a_link_opens_a_step_and_a_request_and_nonsense_does_not(
    browser: Browser, toy: Path
) -> None:
    with open_page(browser, toy, "#step=3&request=1") as page:
        assert (
            read_readout(page)["step"] == "3" and page.locator("#request h3").text_content() == "b"
        )
    with open_page(browser, toy, "#step=99&request=-1") as page:
        assert (
            read_readout(page)["step"] == "0 (busiest)" and page.locator("#request h3").count() == 0
        )


def test_slash_finds_a_request_and_typing_there_moves_nothing(
    browser: Browser, many: dict[int, Path]
) -> None:
    with open_page(browser, many[200]) as page:
        before = read_readout(page)
        press_keys(page, "/", *"request 17", "ArrowLeft")
        assert "11 of 200 requests" in str(page.locator("#lanes-note").text_content())
        assert read_readout(page) == before
        press_keys(page, "Enter")
        assert page.locator("#request h3").text_content() == "request 179"


@pytest.mark.parametrize(("unit", "step"), [("by-step", 3), ("by-time", 4)])
def test_a_click_chooses_the_step_that_lies_there_on_either_axis(
    unit: str, step: int, browser: Browser, toy: Path
) -> None:
    with open_page(browser, toy) as page:
        page.locator(f"#{unit}").click()
        # of 6 steps the fourth; of 900 ms and a step 540
        move_pointer(page, "prompt", place_in_chart(page, 0.58), 30)
        page.mouse.down()
        page.mouse.up()
        page.mouse.move(0, 0)
        wait_for_frame(page)
        assert read_readout(page)["step"] == str(step)


def test_lanes_are_drawn_where_requests_did_what_they_did(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy) as page:
        seen = [
            [
                read_pixel(page, "lanes-canvas", place_in_chart(page, (step + 0.8) / 6), y)
                for step in range(6)
            ]
            for y in (10, 30)
        ]
        phases = {name: read_colour(page, name) for name in ("queued", "prefill", "decode")}
        expected = ["prefill", "prefill", "decode", "decode"], ["queued"] * 4 + ["prefill"]
        for lane, names in enumerate(expected):
            # at step 0 the line of the chosen step is drawn over them
            for step in range(1, len(names)):
                assert seen[lane][step] == phases[names[step]], (lane, step)
        assert seen[0][4:] == [[0, 0, 0]] * 2  # nothing is drawn: the page shows through


def test_the_pointer_over_a_lane_says_what_it_does(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy) as page:
        move_pointer(page, "lanes-canvas", place_in_chart(page, 2.5 / 6), 30)
        assert page.locator("#tip").text_content() == "b\nstep 2: queued for 4 steps, 100 ms"


@pytest.mark.parametrize("count", [5, 200, 5000])
def test_any_number_of_requests_fits_and_each_can_be_read(
    count: int, browser: Browser, many: dict[int, Path]
) -> None:
    with open_page(browser, many[count]) as page:
        box, inner = (
            page.locator("#lanes").bounding_box(),
            page.locator("#lanes-inner").bounding_box(),
        )
        assert box is not None and inner is not None
        assert inner["height"] <= box["height"] <= 0.6 * 900 + 2
        if count == 5:
            assert not page.locator("#densities").is_visible()
            return
        press_keys(page, "l")  # a line each
        inner = page.locator("#lanes-inner").bounding_box()
        assert inner is not None and inner["height"] == 20 * count
        height = page.evaluate("() => document.getElementById('lanes-canvas').height")
        assert height <= 0.6 * 900 + 2  # what is not seen is not drawn
        press_keys(page, "k")  # the last one
        # they come in descending order
        assert page.locator("#request h3").text_content() == "request 0"
        assert page.evaluate("() => document.getElementById('lanes').scrollTop") > 20 * count - 600


def test_zooming_to_a_request_leaves_out_those_that_are_not_in_view(
    browser: Browser, many: dict[int, Path]
) -> None:
    with open_page(browser, many[5000]) as page:
        press_keys(page, "j", "Enter")
        note = str(page.locator("#lanes-note").text_content())
        assert "of 5,000 requests, those in view" in note
        assert read_readout(page)["step"].split()[0] == request_facts(page)["arrived"].split()[
            1
        ].strip(",")
        press_keys(page, "0")
        assert "of 5,000" not in str(page.locator("#lanes-note").text_content())


def test_slow_steps_are_marked_and_reached(browser: Browser, tmp_path: Path) -> None:
    lengths = [5.0] * 200
    lengths[40] = 700.0
    script: list[tuple[float, list[Any]]] = [
        (sum(lengths[:at]), []) for at in range(len(lengths) + 1)
    ]
    script[0] = (0, [Arrived(request("a", [1], 150))])
    data = collect_page_data(run_script(ONE_ROW, script), HEADER, "fine")
    with open_page(browser, write_page(tmp_path, render_html(data))) as page:
        said = "The axis ends at p99, 5 ms; ▲ 1 step took longer, at most 700 ms (step 40)."
        assert said in str(page.locator("#ms-note").text_content())
        page.get_by_role("button", name="Next slow step").click()
        wait_for_frame(page)
        assert (read_readout(page)["step"], read_readout(page)["took"]) == ("40", "700 ms")
        usual = [
            read_pixel(page, "ms", place_in_chart(page, 100.5 / 201), y) for y in range(14, 84, 10)
        ]
        # a step of 5 ms fills the axis although one took 700
        assert usual == [read_colour(page, "bar")] * 7


def test_pages_are_drawn_against_those_in_use(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy) as page:
        assert "the most in use, 2 of 100 (2 %)" in str(page.locator("#counts-note").text_content())
        assert read_pixel(page, "counts", place_in_chart(page, 3.8 / 6), 4) == read_colour(
            page, "live"
        )


def test_equal_leaves_are_one_block_with_their_number(browser: Browser, tmp_path: Path) -> None:
    data = data_of_toy()
    data["trees"] = {
        "steps": [0],
        "segments": [[[-1, 64, 2, 0, 1], [0, 64, 0, 0, 102], [-1, 0, 0, 0, 0]]],
    }
    with open_page(browser, write_page(tmp_path, render_html(data))) as page:
        assert "6,592 tokens in 103 blocks" in str(page.locator("#tree-note").text_content())
        box = page.locator("#tree").bounding_box()
        assert box is not None and box["height"] < 60
        move_pointer(page, "tree", box["width"] * 0.75, 10)
        assert (
            page.locator("#tip").text_content()
            == "102 \N{MULTIPLICATION SIGN} 64 tokens, last used at step 0"
        )


def relative_luminance(shade: list[int]) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [
        c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in shade
    ]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast_ratio(one: list[int], other: list[int]) -> float:
    """Contrast ratio, as WCAG defines it."""
    low, high = sorted((relative_luminance(one), relative_luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_apart_in_both_themes(theme: Any, browser: Browser, toy: Path) -> None:
    with open_page(browser, toy, color_scheme=theme) as page:
        back, card = read_colour(page, "back"), read_colour(page, "card")
        assert (relative_luminance(back) < 0.2) == (theme == "dark")
        for name in ("ink", "soft", "accent"):
            assert (
                min(contrast_ratio(read_colour(page, name), ground) for ground in (back, card))
                >= TEXT
            ), name
        pairs = [
            ("good", "good-back"),
            ("bad", "bad-back"),
            ("on-accent", "accent"),
            ("on-cached", "cached"),
        ]
        pairs += [("on-block", "live"), ("on-block", "shared")]
        for text, ground in pairs:
            assert contrast_ratio(read_colour(page, text), read_colour(page, ground)) >= TEXT, text
        for name in (
            "queued",
            "prefill",
            "decode",
            "stalled",
            "preempted",
            "live",
            "shared",
            "bar",
        ):
            assert contrast_ratio(read_colour(page, name), back) >= GRAPHICS - 0.25, name


def test_the_switch_changes_the_theme_and_what_is_drawn(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy) as page:
        light = read_colour(page, "decode")
        place = (place_in_chart(page, 2.5 / 6), 40)
        assert read_pixel(page, "decode", *place) == light
        page.locator("#theme").click()
        page.locator("#theme").click()
        wait_for_frame(page)
        assert page.locator("#theme").text_content() == "Theme: dark"
        assert read_pixel(page, "decode", *place) == read_colour(page, "decode") != light


def test_keys_are_listed_and_focus_is_visible(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy) as page:
        press_keys(page, "?")
        assert page.locator("#keys").is_visible() and page.locator("#keys kbd").count() > 15
        press_keys(page, "ArrowRight", "Escape")
        assert (
            not page.locator("#keys").is_visible() and read_readout(page)["step"] == "0 (busiest)"
        )
        names = []
        for _ in range(14):
            press_keys(page, "Tab")
            names.append(page.evaluate("() => document.activeElement.id"))
            assert (
                page.evaluate("() => getComputedStyle(document.activeElement).outlineWidth")
                != "0px"
            )
        assert names[:9] == [
            "theme",
            "help",
            "by-step",
            "by-time",
            "busiest",
            "whole",
            "sort",
            "filter",
            "lanes",
        ]


@pytest.mark.parametrize("width", [360, 640, 1280, 3840])
def test_no_window_is_too_narrow_or_too_wide(
    width: int, browser: Browser, many: dict[int, Path]
) -> None:
    with open_page(browser, many[200], viewport={"width": width, "height": 900}) as page:
        assert page.evaluate("() => document.scrollingElement.scrollWidth") <= width
        box = page.locator("#phases").bounding_box()
        assert box is not None and min(0.85 * width, 2400) <= box["width"] <= width


def test_without_scripts_the_figures_and_a_table_are_there(browser: Browser, toy: Path) -> None:
    with open_page(browser, toy, java_script_enabled=False) as page:
        assert page.locator(".tiles b").first.is_visible()
        assert not page.locator("#phases").is_visible() and not page.locator("#help").is_visible()
        table = [
            row.split("\n") for row in page.locator(".without-script tbody tr").all_inner_texts()
        ]
        assert [[cell.strip() for cell in "".join(row).split("\t")] for row in table] == [
            ["b", "0 s", "900 ms", "1", "0", "length"],
            ["a", "0 s", "30.0 ms", "3", "0", "length"],
        ]


def test_a_hostile_recording_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    with open_page(browser, write_page(tmp_path, hostile_page(tmp_path))) as page:
        assert page.locator("img").count() == 0 and page.locator("script").count() == 2
        press_keys(page, "j")
        name = str(page.locator("#request h3").text_content())
        assert name.startswith(f"0{HOSTILE[:40]}")
        move_pointer(page, "lanes-canvas", place_in_chart(page, 0.5), 30)
        assert "<script>" in str(page.locator("#tip").text_content())


def test_the_policy_stops_what_a_mistake_would_let_in(browser: Browser, toy: Path) -> None:
    element = (
        "() => Object.assign(document.createElement('script'), { textContent: 'window.ran = 1' })"
    )
    handler = '<b id="bold" onclick="window.ran = 1">bold</b>'
    with open_page(browser, toy, fine="Content Security Policy") as page:
        page.evaluate(f"() => document.body.append(({element})())")
        page.evaluate("text => document.body.insertAdjacentHTML('beforeend', text)", handler)
        page.locator("#bold").click()
        assert page.evaluate("() => window.ran === undefined")


def test_an_empty_recording_opens(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "run.recording"
    make_recorder(make_run_limits(), path).close()
    assert main(["replay-view", str(path), "--html", str(tmp_path / "page.html")]) == 0
    with open_page(browser, tmp_path / "page.html") as page:
        assert page.locator("#readout").text_content() == "no step "
        press_keys(page, "j", "ArrowRight", "b", "o", "t", "End", "Enter", "l", "+", "0")
        assert page.locator("#lanes-note").text_content() == "No request came."
    assert History(make_run_limits()).series == []
