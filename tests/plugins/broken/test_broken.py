"""Broken plugins as real distributions beside sound ones, met through the installed command. Run by
`nox -s broken`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from broken_plugins import DISTS, MISMATCHED

from headstock.registry.first_party import CONFORMANCE_LINE, FOLDERS

ROOT = Path(__file__).parents[3]

INSPECTED = [
    ("sound", 0, ["provided by", "sound-plugin 1.0"]),
    ("needy", 0, ["no-such-kernels", "expected >=2, got nothing", "pip install kernels"]),
    ("choosy", 0, ["one of: no-such-kernels"]),
    ("late", 0, ["breaks_late_inside:choose"]),
    ("mixed", 0, ["headstock "]),
    ("kernelless", 0, ["no-kernels 1.0", "got nothing", "pip install kernels"]),
    ("twin-second:twin", 0, ["twin-second 1.0"]),
    ("twin", 2, ["twin-first 1.0", "twin-second 1.0", "twin-first:twin or twin-second:twin"]),
    ("soumd", 2, ["did you mean sound?"]),
    ("sdpa", 2, ["pip install ./backends/sdpa (in a checkout of headstock)"]),
    (
        "import-error",
        3,
        ["raises-import-error 1.0", "raises_import_error:spec", "'no_such_module_anywhere'"],
    ),
    ("assertion", 3, ["raises-assertion 1.0", "AssertionError: arithmetic is off"]),
    ("system-exit", 3, ["raises-system-exit 1.0", "SystemExit: left early"]),
    ("when-called", 3, ["raises-when-called 1.0", "KeyError: 'lost'"]),
    ("no-spec", 3, ["has-no-spec 1.0", "has_no_spec:spec"]),
    ("wrong-type", 3, ["wrong-type 1.0", "expected a SchedulerSpec", "got dict"]),
    ("wrong-name", 3, ["wrong-name 1.0", "got 'another'"]),
    ("future", 4, ["from-the-future 1.0", "99.0", "upgrade headstock"]),
    ("past", 4, ["from-the-past 1.0", "upgrade from-the-past"]),
    ("ancient", 4, ["lost-a-name 1.0", "upgrade lost-a-name"]),
    ("later", 4, ["next-revision 1.0", "0.3.9", "upgrade headstock"]),
]

CHOSEN = [
    ("sound", 0, []),
    ("mixed", 0, []),
    ("twin", 2, ["twin-first 1.0"]),
    ("system-exit", 3, ["raises-system-exit 1.0"]),
    ("late", 3, ["breaks-late 1.0", "breaks_late_inside:choose"]),
    ("future", 4, ["from-the-future 1.0"]),
    (
        "needy",
        5,
        ["needs-kernels 1.0", "no-such-kernels >=2 is not installed", "pip install kernels"],
    ),
    ("choosy", 5, ["needs-either 1.0", "needs one of several"]),
]

CHOOSE = """
import sys
from headstock import registry
from headstock.errors import HeadstockError
try:
    spec = registry.load_spec("scheduler", sys.argv[1])
    registry.require_installed(spec)
    registry.import_implementation(spec)
except HeadstockError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def headstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command, run to its end."""
    return run(str(Path(sys.executable).with_name("headstock")), *arguments)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_this_environment_has_no_torch() -> None:
    assert find_spec("torch") is None


def test_every_plugin_is_listed_with_what_it_is() -> None:
    done = headstock("plugins", "list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = {
        (each["distribution"], each["name"]): each["status"] for each in json.loads(done.stdout)
    }
    mismatched = dict.fromkeys(MISMATCHED, "wrong contract")
    ours = {
        (dist.name, dist.plugin): ({"twin": "duplicate"} | mismatched).get(dist.plugin, "ok")
        for dist in DISTS
    }
    assert {pair: status for pair, status in listed.items() if pair[0] != "headstock"} == ours
    assert listed["headstock", "mixed"] == "ok"


@pytest.mark.parametrize(
    ("name", "code", "said"), INSPECTED, ids=[name for name, _, _ in INSPECTED]
)
def test_inspecting_a_plugin_says_what_it_is(name: str, code: int, said: list[str]) -> None:
    done = headstock("plugins", "inspect", name)
    assert done.returncode == code
    text = done.stderr if code else done.stdout
    assert [part for part in said if part not in text] == []
    assert done.stderr.count("\n") == (1 if code else 0)


@pytest.mark.parametrize(("name", "code", "said"), CHOSEN, ids=[name for name, _, _ in CHOSEN])
def test_choosing_a_plugin_works_or_fails_with_the_right_code(
    name: str, code: int, said: list[str]
) -> None:
    done = run(sys.executable, "-c", CHOOSE, name)
    assert done.returncode == code
    assert [part for part in said if part not in done.stderr] == []
    assert "Traceback" not in done.stderr


def test_checking_a_plugin_without_the_checks_says_how_to_install_them() -> None:
    assert find_spec("headstock_conformance") is None
    done = headstock("plugins", "check", "sound")
    assert (done.returncode, done.stdout) == (5, "")
    assert f"which is not installed; install it with: {CONFORMANCE_LINE}\n" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_hint_for_a_plugin_of_ours_can_be_followed(folder: str) -> None:
    distribution, _ = FOLDERS[folder]
    assert f'name = "{distribution}"' in (ROOT / folder / "pyproject.toml").read_text()
    folders = Path(os.environ["HEADSTOCK_WHEELS"]).iterdir()
    wheels = [argument for each in folders for argument in ("--find-links", str(each))]
    done = run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--no-index",
        *wheels,
        distribution,
    )
    assert done.returncode == 0, done.stderr
    assert f"Would install {distribution}" in done.stdout
