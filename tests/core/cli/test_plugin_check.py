"""`headstock plugins check`: its table, its JSON and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from headstock.cli import plugin_check
from headstock.cli.plugins import main
from headstock.errors import CannotRun, UnknownPlugin
from headstock_conformance import check
from headstock_conformance.case import Case, Outcome, run_case

SHORT = ["check", "proposer:ngram"]


def fail_with(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def use_cases(monkeypatch: pytest.MonkeyPatch, *cases: Case) -> None:
    """Let every plugin have these cases."""
    monkeypatch.setattr(check, "_list_cases", lambda kind, name, env, opt: cases)


@pytest.mark.feature("R7")
def test_a_shipped_plugin_passes_and_each_case_has_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(SHORT) == 0
    output = capsys.readouterr()
    header, *lines = output.out.splitlines()
    assert header.split() == ["CASE", "RESULT", "WHY"]
    assert len(lines) == 10 and all("passed" in line for line in lines)
    assert "proposer ngram of headstock-ngram-proposer" in output.err
    assert "10 cases, 10 passed" in output.err


def test_the_report_can_be_read_by_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["name"], report["device"]) == ("proposer", "ngram", "cpu")
    assert (report["passed"], report["failed"], report["not_here"]) == (10, 0, 0)
    assert report["cases"][0]["case"] == "the spec is made without torch"


@pytest.mark.feature("R7")
def test_a_failed_case_says_why_and_gives_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = Case("on a GPU", fail_with(CannotRun("it needs a GPU")))
    failed = Case("heads", fail_with(AssertionError("heads are\nswapped")))
    use_cases(monkeypatch, Case("fine", lambda: None), refused, failed)
    assert main(SHORT) == 3
    output = capsys.readouterr()
    assert [line.split(maxsplit=1)[1:] for line in output.out.splitlines()[1:]] == [
        ["passed"],
        ["a GPU  not here  it needs a GPU"],
        ["failed    heads are swapped"],
    ]
    assert "3 cases, 1 failed, 1 not here, 1 passed" in output.err


@pytest.mark.feature("R7")
def test_a_plugin_none_of_whose_cases_can_run_gives_exit_code_5(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_cases(monkeypatch, Case("on a GPU", fail_with(CannotRun("it needs a GPU"))))
    assert main(SHORT) == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fa", "'fa' cannot be checked here: it runs on cuda"),
        ("bench", "no cases for plugins of the kind 'command'; there are for: attention, cache"),
    ],
)
def test_what_cannot_be_checked_here_is_said_in_a_line(name: str, said: str) -> None:
    with pytest.raises(CannotRun, match=said):
        main(["check", name, "--device", "cpu"])


WITHOUT_CHECKS = """
import sys
sys.path = [path for path in sys.path if "conformance" not in path]
from headstock.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def run_without_checks(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`headstock ARGUMENTS` where headstock-conformance is not installed."""
    command = [sys.executable, "-c", WITHOUT_CHECKS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_without_the_checks_installed_a_line_says_how_to_install_them() -> None:
    done = run_without_checks("plugins", *SHORT)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "headstock: 'headstock plugins check' needs headstock-conformance, which is not installed; "
        "install it with: pip install ./plugins/conformance (in a checkout of headstock)\n"
    )


@pytest.mark.full  # the session `run` of nox has no checks either
def test_text_is_generated_without_the_checks_installed() -> None:
    prompt = ("run", "--model", "demo", "--prompt", "Once upon a time", "--max-tokens", "4")
    done = run_without_checks(*prompt, "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_an_unknown_name_is_a_usage_error() -> None:
    with pytest.raises(UnknownPlugin):
        main(["check", "sdpaa"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError("one\ntwo"), "one two"),
        (SystemExit(0), "SystemExit: 0 in fail_with.<locals>.run"),
        (KeyError("x"), "KeyError: 'x' in fail_with.<locals>.run"),
    ],
)
def test_whatever_a_case_raises_is_a_failure_on_one_line(error: BaseException, reason: str) -> None:
    result = run_case(Case("it", fail_with(error)))
    assert result.outcome is Outcome.FAILED
    assert result.reason.startswith(reason) and "\n" not in result.reason


@pytest.mark.full
def test_a_module_that_imports_torch_is_not_light() -> None:
    check.check_light("headstock_sdpa.plugin:spec")
    with pytest.raises(AssertionError, match="imports torch"):
        check.check_light("torch:get_num_threads")


def test_the_epilog_names_the_exit_codes() -> None:
    for code in ("0", "3", "5"):
        assert f" {code} " in plugin_check.CHECK_EPILOG
