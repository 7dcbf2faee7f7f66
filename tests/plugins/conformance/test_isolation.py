"""Each case runs in a process of its own, and options reach all of them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, field, frozen
from attrs.validators import ge

from headstock import registry
from headstock.builtin import mixed
from headstock.cli.plugins import main
from headstock.errors import CannotRun, PluginBroken, UsageError
from headstock.spi import Budget, DeviceEnv, ScheduleDecision, View
from headstock_conformance import check
from headstock_conformance.case import Case, CaseResult, Outcome, run_case
from headstock_conformance.isolation import run_in_processes
from headstock_conformance.scheduler.checks import list_cases

CPU = DeviceEnv(device="cpu")
LEFT: list[str] = []


def run_all(*cases: Case) -> dict[str, CaseResult]:
    _, results = run_in_processes(lambda: ("cpu", cases))
    assert [result.case for result in results] == [case.name for case in cases]
    return {result.case: result for result in results}


@pytest.mark.feature("R7")
def test_what_a_case_leaves_behind_reaches_no_other_case() -> None:
    def leave() -> None:
        assert LEFT == []
        LEFT.append("this")

    results = run_all(*(Case(str(number), leave) for number in range(4)))
    assert {result.outcome for result in results.values()} == {Outcome.PASSED}
    assert LEFT == []


@pytest.mark.feature("R7")
def test_a_plugin_that_ends_its_process_fails_that_case_alone() -> None:
    results = run_all(
        Case("crashes", lambda: os.kill(os.getpid(), signal.SIGKILL)),
        Case("leaves", lambda: os._exit(0)),
        Case("passes", lambda: None),
    )
    assert [result.outcome.value for result in results.values()] == ["failed", "failed", "passed"]
    assert results["crashes"].reason == "the plugin ended its process by signal 9 (SIGKILL)"
    assert results["leaves"].reason == "the plugin ended its process with exit code 0"


def test_a_refusal_while_cases_are_listed_is_raised_here() -> None:
    def refuse() -> Any:
        raise CannotRun("it needs a GPU")

    with pytest.raises(CannotRun, match="it needs a GPU"):
        run_in_processes(refuse)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os._exit(4), "the cases of scheduler 'x' cannot be listed.* exit code 4"),
        (lambda: signal.raise_signal(signal.SIGKILL), "signal 9 .SIGKILL"),
        (
            lambda: signal.default_int_handler(2, None),
            "the cases of scheduler 'x' raised KeyboardInterrupt",
        ),
    ],
)
def test_a_plugin_that_ends_the_listing_of_its_cases_is_named(end: Any, said: str) -> None:
    with pytest.raises(PluginBroken, match=said):
        run_in_processes(end, "scheduler 'x'")


def test_what_a_plugin_prints_is_no_part_of_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run_all(Case("prints", lambda: sys.stdout.write("hello") and sys.stdout.flush()))[
            "prints"
        ].reason
        == ""
    )
    run_all(Case("writes", lambda: os.write(1, b"hello") and None))
    assert "hello" not in capfd.readouterr().out


def test_temporary_files_of_a_case_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "place"

    def leave() -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        path.write_text(name)

    run_all(Case("leaves", leave))
    assert path.read_text() and not Path(path.read_text()).exists()


@pytest.mark.feature("R7")
def test_a_check_leaves_nothing_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = "one full group: rows in any order"
    listed = check._list_cases

    def list_drawn(*arguments: Any) -> tuple[Case, ...]:
        return tuple(case for case in listed(*arguments) if case.name == drawn)

    monkeypatch.setattr(check, "_list_cases", list_drawn)
    report = check.check_plugin("cache", "radix", "cpu")
    assert [result.outcome for result in report.results] == [Outcome.PASSED]
    assert list(tmp_path.iterdir()) == []


@frozen(kw_only=True)
class Few:
    """How many rows run in a step."""

    rows: int = field(default=3, validator=ge(0))


def make_few(options: Few) -> Any:
    """A scheduler that runs the first rows alone."""

    def schedule(view: View, budget: Budget) -> ScheduleDecision:
        decision = mixed.schedule(view, budget)
        rows, counts = decision.rows[: options.rows], decision.counts[: options.rows]
        return evolve(decision, rows=rows, counts=counts)

    return schedule


def check_few(*opt: str) -> dict[str, CaseResult]:
    here = "plugins.conformance.test_isolation"
    sound = registry.load_spec("scheduler", "mixed")
    spec = evolve(sound, implementation=f"{here}:make_few", options=f"{here}:Few")
    # The random workloads are those of every scheduler, and take most of the time.
    cases = list_cases(spec, CPU, opt=opt)[:7]
    return {result.case: result for result in map(run_case, cases)}


@pytest.mark.feature("R7")
def test_a_scheduler_with_options_passes_its_cases() -> None:
    assert {result.outcome for result in check_few().values()} == {Outcome.PASSED}


@pytest.mark.feature("R7")
@pytest.mark.long
@pytest.mark.full
def test_options_reach_the_cases() -> None:
    assert check_few("mixed.rows=0")["one request"].outcome is Outcome.FAILED


@pytest.mark.feature("R7")
def test_options_of_the_command_are_read_as_run_reads_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "proposer:ngram", "--opt", "ngram.max-drafts=2"]) == 0
    assert "10 passed" in capsys.readouterr().err
    for text, said in (
        ("ngram.max_drafts=no", "expected an integer"),
        ("ngram.most=2", "no such option"),
        ("radix.max_prefixes=4", "not an option of the checked plugin; expected ngram.FIELD"),
    ):
        with pytest.raises(UsageError, match=said):
            main(["check", "proposer:ngram", "--opt", text])
