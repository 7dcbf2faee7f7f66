"""What a new user is told, through the command line and through Python, with the bundled model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headstock.cli.main import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `headstock run ARGUMENTS` on a small pool; the exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(
            ["run", "--num-pages", "64", "--prompt", "Once", "--max-tokens", "2", *arguments]
        )
        return code, *capsys.readouterr()

    return call


@pytest.mark.feature("G4")
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_the_runner_of_graphs_by_name_cannot_run_on_a_cpu(
    run: Call,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    arguments = {"flag": ["--runner", "cudagraph"], "environment": []}.get(source)
    if source == "environment":
        monkeypatch.setenv("HEADSTOCK_RUNNER", "cudagraph")
    if arguments is None:
        file = tmp_path_factory.mktemp("config") / "engine.toml"
        file.write_text('runner = "cudagraph"\n')
        arguments = ["--config", str(file)]
    code, out, err = run(*arguments, "--device", "cpu")
    assert (code, out, len(err.splitlines())) == (5, "", 1)
    assert "cudagraph cannot run on cpu; set it to eager" in err


@pytest.mark.feature("G4")
def test_a_preset_that_wants_graphs_says_so_on_a_cpu_but_not_when_quiet(run: Call) -> None:
    code, _, err = run("--preset", "max-throughput", "--device", "cpu")
    assert code == 0 and err.count("no graphs on a CPU") == 1
    code, _, err = run("--preset", "max-throughput", "--device", "cpu", "--quiet")
    assert code == 0 and "level=" not in err


def test_quiet_hides_log_lines_unless_their_level_is_given_beside_it(
    run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG_LEVEL", "DEBUG")
    assert run("--quiet")[::2] == (0, "")
    assert "level=debug" in run("--quiet", "--log-level", "DEBUG")[2]
