"""What a distribution offers as extras: by convention each is one way to have the kernels that its
plugins need.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

from headstock.registry.requirements import met, package

EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")


def incomplete(name: str) -> str:
    """What gives a distribution one of its extras, any of several ways, when it has none of them;
    else nothing.

    Only metadata is read, so this says nothing about devices. A library that is here as a build for
    CPUs comes first: its build for GPUs is the smallest step.
    """
    try:
        extras = offered(distribution(name).requires or [])
    except PackageNotFoundError:
        return ""
    if not extras or any(all(map(met, needs)) for needs in extras.values()):
        return ""
    ways = sorted(
        extras.values(), key=lambda needs: not all(met(need, any_build=True) for need in needs)
    )
    return " or ".join(map(way, ways))


def way(needs: list[str]) -> str:
    """What gives the requirements of one extra, none of which is met by a build for GPUs."""
    if all(met(need, any_build=True) for need in needs):
        built = ", ".join(sorted({package(need) for need in needs if not met(need)}))
        return f"a CUDA build of {built} in place of its CPU build"
    return "pip install " + " ".join(f"'{need}'" for need in needs)


def offered(requirements: list[str]) -> dict[str, list[str]]:
    """Extra -> the requirements that it adds, without their markers."""
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        need, _, marker = requirement.partition(";")
        if found := EXTRA.search(marker):
            extras.setdefault(found[1], []).append(need.strip())
    return extras
