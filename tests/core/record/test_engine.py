"""The engine records itself, and leaves a recording behind when it dies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from often import often

from headstock import LLM, SamplingParams
from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import PluginBroken
from headstock.record.file import read_recording
from headstock.scheduler import Arrived, Clock, Request
from headstock.spi import ScheduleDecision

TIGHT = {"num_pages": 60, "page_size": 4, "max_running_requests": 16, "max_batch_tokens": 64}


def prompts(count: int) -> list[dict[str, list[int]]]:
    """Random prompts, every second one with a common beginning."""
    rng = np.random.default_rng(3)
    shared = rng.integers(5, 500, 16).tolist()
    return [
        {
            "prompt_token_ids": shared * (number % 2)
            + rng.integers(5, 500, int(rng.integers(3, 40))).tolist()
        }
        for number in range(count)
    ]


SETTINGS = [
    {},
    {"overlap": False},
    {"cache_type": "naive"},
    {"record_prompts": True},
    {"prefix_cache_n": 2},
]


@pytest.mark.parametrize("settings", often(1, SETTINGS), ids=str)
def test_a_recording_of_the_engine_replays(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.recording"
    with LLM(record=str(path), **TIGHT, **settings) as llm:
        llm.generate(prompts(16), SamplingParams(max_tokens=24, temperature=0.0))
        stats = llm._session.engine.stats()
    assert stats.preemptions > 0

    capsys.readouterr()
    assert main(["replay", str(path), "--check"]) == 0
    assert capsys.readouterr().out == f"{stats.steps} steps, identical\n"


def test_bench_and_run_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.recording"
    assert (
        main(
            [
                "run",
                "--prompt",
                "Once",
                "--max-tokens",
                "5",
                "--quiet",
                "--record",
                str(path),
                "--num-pages",
                "64",
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["replay", str(path)]) == 0
    assert re.fullmatch(r"\d+ steps, identical\n", capsys.readouterr().out)
    recording = read_recording(path)
    (one,) = [e.request for m in recording.read_steps() for e in m.events if isinstance(e, Arrived)]
    assert not one.prompt.any()  # shorter than a page, so nothing of it is there
    clocks = [each.events[0] for each in recording.read_steps()]
    times = [clock.milliseconds for clock in clocks if isinstance(clock, Clock)]
    assert len(times) == len(clocks) and times == sorted(times)


def test_users_of_lines_reach_the_schedule_and_are_recorded_with_prompts_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"prompt": "Once", "user": "ada"}\n{"prompt": "Upon"}\n{"prompt": "A", "user": "bob"}\n'
    )
    names = []
    for flags in ([], ["--record-prompts"]):
        path = tmp_path / f"run{len(flags)}.recording"
        line = ["run", "--input", str(lines), "--max-tokens", "2", "--quiet", "--user", "eve"]
        assert main([*line, "--num-pages", "64", "--record", str(path), *flags]) == 0
        events = [event for each in read_recording(path).read_steps() for event in each.events]
        names.append([event.request.user for event in events if isinstance(event, Arrived)])
        capsys.readouterr()
        assert main(["replay", str(path), "--check"]) == 0
    hidden, shown = names
    assert shown == ["ada", "eve", "bob"]
    assert len({*hidden, *shown}) == 6 and {len(name) for name in hidden} == {16}


def failing_scheduler(after: int, error: Exception) -> Any:
    """A scheduler that fails in a step."""
    from headstock.builtin.mixed import schedule

    def fail(view: Any, budget: Any) -> ScheduleDecision:
        if view.step >= after:
            raise error
        return schedule(view, budget)

    return fail


def run_to_end(engine: Engine) -> None:
    """Step until there is nothing left to do."""
    while engine.has_work:
        engine.step()


def submit_requests(engine: Engine, count: int) -> None:
    """Hand in requests of 60 tokens each."""
    for number in range(count):
        prompt = np.arange(5, 35, dtype=np.int32) + number
        engine.submit(
            Request(
                id=str(number), prompt=prompt, max_tokens=30, params=SamplingParams(temperature=0.0)
            )
        )


@pytest.mark.parametrize("recorded", [False, True])
def test_a_scheduler_that_fails_names_a_recording_that_shows_it(
    recorded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = Engine(EngineConfig(**TIGHT, record=str(tmp_path / "mine") if recorded else None))
    engine.state.limits = evolve(
        engine.state.limits, schedule=failing_scheduler(9, ZeroDivisionError("oh"))
    )
    submit_requests(engine, 3)
    with pytest.raises(
        PluginBroken, match=r"raised ZeroDivisionError: oh; .*headstock replay (\S+)"
    ) as raised:
        run_to_end(engine)
    engine.close()

    named = str(raised.value).rpartition(" ")[2]
    assert (named == str(tmp_path / "mine")) == recorded
    # The installed scheduler does not fail, which the replay tells: the fault lies in what was
    # chosen in this engine.
    assert main(["replay", named]) == 1
    said = (
        "step 9 differs in outcome: recorded PluginBroken: the scheduler 'mixed' raised "
        "ZeroDivisionError: oh;"
    )
    assert said in capsys.readouterr().out


def test_a_broken_scheduler_plugin_leaves_a_recording_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = Engine(EngineConfig(**TIGHT))
    engine.state.limits = evolve(
        engine.limits,
        schedule=lambda view, budget: ScheduleDecision(rows=np.array([99]), counts=np.array([1])),
    )
    submit_requests(engine, 1)
    with pytest.raises(PluginBroken, match="a row that does not exist"):
        engine.step()
    engine.close()
    (left,) = tmp_path.glob("*.recording")
    assert [recorded.error.split(":")[0] for recorded in read_recording(left).read_steps()] == [
        "PluginBroken"
    ]


def test_a_tail_cannot_be_replayed_but_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = Engine(EngineConfig(num_pages=200, page_size=4, max_running_requests=2))
    prompt = np.arange(5, 15, dtype=np.int32)
    engine.submit(
        Request(id="long", prompt=prompt, max_tokens=300, params=SamplingParams(temperature=0.0))
    )
    engine.state.limits = evolve(
        engine.state.limits, schedule=failing_scheduler(290, ZeroDivisionError("oh"))
    )
    with pytest.raises(PluginBroken, match="the last 256 steps: headstock replay") as raised:
        run_to_end(engine)
    engine.close()

    named, trace = str(raised.value).rpartition(" ")[2], tmp_path / "trace.json"
    assert main(["replay", named]) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "begins with step 35, and a schedule can be run again from step 0 only; 'headstock "
        "replay-view FILE --timeline OUT.json' draws" in line
    )
    assert main(["replay-view", named, "--timeline", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    (failed,) = [each["name"] for each in events if each["ph"] == "i"]
    assert failed.startswith(
        "failed: PluginBroken: the scheduler 'mixed' raised ZeroDivisionError: oh;"
    )
    (decode,) = [each for each in events if each["name"] == "decode"]
    assert decode["args"]["steps"] == 255
    assert all(
        not e.tokens.any()
        for m in read_recording(named).read_steps()
        for e in m.events
        if hasattr(e, "tokens")
    )
