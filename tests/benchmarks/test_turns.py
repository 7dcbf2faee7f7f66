"""Engines in turns: all do the same work, and every second turn in the other order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu.turns import Contestant, draw, main

SMALL = ["--shape", "demo", "--device", "cpu", "--max-seq-len", "1024"]


@pytest.mark.full
def test_engines_run_the_same_work_in_turns(tmp_path: Path) -> None:
    out = tmp_path / "turns.jsonl"
    ours = [{"num_pages": 300}, {"num_pages": 300, "page_size": 32}]
    words = [word for settings in ours for word in ("--ours", json.dumps(settings))]
    main([*SMALL, "--out", str(out), "--turns", "2", *words, "streams:2", "first-token:20:3*1"])
    runs = [json.loads(line) for line in out.read_text().splitlines()]

    def order(name: str) -> list[tuple[int, int]]:
        return [
            (each["turn"], ours.index(each["settings"]))
            for each in runs
            if each["workload"] == name
        ]

    assert order("streams:2") == [(1, 0), (1, 1), (2, 1), (2, 0)]
    assert order("first-token:20:3") == [(1, 0), (1, 1)]
    # 512 tokens in and 128 out, in streams of the same seeds: the same steps.
    for each in runs[:4]:
        assert each["out_tok_s"] == pytest.approx(256 / each["seconds"], rel=1e-3)
        assert 0 < each["ttft_p50_ms"] <= each["ttft_p99_ms"] and each["itl_p50_ms"] > 0
    assert {each["executed_steps"] for each in runs[4:]} == {6}
    assert [each["kv_tokens"] for each in runs[:2]] == [4800, 9600]


@pytest.mark.full
def test_times_beside_rows_are_theirs_between_tokens_and_the_prompts_to_the_first(
    tmp_path: Path,
) -> None:
    out = tmp_path / "turns.jsonl"
    main([*SMALL, "--out", str(out), "--turns", "1", "beside:2:32:400:100:120:4:3:16"])
    (run,) = [json.loads(line) for line in out.read_text().splitlines()]

    assert run["rows_ended_early"] is False
    # A prompt takes several times as long as a token of the rows.
    assert 2 * run["itl_p50_ms"] < run["ttft_p50_ms"] <= run["ttft_p99_ms"]


@pytest.mark.full
def test_an_engine_that_does_not_start_leaves_no_process(tmp_path: Path) -> None:
    settings = {"model": str(tmp_path / "nothing"), "max_seq_len": 64}
    contestant = Contestant({"engine": "headstock"}, "headstock", settings)
    with pytest.raises(RuntimeError, match=r"headstock.* ended"), contestant:
        pass
    assert contestant.process.poll() not in (None, 0)


def test_rows_beside_prompts_share_their_first_tokens() -> None:
    work = draw("beside:3:40:500:100:200:5:4:24")
    rows, prompts = work.prompts[:3], work.prompts[3:]
    assert {len(row) for row in rows} == {40} and len({row[:24] for row in rows}) == 1
    assert len({row[24:] for row in rows}) == 3
    assert all(100 <= len(prompt) <= 200 for prompt in prompts) and len(prompts) == 4
    assert work.outputs == (500, 500, 500, 2, 2, 2, 2)
    assert list(work.arrivals[:3]) == [0.0] * 3 and work.arrivals[3] > 0.5


def test_streams_begin_at_once_and_kinds_are_not_mixed_for_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = draw("streams:3")
    assert (len(work.prompts), work.outputs) == (3, (128,) * 3)
    words = ["--vllm", "/nowhere", "--out", str(tmp_path / "out"), "single", "streams:3"]
    with pytest.raises(SystemExit):
        main([*SMALL, *words])
    assert "workloads of one kind" in capsys.readouterr().err
