"""Installed distributions by their metadata: untrusted files, which may be broken.

Importing it imports the standard library alone.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cached_property
from importlib.metadata import Distribution, distributions, entry_points
from pathlib import PurePath
from typing import NamedTuple

_HEADER = re.compile(r"^(Name|Version|Summary):[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)
_TORCH_BACKENDS = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class EntryPointLine(NamedTuple):
    """A line of an entry_points.txt, as it stands there.

    fault: what is wrong with it; empty for `name = value` in a group
    """

    group: str
    name: str
    value: str
    fault: str = ""


class InstalledDistribution:
    """What the files of one distribution say; no method raises for what is in them."""

    def __init__(self, source: Distribution) -> None:
        self.source = source

    @cached_property
    def stem(self) -> tuple[str, str]:
        """Name and version by the folder's name, such as `near_cache-1.0.dist-info`."""
        # No public attribute names the folder, and METADATA may be unreadable.
        folder = PurePath(str(getattr(self.source, "_path", "")))
        if folder.suffix not in (".dist-info", ".egg-info"):
            return "", ""
        name, _, version = folder.stem.partition("-")
        return name, version.partition("-")[0]  # a Python version may follow

    @cached_property
    def header(self) -> Mapping[str, str]:
        """The fields Name, Version and Summary of METADATA, as far as they can be read."""
        # `Distribution.metadata` parses the description too: half a second for 200 of them.
        text = self.read_text("METADATA")[0] or self.read_text("PKG-INFO")[0]
        fields: dict[str, str] = {}
        for name, value in _HEADER.findall(re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]):
            fields.setdefault(name, value)
        return fields

    @property
    def name(self) -> str:
        """The name; empty where nothing says it."""
        return self.header.get("Name") or self.stem[0]

    @property
    def version(self) -> str:
        """The version; empty where nothing says it."""
        return self.header.get("Version") or self.stem[1]

    @property
    def key(self) -> str:
        """By what two folders are one distribution (PEP 503)."""
        return normalize_name(self.stem[0] or self.name)

    def read_text(self, file: str) -> tuple[str, str]:
        """The text of a file, empty without one, and why it cannot be read."""
        try:
            return self.source.read_text(file) or "", ""
        except Exception as error:  # of the file system, of a decoder, of another finder's class
            return "", f"{file} cannot be read: {type(error).__name__}: {error}"

    def read_entry_points(self) -> list[EntryPointLine]:
        """The lines of entry_points.txt; a file that cannot be read is one line with a fault."""
        text, fault = self.read_text("entry_points.txt")
        if fault:
            return [EntryPointLine("", "", "", fault)]
        return list(_parse_entry_points(text.removeprefix("\ufeff")))


def _parse_entry_points(text: str) -> Iterator[EntryPointLine]:
    """Parse lines of `[group]` and `name = value`."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        fault = ""
        if not (name and equals and value):
            fault = "entry_points.txt has a line that is not NAME = MODULE:FUNCTION"
        elif not group:
            fault = "entry_points.txt has a line before its first [GROUP]"
        yield EntryPointLine(group, name, value, fault)


def read_distributions() -> list[InstalledDistribution]:
    """The distributions on `sys.path`; the first of those with one name, as imports find it."""
    by_key: dict[str, InstalledDistribution] = {}
    for number, source in enumerate(distributions()):
        distribution = InstalledDistribution(source)
        by_key.setdefault(distribution.key or f"{number}", distribution)
    return list(by_key.values())


def read_path_times() -> tuple[tuple[str, int], ...]:
    """The folders of `sys.path` that exist, and when each last changed, in nanoseconds.

    While they stay equal, nothing has been installed or removed.
    """
    times = []
    for folder in sys.path:
        with suppress(OSError):
            times.append((folder, os.stat(folder or ".").st_mtime_ns))
    return tuple(times)


def normalize_name(distribution: str) -> str:
    """Normalize a distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def shield_torch(
    environment: MutableMapping[str, str], read: Callable[..., object] = entry_points
) -> None:
    """Let torch look for no backends of other devices where their entry points cannot be read.

    `import torch` would raise, because of one line in the metadata of any distribution.

    writes: environment
    """
    try:
        read(group="torch.backends")
    except Exception:
        environment.setdefault(_TORCH_BACKENDS, "0")
