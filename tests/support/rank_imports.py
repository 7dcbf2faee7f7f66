"""The import of torch in the processes of other ranks, which tests delay or break."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PROGRAM = """\
import importlib.abc
import os
import sys
import time


class Gate(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            {action}
        return None


if "headstock_multiprocess.rank_process" in sys.orig_argv:
    sys.meta_path.insert(0, Gate())
"""


def write_gate(folder: Path, action: str) -> None:
    """Have the processes of other ranks do something before they import torch.

    folder: is to be in PYTHONPATH    action: a statement of Python
    """
    (folder / "sitecustomize.py").write_text(PROGRAM.format(action=action))


def find_children(parent: int | None = None) -> dict[int, str]:
    """The other ranks that a process, or this one, has started: ids and command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            its_parent = int(path.read_text().rpartition(")")[2].split()[1])
            line = path.with_name("cmdline").read_text()
            if its_parent == (parent or os.getpid()) and "headstock_multiprocess" in line:
                found[int(path.parent.name)] = line
    return found
