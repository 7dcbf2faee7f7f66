"""The command plugin of docs/plugins.md can be built, and the command line finds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sample_plugins import install_sample, run_headstock
from source_tree import ROOT

PAGE = ROOT / "docs" / "plugins.md"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `headstock perplexity` is installed."""
    return install_sample(PAGE, tmp_path_factory.mktemp("plugin"))


def test_help_shows_the_description_of_its_distribution(environment: dict[str, str]) -> None:
    lines = run_headstock(environment, "--help").stdout.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines if line.startswith("  perplexity ")] == [
        "say how well a model predicts a text"
    ]


def test_the_tab_key_knows_its_flags(environment: dict[str, str]) -> None:
    script = run_headstock(environment, "completion", "bash").stdout
    flags = re.search(
        r"^_shtab_headstock_perplexity_option_strings=\((.*)\)$", script, re.MULTILINE
    )
    assert flags is not None
    assert {"--quiet", "--model", "--scheduler"} <= set(re.findall(r"--[\w-]+", flags[1]))
    assert re.search(r"^_shtab_headstock_perplexity_pos_0_COMPGEN=\S+file", script, re.MULTILINE)
    assert "prefill-first" in script


@pytest.mark.full
def test_it_predicts_what_the_model_learnt_better_than_noise(
    environment: dict[str, str], tmp_path: Path
) -> None:
    found = []
    for text in ("Once upon a time, there was a little girl.", "girl a was upon little, time."):
        (tmp_path / "text").write_text(text)
        flags = ("--model", "demo", "--quiet", "--num-pages", "64")
        done = run_headstock(environment, "perplexity", str(tmp_path / "text"), *flags)
        assert (done.returncode, done.stderr) == (0, "")
        found.append(float(done.stdout))
    assert 1 < found[0] < found[1] / 2


def test_its_errors_are_one_line_and_an_exit_code(environment: dict[str, str]) -> None:
    for arguments, code, said in [
        (("no-such-file",), 6, "headstock: cannot read no-such-file: "),
        ((), 2, "headstock: the following arguments are required: FILE; "),
        (("text", "--quite"), 2, "headstock: unknown flag --quite; did you mean --quiet?"),
    ]:
        done = run_headstock(environment, "perplexity", *arguments)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
