"""Check the installed plugins; each is loaded alone, so a broken one hides no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from headstock import registry
from headstock.doctor.finding import Finding, fail_finding, pass_finding, run_check, warn_finding
from headstock.errors import AmbiguousPlugin, HeadstockError, shorten
from headstock.registry import InstalledPlugin
from headstock.registry.first_party import CHECKOUT, install_lines
from headstock.spi import SPI, CheckpointSpec, PluginSpec, Rejection

REQUIRED_KINDS = ("attention", "cache", "scheduler", "runner", "ops", "model")
"""Kinds without which nothing can run."""


_FindObstacles = Callable[[PluginSpec], Sequence[Rejection]]
"""Why a plugin cannot run here; that is a warning, because another plugin may be chosen."""


def check_plugins(find_obstacles: _FindObstacles) -> Iterator[Finding]:
    """Check that every installed plugin loads and can run, and that no required kind is empty."""
    for entry in registry.list_unusable():
        subject = f"{entry.kind} {entry.name}".strip() or "entry points"
        yield warn_finding(shorten(subject), f"{entry.provider}: {entry.reason}", "")
    for kind in SPI:
        plugins = registry.load_specs(kind)
        if not plugins and kind in REQUIRED_KINDS:
            hint = next(
                iter(install_lines(kind).values()),
                f"pip install --force-reinstall ./core {CHECKOUT}",
            )
            yield fail_finding(kind, f"no {registry.kind_label(kind)} is installed", hint)
        for plugin, spec in plugins:
            yield from run_check(
                f"{kind} {plugin.name}", partial(check_plugin, plugin, spec, find_obstacles)
            )


def check_plugin(
    plugin: InstalledPlugin, spec: Any, find_obstacles: _FindObstacles
) -> Iterator[Finding]:
    """Check one plugin, given its spec or the error that loading the spec raised."""
    subject = f"{plugin.kind} {plugin.name}"
    remedy = f"repair it or remove it: pip uninstall {plugin.distribution}"
    provider = f"{plugin.distribution} {plugin.version}"
    if isinstance(spec, HeadstockError):
        # Most errors of loading end in their own remedy; a second one would be noise.
        has_remedy = "pip " in str(spec) or isinstance(spec, AmbiguousPlugin)
        yield fail_finding(subject, str(spec), "" if has_remedy else remedy)
        return
    if isinstance(spec, CheckpointSpec):
        yield pass_finding(subject, provider)
        return
    obstacles = find_obstacles(spec)
    for obstacle in obstacles:
        text = f"{provider}: {obstacle.message}"
        yield warn_finding(subject, text, obstacle.hint, obstacle.code)
    if obstacles:
        return  # its implementation may import what is missing
    try:
        registry.import_implementation(spec)
    except HeadstockError as error:
        yield fail_finding(subject, str(error), remedy)
    else:
        yield pass_finding(subject, provider)
