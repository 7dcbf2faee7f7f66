"""`headstock tune` over the real engine and the bundled model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from headstock import LLM, CannotRun, EngineConfig, ModelError, UsageError
from headstock.llm import get_session
from headstock.spi import DeviceEnv
from headstock.startup.tuned_choices import TunedCandidate
from headstock_bench import tune_command, tuning
from headstock_bench.tuning import MARGIN, Step, choose_fastest, compare_times

TIMES = st.lists(st.floats(0.01, 100), min_size=3, max_size=3)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs `headstock tune` in this process with two small steps; exit code, output, errors."""
    monkeypatch.setattr(tuning, "STEPS", {"cpu": (Step(tokens=16), Step(rows=2), Step(rows=64))})
    monkeypatch.setattr(tuning, "DECODE_CONTEXT", 16)
    monkeypatch.setattr(tuning, "DECODE_STEPS", 2)

    def call(*arguments: str) -> tuple[int, str, str]:
        folder = str(tmp_path / "kept")
        code = tune_command.main(["--num-pages", "64", "--tuned-choices", folder, *arguments])
        return code, *capsys.readouterr()

    return call


def candidate(times: list[float | None], ops: str = "torch") -> TunedCandidate:
    """A candidate that was measured."""
    return TunedCandidate(attn="sdpa", ops=ops, milliseconds=tuple(times))


MEASURE = tuning._measure_candidate


def measure_without_options(config: EngineConfig, *more: Any) -> TunedCandidate:
    """Measures a candidate as if it had no options."""
    return MEASURE(evolve(config, opt=()), *more)


@pytest.mark.parametrize("quiet", [False, True])
def test_each_engine_shows_how_its_start_goes(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    stages: list[list[str]] = []

    class Bars:
        """Notes stages, as a terminal would show them."""

        def __init__(self, *, shown: bool) -> None:
            self.shown = shown

        def __enter__(self) -> Bars:
            stages.append([])
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, stage: str, *amounts: int) -> None:
            stages[-1] += [stage] * self.shown

    monkeypatch.setattr("headstock_bench.tune_command.ProgressBars", Bars)
    assert run("--ops", "torch", *(["--quiet"] * quiet))[0] == 0
    assert len(stages) == 1 and ("weights" in stages[0]) is not quiet


@pytest.mark.feature("V2")
def test_what_is_measured_is_printed_kept_and_taken(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, err = run()
    header, *lines = out.splitlines()

    assert code == 0 and header.split() == ("ATTN OPS PROMPT 16 DECODE 2 DECODE 64 TIME".split())
    measured = [line.split() for line in lines if line.startswith("sdpa")]
    assert {ops for _, ops, *_ in measured} == {"fbgemm", "onednn", "torch"}
    assert measured[0][-1] == "1.00"
    assert all(line[4] == "-" and float(line[2]) > 0 for line in measured)  # no room for 64 rows
    assert "--ops triton was not measured: ops (--ops) triton cannot run on cpu" in out
    assert "measuring --attn sdpa --ops auto" in err and "kept in" in err

    shown = json.loads(run("--show", "--json")[1])
    assert f"fastest: --attn sdpa --ops {shown['fastest']['ops']}" in out
    with LLM(num_pages=16, tuned_choices=str(tmp_path / "kept")) as llm:
        summary = get_session(llm).engine.summary
    assert summary.ops == shown["fastest"]["ops"]
    assert any("headstock tune" in note for note in summary.notes)


@pytest.mark.parametrize("longer", [0.0, -0.001])
def test_decode_steps_that_a_busy_machine_hides_are_not_compared(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, longer: float
) -> None:
    def time_answers(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
        return 0.01 + longer * num_tokens if num_tokens > 1 else 0.02

    monkeypatch.setattr(tuning, "_time_answers", time_answers)
    kept = json.loads(run("--json", "--quiet")[1])

    times = [each["milliseconds"] for each in kept["candidates"] if each["milliseconds"]]
    assert times == [[20.0, None, None]] * 3
    assert kept["fastest"]["ops"] == kept["candidates"][0]["ops"]


def test_a_named_setting_stays_and_nothing_is_kept_for_another_model(
    run: Callable[..., Any],
) -> None:
    assert [
        line for line in run("--ops", "torch", "--quiet")[1].splitlines() if "onednn" in line
    ] == []
    with pytest.raises(UsageError, match="has no choices for this model"):
        run("--show", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tuned-choices", "off"], "expected a directory, got off"),
        (["--shape", "qwen"], "unknown --shape"),
        (["--attn", "fa"], "nothing that could be measured runs here"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    run: Callable[..., Any], arguments: list[str], says: str
) -> None:
    with pytest.raises((UsageError, CannotRun), match=says):
        run(*arguments)


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock_bench.tuning.tune", lambda *arguments: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"expected a directory or off, got .*file$"):
        run("--tuned-choices", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot be written"):
        run("--tuned-choices", str(tmp_path / "file" / "below"))


def test_no_more_steps_are_measured_of_what_cannot_win(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = iter([2.0, 2.0, 2.0, 2.1, 6.1, 2.0, 5.9, 6.0])
    monkeypatch.setattr(tuning, "_time_step", lambda llm, step: next(slow))
    kept = json.loads(run("--json", "--quiet")[1])
    times = [each["milliseconds"] for each in kept["candidates"] if each["milliseconds"]]

    assert times == [[2.0, 2.0, 2.0], [2.1, 6.1, None], [2.0, 5.9, 6.0]]


@pytest.mark.feature("V3")
@pytest.mark.parametrize(("with_options", "kept"), [(1.9, ["torch.width=2"]), (2.0, [])])
def test_options_that_the_fastest_operations_measured_are_kept_where_they_are_faster(
    with_options: float,
    kept: list[str],
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = iter([2.0] * 3 + [with_options] * 3)
    monkeypatch.setattr(tuning, "_time_step", lambda llm, step: next(measured))
    asked = []

    def tune_operations(config: EngineConfig, env: DeviceEnv) -> tuple[str, ...]:
        asked.append((config.attn, config.ops, env.device))
        return ("torch.width=2",)

    monkeypatch.setattr(tuning.operation_tuning, "tune_operations", tune_operations)
    # The torch operations have no options; what an engine does with some, other tests say.
    monkeypatch.setattr(tuning, "_measure_candidate", measure_without_options)
    _, out, err = run("--ops", "torch")
    shown = json.loads(run("--ops", "torch", "--show", "--json")[1])

    assert asked == [("sdpa", "torch", "cpu")]
    assert shown["fastest"] == {
        "attn": "sdpa",
        "ops": "torch",
        "options": kept,
        "runner": "",
        "graph_tokens": None,
    }
    assert [each["options"] for each in shown["candidates"]] == [[], ["torch.width=2"]]
    assert "measuring the options of --ops torch" in err
    assert "measuring --attn sdpa --ops torch --opt torch.width=..." in err
    assert "* with what was measured of it: --opt torch.width=..." in out
    assert out.rstrip().endswith("--opt torch.width=...") == (kept != [])


@pytest.mark.feature("V2")
@given(TIMES, TIMES)
def test_the_default_stays_unless_another_is_faster_by_the_margin(
    default: list[float], other: list[float]
) -> None:
    first, second = candidate(default), candidate(other, "onednn")
    is_faster = compare_times(second, first) < 1 - MARGIN

    assert choose_fastest([first, second]) is (second if is_faster else first)
    assert compare_times(first, second) == pytest.approx(1 / compare_times(second, first))


def test_steps_that_one_of_two_lacks_do_not_count() -> None:
    assert compare_times(candidate([1.0, None, 8.0]), candidate([2.0, 3.0, 4.0])) == pytest.approx(
        1
    )
