"""The page at `/` and what it reads: self-contained, and true of the engine."""

from __future__ import annotations

import re
import time
from hashlib import sha256
from importlib.resources import files
from unittest.mock import Mock

import numpy as np
import patience
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import Served

from headstock.engine.stats import EngineStats
from headstock_openai_server.api.answers import LiveHistory
from headstock_openai_server.engine.snapshot import build_tree, shrink_map
from headstock_openai_server.http.page import LIBRARIES, quote_comments, render_page
from headstock_openai_server.observe.history import History
from headstock_openai_server.observe.metrics import ServerMetrics

VENDOR = files("headstock_openai_server.http") / "page" / "vendor"


def remove_libraries(page: str) -> str:
    """The page without the libraries, which name namespaces as addresses."""
    for name in LIBRARIES:
        library = quote_comments((VENDOR / name).read_text("utf-8"))
        assert page.count(library) == 1 and "<!--" not in library and "</script" not in library
        page = page.replace(library, "")
    return page


def test_libraries_are_as_published_and_have_their_licences() -> None:
    notes = (VENDOR / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` .*\| `([0-9a-f]{64})` \|$", notes, re.MULTILINE))
    assert rows.keys() == set(LIBRARIES)
    for name, digest in rows.items():
        assert sha256((VENDOR / name).read_bytes()).hexdigest() == digest
        assert (VENDOR / f"{name.split('.')[0]}.LICENSE").is_file()


@pytest.mark.feature("W13")
def test_the_page_needs_no_key_and_loads_nothing(server: Served) -> None:
    first, second = (server.get("/", headers={"authorization": "none"}) for _ in range(2))
    assert first.status == 200 and first.headers["content-type"] == "text/html; charset=utf-8"
    nonces = set()
    for each in (first, second):
        policy = each.headers["content-security-policy"]
        (nonce,) = set(re.findall(r"'nonce-([\w-]{20,})'", policy))
        assert "default-src 'none'" in policy and "unsafe" not in policy
        text = each.body.decode()
        own = remove_libraries(text)
        assert re.findall(r"<(?:style|script)[^>]*>", own) == [
            f'<style nonce="{nonce}">',
            f'<script nonce="{nonce}">',
        ]
        assert not re.search(r"""\b(?:src|href|style|on\w+)="|url\(|@import|https?://[\w.]""", own)
        nonces.add(nonce)
    assert len(nonces) == 2


def test_scripts_name_parts_of_the_page_that_are_there() -> None:
    text = remove_libraries(bytes(render_page().body).decode())
    ids = re.findall(r'\bid="([\w-]+)"', text)
    assert len(ids) == len(set(ids))
    asked = set(re.findall(r'(?:element|openCanvas)\("([\w-]+)"', text))
    assert len(asked) > 15 and asked <= set(ids)
    assert {*re.findall(r'aria-(?:controls|labelledby)="([\w-]+)"', text)} <= set(ids)
    style = (files("headstock_openai_server.http") / "page" / "page.css").read_text("utf-8")
    light, dark = (set(re.findall(r"--[\w-]+(?=:)", part)) for part in style.split("}")[:2])
    assert light == dark, "a colour lacks its other half"
    assert set(re.findall(r"[\"`(](--[\w-]+)\b", text)) <= light | {"--"}


@pytest.mark.feature("W13")
def test_the_live_view_is_what_the_engine_holds(server: Served) -> None:
    server.wait_for("headstock_requests_running", 0)
    prompt = [7] * 40
    body = {"prompt": prompt, "n": 3, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.post_raw("/v1/completions", body) as connection:
        connection.recv(1 << 12)
        end = time.monotonic() + 600
        while (view := server.get("/live").json)["num_running"] < 3:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert [lane["prompt"] for lane in view["running"]] == [40] * 3
    # one more is computed than known while a step is under way
    assert all(40 <= lane["computed"] <= lane["known"] + 1 for lane in view["running"])
    (pages,) = view["page_maps"]
    assert len(pages) == 128 and set(pages) <= set("0123")
    # two pages of 16 hold the prompt's first 32 tokens, for all three
    assert pages.count("3") >= 2 and pages.count("2") >= 3
    assert view["tree"][0] == {"parent": -1, "pages": view["tree"][0]["pages"], "requests": 3}
    assert view["tree"][0]["pages"] >= 2
    assert view["counts"]["executed_steps"] >= view["counts"]["replayed_steps"] == 0
    assert view["times"]["first_token"][0] >= 1
    server.wait_for("headstock_kv_pages_live", 0)


def sample_of(history: History, time: float, metrics: ServerMetrics, **counts: int) -> None:
    names = EngineStats.__annotations__
    history.note(time, EngineStats(**dict.fromkeys(names, 0) | counts), metrics)


def test_the_history_has_the_rates_between_samples() -> None:
    metrics, history = ServerMetrics("headstock", "demo", Mock()), History()
    assert history.describe(1.0).ages == []
    pool = {"total_pages": 8, "free_pages": 4, "cached_pages": 2}
    sample_of(history, 10.0, metrics, output_tokens=5, executed_steps=5, **pool)
    assert history.describe(11.0).ages == []
    metrics.first_token.observe(0.2)
    metrics.first_token.observe(0.4)
    sample_of(history, 12.0, metrics, output_tokens=45, executed_steps=15, running=3, **pool)
    sample_of(history, 13.0, metrics, output_tokens=45, executed_steps=15, waiting=1)
    assert history.describe(13.5) == LiveHistory(
        ages=[1.5, 0.5],
        running=[3, 0],
        waiting=[0, 1],
        pool_usage=[0.25, 0.0],
        output_rate=[20.0, 0.0],
        step_rate=[5.0, 0.0],
        first_token=[pytest.approx(0.3), None],
        token_gap=[None, None],
    )


def test_the_history_ends_after_two_minutes() -> None:
    metrics, history = ServerMetrics("headstock", "demo", Mock()), History()
    for second in range(1000):
        sample_of(history, float(second), metrics)
    ages = history.describe(999.0).ages
    assert ages == sorted(ages, reverse=True) and len(ages) == 120 and ages[0] == 119.0


def test_the_server_samples_its_history_without_a_viewer(server: Served) -> None:
    server.post("/v1/completions", {"prompt": [7] * 4, "max_tokens": 8, "ignore_eos": True})
    end = time.monotonic() + patience.seconds
    # What came before the last sample is in one of the seconds between samples.
    while not sum((view := server.get("/live").json)["history"]["output_rate"]):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert len({len(column) for column in view["history"].values()}) == 1


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 20))
def test_a_cell_of_a_large_pool_is_what_most_of_its_pages_are(pages: list[int], most: int) -> None:
    found = [int(each) for each in shrink_map(np.array(pages, np.uint8), most).decode()]
    assert len(found) <= max(most, 1)
    size = -(-len(pages) // most)
    cells = [pages[at : at + size] for at in range(0, len(pages), size)]
    assert len(found) == len(cells)
    for state, cell in zip(found, cells, strict=True):
        assert cell.count(state) == max(map(cell.count, range(4)))


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), min_size=1, max_size=8))
def test_the_tree_has_each_prefix_once_with_the_requests_that_share_it(
    rows: list[list[int]],
) -> None:
    spans = np.array(list(map(len, rows)))
    table = np.full((len(rows), spans.max()), 0)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
        table[index, len(row) :] = -1 - index
    nodes = build_tree(table, spans)
    prefixes = {tuple(row[: at + 1]) for row in rows for at in range(len(row))}
    assert sum(node.pages for node in nodes) == len(prefixes)
    assert sum(node.pages * node.requests for node in nodes) == sum(map(len, rows))
    assert all(node.parent < index for index, node in enumerate(nodes))
    for node in nodes:
        if node.parent >= 0:
            assert node.requests <= nodes[node.parent].requests
