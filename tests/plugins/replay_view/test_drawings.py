"""The trace and the page of a recording."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter, defaultdict
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from core.record.runs import make_recorder, make_requests, make_run_limits, record_run
from often import often
from plugins.replay_view.scripted_runs import hostile_page
from toy_workloads import FULL, window

from headstock.cli.main import main
from headstock.record.file import read_recording
from headstock.record.header import restore_limits
from headstock.record.replay import replay_steps
from headstock.scheduler import Aborted, Arrived, initial_state, step
from headstock.spi import KVGroup
from headstock_replay_view.history import (
    FREE,
    MAX_COLUMNS,
    MAX_TREES,
    SERIES,
    SHARED,
    History,
    ThinnedSteps,
    _downsample_kinds,
)
from headstock_replay_view.page_data import (
    collect_page_data,
    delta_encode,
    escape_text,
    pack_kinds,
)
from headstock_replay_view.prefix_tree import (
    GONE,
    MAX_SEGMENTS,
    fold_equal_leaves,
    keep_largest_segments,
)

REQUESTS = 2
MAX_BYTES = 10_000_000


def read_trace(path: Path, folder: Path) -> list[dict[str, Any]]:
    """The events of the recording's trace."""
    out = folder / "trace.json"
    assert main(["replay-view", str(path), "--timeline", str(out)]) == 0
    found: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return found


def data_of(page: Path) -> dict[str, Any]:
    """What a page shows."""
    (text,) = re.findall(
        r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.DOTALL
    )
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture
def pressed(tmp_path: Path) -> Path:
    """A recording with preemptions."""
    path = tmp_path / "run.recording"
    record_run(path, make_run_limits(num_pages=80), make_requests(150), 900)
    return path


def test_a_trace_tells_what_each_request_did(pressed: Path, tmp_path: Path) -> None:
    events = read_trace(pressed, tmp_path)
    names = {
        e["tid"]: e["args"]["name"]
        for e in events
        if e["name"] == "thread_name" and e["pid"] == REQUESTS
    }
    slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == REQUESTS:
            slices[names[event["tid"]]].append(event)
    computed: dict[str, dict[str, int]] = defaultdict(lambda: {"prefill chunk": 0, "decode": 0})
    preempted: dict[str, int] = defaultdict(int)
    owner: dict[int, str] = {}
    at_once: set[str] = set()
    # when the last step ended is not known, so it is not drawn
    for recorded in [*read_recording(pressed).read_steps()][:-1]:
        plan = recorded.plan
        assert plan is not None
        new = {event.request.id for event in recorded.events if isinstance(event, Arrived)}
        at_once |= new & {admission.id for admission in recorded.admissions}
        for admission in recorded.admissions:
            owner[int(plan.admission_ids[plan.rows == admission.row][0])] = admission.id
            preempted[admission.id] += admission.preemptions > 0
        for i, admission_id in enumerate(plan.admission_ids.tolist()):
            what = "decode" if i < plan.num_decode else "prefill chunk"
            computed[owner[admission_id]][what] += int(plan.stops[i] - plan.starts[i])
    assert sum(preempted.values()) > 0 and 0 < len(at_once) < len(slices)
    for id, ours in slices.items():
        assert (ours[0]["name"] == "queued") == (id not in at_once)
        assert sum(each["name"] == "preempted" for each in ours) == preempted[id]
        for what in ("prefill chunk", "decode"):
            assert (
                sum(each["args"]["tokens"] for each in ours if each["name"] == what)
                == computed[id][what]
            )


def test_a_request_aborted_in_the_queue_is_queued_until_then(tmp_path: Path) -> None:
    limits, path = make_run_limits(max_rows=1), tmp_path / "run.recording"
    recorder = make_recorder(limits, path)
    first, second = make_requests(2)
    state = initial_state(limits)
    for events in ([Arrived(first), Arrived(second)], [Aborted(second.id)], []):
        plan = step(state, tuple(events))
        recorder.record_step(events, state, plan)
    recorder.close()
    steps = list(read_recording(path).read_steps())
    (tid,) = [
        e["tid"]
        for e in read_trace(path, tmp_path)
        if e["ph"] == "M" and e["args"]["name"] == second.id
    ]
    (queued,) = [
        e
        for e in read_trace(path, tmp_path)
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (REQUESTS, tid)
    ]
    assert queued["name"] == "queued"
    assert queued["dur"] * 1000 == pytest.approx(steps[1].at - steps[0].at, abs=1)


def test_an_empty_recording_draws_nothing_and_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "run.recording", tmp_path / "page.html"
    make_recorder(make_run_limits(), path).close()
    assert read_trace(path, tmp_path) == []
    assert main(["replay-view", str(path), "--html", str(page)]) == 0
    assert "0 steps, identical" in capsys.readouterr().out
    assert data_of(page)["series"]["at"] == []


@pytest.mark.full
@pytest.mark.parametrize("steps", often(1, [3_000, 10_000]))
def test_a_page_of_10000_steps_stays_small_and_loads_nothing(steps: int, tmp_path: Path) -> None:
    path, page = tmp_path / "run.recording", tmp_path / "page.html"
    assert (
        record_run(path, make_run_limits(max_rows=16), make_requests(6 * steps // 10), steps)
        == steps
    )
    assert main(["replay-view", str(path), "--html", str(page)]) == 0
    text = page.read_text()
    assert len(text) < MAX_BYTES * steps / 10_000
    assert not re.search(r"https?:|src=|href=|@import|<link|url\(|import\(|fetch\(", text)
    data = data_of(page)
    assert {len(column) for column in data["series"].values()} == {steps}
    assert MAX_COLUMNS / 2 <= len(data["map"]["steps"]) <= MAX_COLUMNS
    assert MAX_TREES / 2 <= len(data["trees"]["steps"]) <= MAX_TREES


class Elements(HTMLParser):
    """What a page consists of, as a browser's parser sees it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        self.attributes |= {name for name, _ in attrs}


def test_text_of_a_recording_is_shown_and_never_run(tmp_path: Path) -> None:
    text = hostile_page(tmp_path)
    elements = Elements(text)
    assert elements.names["script"] == 2 and elements.names["img"] == 0
    assert not [
        name
        for name in elements.attributes
        if name.startswith("on") or name in ("style", "src", "href")
    ]
    assert "\u202e" not in text and text.count("{{ data }}") > 0
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    style, script = (
        re.findall(pattern, text, re.DOTALL)[-1]
        for pattern in (r"<style>(.*?)</style>", r"<script>(.*?)</script>")
    )
    for kind, part in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in unescape(policy)
    assert unescape(policy).startswith("default-src 'none'; ") and "unsafe" not in policy


def test_long_and_unprintable_texts_are_cut_and_shown_as_codes() -> None:
    assert escape_text("x" * 100) == "x" * 61 + "..."
    assert escape_text("a\u202eb\x00c d") == "a\\u202eb\\u0000c d"
    assert escape_text(["not", "a text"]) == "['not', 'a text']"


@pytest.mark.parametrize(
    "groups", often(1, [((window(40), FULL),), ((FULL,),)]), ids=["a window", "one group"]
)
@pytest.mark.parametrize("reuse", often(1, [True, False]))
def test_pages_are_counted_and_drawn_as_the_state_has_them(
    reuse: bool, groups: tuple[KVGroup, ...], tmp_path: Path
) -> None:
    counts_by_group = (80,) if len(groups) == 1 else (100, 80)
    limits = make_run_limits(num_pages=counts_by_group, groups=groups)
    path = tmp_path / "run.recording"
    if not reuse:
        limits = evolve(limits, policy=None)
    record_run(path, limits, make_requests(60), 400)
    recording = read_recording(path)
    history = History(restore_limits(recording.header))
    seen = 0
    for replayed in replay_steps(recording.read_steps(), history.limits):
        history.add_step(replayed)
        state, entry = replayed.after, dict(zip(SERIES, history.series[-1], strict=True))
        assert state is not None
        assert entry["free"] == sum(state.num_free)
        assert entry["live"] + entry["shared"] == sum(map(np.count_nonzero, state.refs))
        assert sum(entry[kind] for kind in ("free", "cached", "live", "shared")) == sum(
            counts_by_group
        )
        counts = np.bincount(history.maps.values[-1], minlength=4)
        assert counts.tolist() == [entry[kind] for kind in ("free", "cached", "live", "shared")]
        seen += entry["shared"]
    assert (seen > 0) == reuse
    data = collect_page_data(history, recording.header, "identical")
    assert data["limits"]["pages"] == data["headline"]["all_pages"] == sum(counts_by_group)


def draw(groups: tuple[KVGroup, ...], tmp_path: Path) -> dict[str, Any]:
    """The data of the page of a run with these groups."""
    limits, path = make_run_limits(num_pages=90, groups=groups), tmp_path / "run.recording"
    record_run(path, limits, make_requests(10), 60)
    recording = read_recording(path)
    history = History(restore_limits(recording.header))
    for replayed in replay_steps(recording.read_steps(), history.limits):
        history.add_step(replayed)
    return collect_page_data(history, recording.header, "identical")


def test_the_page_says_which_groups_its_pages_are_of(tmp_path: Path) -> None:
    notes = draw((window(40), FULL), tmp_path)["notes"]
    assert any("2 KV groups together: 90 of group 0, 90 of group 1." in note for note in notes)
    assert "The prefix tree is that of KV group 1." in notes

    alone = draw((window(40),), tmp_path)
    assert "There is no prefix tree: no KV group keeps every page of a prefix." in alone["notes"]
    assert alone["trees"]["segments"] == []
    assert not any("KV group" in note for note in draw((FULL,), tmp_path)["notes"])


def test_the_tree_is_that_of_the_policy(tmp_path: Path) -> None:
    limits, path = make_run_limits(num_pages=80), tmp_path / "run.recording"
    record_run(path, limits, make_requests(90), 500)
    recording = read_recording(path)
    history = History(restore_limits(recording.header))
    trees = 0
    for replayed in replay_steps(recording.read_steps(), history.limits):
        history.add_step(replayed)
        state = replayed.after
        assert state is not None
        nodes = list(state.index.iter_nodes())
        for node in nodes:
            parent = max(node.parent.page, 0)
            assert (
                history.prefixes.parents[node.page] == parent
                and history.prefixes.depths[node.page] == node.depth
            )
        tree = history.make_tree(history.prefixes, state)
        assert (
            sum(segment[1] * segment[4] for segment in tree[:-1]) + tree[-1][1]
            == len(nodes) * limits.page_size
        )
        roots = sum(count for parent, *_, count in tree[:-1] if parent == GONE)
        assert roots == len({node.page for node in nodes if node.depth == 1})
        assert all(parent < at for at, (parent, *_) in enumerate(tree))
        held = sum(tokens * count for _, tokens, refs, _, count in tree if refs)
        assert held == sum(limits.page_size for node in nodes if state.refs[0][node.page])
        trees += len(tree)
    assert trees > 1000


def test_equal_leaves_of_one_parent_are_one_with_their_number() -> None:
    leaves = [[0, 16, 0, 5 + number] for number in range(102)]
    tree = [
        [GONE, 64, 3, 200],
        *leaves,
        [0, 16, 1, 9],
        [0, 32, 0, 9],
        [GONE, 16, 0, 9],
        [105, 16, 0, 9],
    ]
    folded = fold_equal_leaves([[*segment, 1] for segment in tree])
    assert folded == [
        [GONE, 64, 3, 200, 1],
        [0, 16, 0, 106, 102],  # used last when the latest of them was
        [0, 16, 1, 9, 1],  # held by a row
        [0, 32, 0, 9, 1],  # longer
        [GONE, 16, 0, 9, 1],  # of another parent, and with a block behind it
        [4, 16, 0, 9, 1],
    ]


def test_a_large_tree_keeps_its_heaviest_branches() -> None:
    segments = [
        [GONE, 8, 1, 0, 1],
        *([0 if at % 2 else GONE, 8 + at % 100, 0, 0, 1] for at in range(2000)),
    ]
    recorder = keep_largest_segments(segments)
    assert len(recorder) == MAX_SEGMENTS + 1
    assert sum(segment[1] for segment in recorder) == sum(segment[1] for segment in segments)
    assert recorder[0] == [GONE, 8, 1, 0, 1] and recorder[-1][4] == len(segments) - MAX_SEGMENTS
    assert min(segment[1] for segment in recorder[1:-1]) >= 87


def test_thinning_keeps_steps_evenly_spread() -> None:
    thin = ThinnedSteps(most=10)
    for number in range(1000):
        if thin.keeps_step(number):
            thin.add(number, -number)
    assert 5 <= len(thin.steps) <= 10
    assert len(set(np.diff(thin.steps))) == 1 and thin.values == [-step for step in thin.steps]
    assert thin.steps[-1] + thin.stride >= 1000


def test_a_row_of_several_pages_shows_what_most_are() -> None:
    kinds = np.array([0, 0, 3, 1, 1, 2, 2, 2, 0, 3], np.uint8)
    # the last of one page and two that are not there
    assert _downsample_kinds(kinds, 3).tolist() == [FREE, 1, 2, SHARED]
    assert _downsample_kinds(kinds, 1) is kinds


def test_the_page_map_is_packed_four_to_a_byte() -> None:
    assert pack_kinds(np.array([[0, 1, 2, 3], [3, 0, 0, 0]], np.uint8)) == "5AM="
    assert delta_encode([5, 7, 7]) == [5, 2, 0]
