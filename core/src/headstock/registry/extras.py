"""What a distribution offers as extras: by convention each is one way to have the kernels that its plugins need."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

from headstock.registry.requirements import met

EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")


def incomplete(name: str) -> str:
    """The commands, any of which gives a distribution one of its extras, when it has none of them; else nothing.

    Only metadata is read, so this says nothing about devices.
    """
    try:
        extras = offered(distribution(name).requires or [])
    except PackageNotFoundError:
        return ""
    if not extras or any(all(map(met, needs)) for needs in extras.values()):
        return ""
    absent = [needs for needs in extras.values() if not all(met(need, any_build=True) for need in needs)]
    return " or ".join("pip install " + " ".join(f"'{need}'" for need in needs) for needs in absent or extras.values())


def offered(requirements: list[str]) -> dict[str, list[str]]:
    """Extra -> the requirements that it adds, without their markers."""
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        need, _, marker = requirement.partition(";")
        if found := EXTRA.search(marker):
            extras.setdefault(found[1], []).append(need.strip())
    return extras
