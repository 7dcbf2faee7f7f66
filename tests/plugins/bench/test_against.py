"""`headstock bench --against`: one engine under several settings, in turns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headstock_bench.command as bench
from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock_bench.latency_workloads import LatencyWorkload
from headstock_bench.plot import draw_results, list_bars
from headstock_bench.workloads import Workload

PROMPTS = tuple(tuple(range(5 + at, 25 + at)) for at in range(3))
WORK: dict[str, Callable[[], Workload]] = {
    "small": lambda: Workload(name="small", prompts=PROMPTS, outputs=(4,) * 3, temperature=0.0)
}
ONLINE = LatencyWorkload(
    name="online:9:3", prompts=PROMPTS, outputs=(4,) * 3, temperature=0.6, arrivals=(0.0,) * 3
)


def test_settings_are_measured_in_turns_and_compared_round_by_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "WORKLOADS", WORK)
    monkeypatch.setattr(bench, "draw_latency_workload", lambda _: ONLINE)
    others = ("scheduler=prefill-first overlap=off", "cache-type=naive")
    flags = [word for text in others for word in ("--against", text)]
    words = ("bench", "small", "online:9:3", "--json", "--runs", "2", "--num-pages", "128")
    assert main([*words, *flags]) == 0
    small, online = map(json.loads, capsys.readouterr().out.splitlines())
    assert (small["scheduler"], small["cache"]) == ("mixed", "radix")
    for record in (small, online):
        assert [peer["mode"] for peer in record["peers"]] == list(others)
        for peer in record["peers"]:
            assert peer["error"] is None and len(peer["ratios"]) == len(peer["runs_s"]) == 2
            assert min(peer["ratios"]) <= peer["ratio"] <= max(peer["ratios"])
            assert peer["difference"]["requests"] == 0
    assert small["peers"][0]["latency"] == {}
    assert online["peers"][1]["latency"].keys() >= {"ttft_p50_ms", "itl_p99_ms"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scheduler prefill-first", "expected settings such as .*, got scheduler"),
        ("cachetype=naive", "unknown flag --cachetype; did you mean --cache-type"),
        ("page_size=x", "page_size \\(--page-size\\): expected"),
    ],
)
def test_what_is_no_setting_is_refused_before_an_engine_starts(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cpu1", "--against", text]) == 2
    assert re.search(said, capsys.readouterr().err)


@given(st.integers(1, 5), st.floats(0.05, 0.95))
def test_engines_have_equal_parts_of_the_memory_that_one_would_have(
    count: int, ratio: float
) -> None:
    free, parts = 1.0, []
    for config in bench.share_memory([EngineConfig(memory_ratio=ratio)] * count):
        parts.append(free * config.memory_ratio)
        free -= parts[-1]
    assert parts == pytest.approx([ratio / count] * count)
    sized = EngineConfig(num_pages=64)
    assert list(bench.share_memory([sized, sized])) == [sized, sized]


def result_of(*rivals: tuple[str, str, tuple[float, ...]]) -> Any:
    return SimpleNamespace(
        conditions=SimpleNamespace(engine="headstock", shape="demo"),
        workload=SimpleNamespace(name="small", tokens_out=12),
        timing=SimpleNamespace(seconds=(2.0, 3.0, 4.0), median=3.0),
        out_tok_s=4.0,
        peers=[SimpleNamespace(engine=a, mode=b, runs_s=c) for a, b, c in rivals],
    )


def test_a_plot_has_the_rates_of_every_engine_that_ran(tmp_path: Path) -> None:
    result = result_of(
        ("headstock", "ops=torch", (6.0, 4.0)),
        ("transformers", "generate", (12.0,)),
        ("transformers", "continuous", ()),
    )
    assert list_bars(result) == [
        ("this", [6.0, 4.0, 3.0]),
        ("ops=torch", [2.0, 3.0]),
        ("transformers", [1.0]),
    ]
    pytest.importorskip("matplotlib")
    draw_results([result], tmp_path / "a.svg")
    draw_results([result], tmp_path / "b.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert "ops=torch" in drawn and "demo: small, output tokens/s" in drawn
    assert drawn == (tmp_path / "b.svg").read_text()


def test_a_plot_that_cannot_be_made_is_refused_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cpu1", "--plot", "a.png"]) == 2
    assert "expected a name that ends with .svg" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "cpu1", "--plot", "a.svg"]) == 2
    assert "headstock-bench[plot]" in capsys.readouterr().err
