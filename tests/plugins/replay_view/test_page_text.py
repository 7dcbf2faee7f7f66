"""What the page writes."""

from __future__ import annotations

import pytest
from plugins.replay_view.scripted_runs import ONE_ROW, run_script
from toy_workloads import request

from headstock.scheduler import Arrived
from headstock_replay_view.page_data import collect_page_data
from headstock_replay_view.page_text import (
    format_number,
    format_seconds,
    list_facts,
    list_slowest,
    list_tiles,
)

HEADER = {"model": "toy", "headstock": "1", "scheduler": "mixed", "cache": None}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.000_000_4, "0.40 µs"),
        (0.000_25, "250 µs"),
        (0.000_999_7, "1.00 ms"),
        (0.012_34, "12.3 ms"),
        (0.999_7, "1.00 s"),
        (59.96, "60.0 s"),
        (1234.5, "1,234 s"),
    ],
)
def test_a_time_has_three_digits_and_the_unit_that_suits_it(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_a_number_has_three_digits_or_all_before_its_point() -> None:
    assert [format_number(value) for value in (4.444, 9.996, 99.96, 31234.2)] == [
        "4.44",
        "10.0",
        "100",
        "31,234",
    ]


def test_tiles_facts_and_the_table_of_a_run_worked_out_by_hand() -> None:
    a, b = request("a", [1] * 6, 3), request("b", [2] * 2, 1)
    script = [(0, [Arrived(a), Arrived(b)]), (10, []), (30, []), (60, []), (100, [])]
    data = collect_page_data(run_script(ONE_ROW, script), HEADER, "fine", is_complete=False)
    tiles = {
        tile.name.replace("\xa0", " "): (tile.value, tile.detail)
        for tile in list_tiles(data["headline"])
    }
    assert tiles == {
        "Output tokens/s": ("30.0", "3 tokens in 100 ms; 80.0 prompt tokens/s"),
        "Time to first token, p50 / p99": (
            "30.0 ms / 30.0 ms",
            "from the step that first saw the request",
        ),
        "Time between tokens, p50 / p99": (
            "30.0 ms / 40.0 ms",
            "of all tokens after a request's first",
        ),
        "Prefix hit rate": ("0.0%", "0 prompt tokens from the index"),
        "Requests": ("2", "1 finished, 1 unfinished; at most 1 running, 1 waiting"),
        "Preemptions": ("0", "of 0 requests; 0 tokens computed again"),
        "Steps": ("5", "p50 / p99 20.0 ms / 40.0 ms; 0 stalls"),
        "KV pages at the peak": ("2%", "2 of 100 held by requests"),
    }
    assert list_facts(data)[:3] == ["5 steps in 100 ms", "scheduler mixed", "cache none"]
    assert list_slowest(data)["rows"] == [
        ("b", "0 s", "-", "0", "0", "not yet"),
        ("a", "0 s", "30.0 ms", "3", "0", "length"),
    ]
    assert data["notes"][3:] == [
        "The recording breaks off; what came afterwards is not in it.",
        "1 request had not ended when the recording did.",
    ]
