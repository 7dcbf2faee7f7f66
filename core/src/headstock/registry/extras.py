"""Read the extras of a plugin's distribution; each is one way to have the kernels it needs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

from headstock.registry.entries import InstalledPlugin
from headstock.registry.requirements import is_requirement_met, requirement_name

_KINDS_WITHOUT_KERNELS = frozenset(
    {"cache", "checkpoint", "command", "grammar", "proposer", "scheduler", "tools"}
)
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w.-]+)["']""")


def explain_missing_extras(plugin: InstalledPlugin) -> str:
    """Explain how to complete a plugin whose distribution has none of its extras installed.

    Empty when one is installed, for kinds that launch no kernels, and for core, whose extras bring
    other things.

    Only metadata is read, so the text says nothing about devices. A library that is installed as a
    CPU build comes first: its GPU build is the smallest step.
    """
    if plugin.kind in _KINDS_WITHOUT_KERNELS or plugin.distribution == "headstock":
        return ""
    # Extras, because the spec's `requires` would need the plugin's code, and a list runs none.
    try:
        extras = _requirements_by_extra(distribution(plugin.distribution).requires or [])
    # What cannot be read of a distribution says nothing of extras; `list_unusable` names files.
    except (PackageNotFoundError, ValueError, TypeError):
        return ""
    if not extras or any(all(map(is_requirement_met, needs)) for needs in extras.values()):
        return ""
    ways = sorted(
        extras.values(),
        key=lambda needs: not all(is_requirement_met(need, any_build=True) for need in needs),
    )
    return " or ".join(map(_install_hint, ways))


def _install_hint(needs: list[str]) -> str:
    """The command that installs the requirements of one extra, or the CUDA builds that it lacks."""
    if all(is_requirement_met(need, any_build=True) for need in needs):
        built = ", ".join(
            sorted({requirement_name(need) for need in needs if not is_requirement_met(need)})
        )
        return f"a CUDA build of {built} instead of its CPU build"
    return "pip install " + " ".join(f"'{need}'" for need in needs)


def _requirements_by_extra(requirements: list[str]) -> dict[str, list[str]]:
    """Group requirements by the extra that adds them, without their markers."""
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        need, _, marker = requirement.partition(";")
        if match := _EXTRA.search(marker):
            extras.setdefault(match[1], []).append(need.strip())
    return extras
