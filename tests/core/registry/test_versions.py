"""Plugins made for other versions of the contract, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from broken_plugins import Dist, scheduler_module, write_installed
from sample_plugins import run_headstock
from source_tree import CORE

from headstock.spi import SPI
from headstock.spi.versions import format_version

OFFERED = f"this headstock offers {format_version(SPI['scheduler'])}"
MIXED = "headstock.builtin.mixed:schedule"
MADE_FOR = {"of-0-2": "0, 2", "of-0-3": "0, 3", "of-0-3-99": "0, 3, 99", "of-0-4": "0, 4"}
"""Distribution, whose plugin has the same name -> the version that it declares."""

RUN = ("run", "--prompt", "12 + 30 =", "--max-tokens", "4", "--num-pages", "8", "--quiet")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which a scheduler for each version is installed."""
    folder = tmp_path_factory.mktemp("site")
    dists = [
        Dist(name=name, plugin=name, module=scheduler_module(name, version=version, path=MIXED))
        for name, version in MADE_FOR.items()
    ]
    write_installed(folder, tuple(dists))
    return with_path(dict(os.environ), folder)


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, str]:
    """The same with a core that offers a later revision of every kind."""
    folder = tmp_path_factory.mktemp("later")
    shutil.copytree(CORE, folder / "headstock")
    versions = folder / "headstock" / "spi" / "versions.py"
    source = versions.read_text()
    raised, count = re.subn(r": \(0, 3, \d+\)", ": (0, 3, 99)", source)
    assert count == len(SPI)
    versions.write_text(raised)
    return with_path(environment, folder)


def with_path(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment in which Python finds what is in the folder first."""
    paths = (str(folder), environment.get("PYTHONPATH"), *sys.path)
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.full
def test_a_later_revision_runs_plugins_made_for_it_and_before_it(later: dict[str, str]) -> None:
    # All other parts, the family of the demo model included, were made for 0.3.
    run = run_headstock(later, *RUN, "--scheduler", "of-0-3-99")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.strip()


def test_the_list_says_which_versions_fit(
    later: dict[str, str], environment: dict[str, str]
) -> None:
    refused = {"of-0-2", "of-0-4"}
    for env, expected in ((later, refused), (environment, refused | {"of-0-3-99"})):
        run = run_headstock(env, "plugins", "list", "scheduler", "--json")
        status = {row["name"]: row["status"] for row in json.loads(run.stdout)}
        assert {name for name in MADE_FOR if status[name] == "wrong contract"} == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(
            "of-0-2",
            f"made for version 0.2 of the scheduler contract; {OFFERED}; ",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "of-0-3-99",
            f"made for version 0.3.99 of the scheduler contract; {OFFERED}; ",
            marks=pytest.mark.full,
        ),
    ],
)
def test_any_other_version_is_refused_in_one_line(
    environment: dict[str, str], name: str, words: str
) -> None:
    run = run_headstock(environment, *RUN, "--scheduler", name)
    assert (run.returncode, run.stdout) == (4, "")
    (line,) = run.stderr.splitlines()
    assert words in line and f"{name} 1.0" in line
    assert line.endswith("read docs/plugins.md#versions-of-the-contract")
