"""Plugins that pages of the documentation tell to write, built and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

FENCE = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def sample_files(page: Path) -> dict[str, str]:
    """The files that a page tells to write, by path."""
    return {name: text for _, name, text in FENCE.findall(page.read_text()) if name}


def install_sample(page: Path, folder: Path) -> dict[str, str]:
    """An environment in which the plugin of a page is installed, from the wheel that its files
    make.
    """
    for name, text in sample_files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    subprocess.run(build, cwd=folder, check=True, timeout=600, capture_output=True)
    (wheel,) = folder.glob("dist/*.whl")
    unzip = [sys.executable, "-m", "zipfile", "-e", str(wheel), str(folder / "site")]
    subprocess.run(unzip, check=True, timeout=600)
    paths = (str(folder / "site"), os.environ.get("PYTHONPATH"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
    }


def run_headstock(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, run to its end."""
    script = "import sys; from headstock.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
