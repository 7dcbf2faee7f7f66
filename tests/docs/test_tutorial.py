"""What the tutorial shows can be done: its Python runs, and its plugin builds and serves."""

from __future__ import annotations

import re
from types import ModuleType

import numpy as np
import pytest
from sample_plugins import FENCE, install_sample, run_headstock, sample_files
from source_tree import ROOT

from headstock.scheduler import Arrived, Limits, Request, Sampled, initial_state, step
from headstock.spi import FullKV, KVGroup

TUTORIAL = ROOT / "docs" / "tutorial.md"


def examples() -> list[str]:
    """The Python of the tutorial that belongs to no file."""
    return [
        text
        for language, name, text in FENCE.findall(TUTORIAL.read_text())
        if language == "python" and not name
    ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the tutorial's plugin is installed, from the wheel that its files
    make.
    """
    return install_sample(TUTORIAL, tmp_path_factory.mktemp("plugin"))


def headstock(environment: dict[str, str], *arguments: str) -> str:
    """What the command line prints."""
    done = run_headstock(environment, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plugin_is_listed_and_inspected(environment: dict[str, str]) -> None:
    listed = headstock(environment, "plugins", "list", "scheduler")
    assert re.search(
        r"shortest-first +headstock-shortest-first +0\.1\.0 .* ok$", listed, re.MULTILINE
    )
    assert "short work first" in headstock(environment, "plugins", "inspect", "shortest-first")


def test_the_plugin_serves(environment: dict[str, str]) -> None:
    flags = (
        "--scheduler",
        "shortest-first",
        "--debug-invariants",
        "--num-pages",
        "64",
        "--max-batch-tokens",
        "5",
    )
    printed = headstock(
        environment, "run", "--quiet", *flags, "--prompt", "12 + 30 =", "--prompt", "47 + 38 ="
    )
    assert " 42." in printed
    assert " 85." in printed


def module(text: str) -> ModuleType:
    """A module of that text."""
    made = ModuleType("choice")
    exec(text, vars(made))
    return made


def test_the_plugins_choices_are_legal_and_nothing_waits_for_ever() -> None:
    schedule = module(sample_files(TUTORIAL)["src/headstock_shortest_first/choice.py"]).schedule
    group = KVGroup(layers=(0,), layout=FullKV(kv_heads=1, k_dim=1, v_dim=1))
    shape = {
        "max_rows": 4,
        "max_batch_tokens": 8,
        "max_len": 64,
        "page_size": 4,
        "num_pages": (24,),
    }
    limits = Limits(
        **shape,
        groups=(group,),
        schedule=schedule,
        scheduler="shortest-first",
        policy=None,
        check=True,
    )
    rng = np.random.default_rng(0)
    lengths = [48, *rng.integers(1, 20, 30).tolist()]
    events = [
        Arrived(Request(id=str(i), prompt=np.ones(n, np.int32), max_tokens=5))
        for i, n in enumerate(lengths)
    ]
    state, ended, steps = initial_state(limits), [], 0
    while len(ended) < len(lengths):
        plan = step(state, tuple(events))
        ended += [end.id for end in state.ended]
        rows = plan.samples > 0
        ones = np.ones(int(rows.sum()), np.int32)
        events = [Sampled(plan.rows[rows], plan.admission_ids[rows], ones, ones)]
        steps += 1
        assert steps < 1000, f"only {len(ended)} of {len(lengths)} requests ended"
    assert sorted(ended) == sorted(map(str, range(len(lengths))))
    assert ended[-1] != "0", "the long prompt that came first waited for everyone"


def test_the_python_of_the_tutorial_runs_and_says_what_the_page_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    codes = examples()
    assert codes
    shown = TUTORIAL.read_text()
    for code in codes:
        exec(compile(code, TUTORIAL.name, "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert [line for line in printed if f"    {line}\n" not in shown] == []
