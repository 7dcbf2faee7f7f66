"""Checks of the installed plugins: each is loaded on its own, so that a broken one hides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from headstock import registry
from headstock.doctor.finding import Finding, fail_finding, pass_finding, run_check, warn_finding
from headstock.errors import AmbiguousPlugin, HeadstockError
from headstock.registry import InstalledPlugin
from headstock.registry.first_party import CHECKOUT, install_lines
from headstock.spi import SPI, CheckpointSpec

REQUIRED_KINDS = ("attention", "cache", "scheduler", "runner", "ops", "model", "executor")
"""Kinds without which nothing can run."""


def check_plugins(unfit: Callable[[Any], str]) -> Iterator[Finding]:
    """Whether every installed plugin loads, fits the contract, has what it needs and can serve; if
    no kind is empty.

    `unfit(spec)` says why one cannot serve here, or nothing; that is no failure, for another may be
    chosen.
    """
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
                f"{kind} {plugin.name}", partial(check_plugin, plugin, spec, unfit)
            )


def check_plugin(
    plugin: InstalledPlugin, spec: Any, unfit: Callable[[Any], str]
) -> Iterator[Finding]:
    """The findings about one plugin, given its spec or the error that choosing it raises."""
    subject = f"{plugin.kind} {plugin.name}"
    remedy = f"repair it or remove it: pip uninstall {plugin.distribution}"
    provider = f"{plugin.distribution} {plugin.version}"
    if isinstance(spec, HeadstockError):
        has_remedy = "pip " in str(spec) or isinstance(spec, AmbiguousPlugin)
        yield fail_finding(subject, str(spec), "" if has_remedy else remedy)
        return
    if isinstance(spec, CheckpointSpec):
        yield pass_finding(subject, provider)
        return
    if reason := unfit(spec):  # no installation would help, or the reason says which one would
        findings = [warn_finding(subject, f"{provider}: {reason}", "")]
    else:
        findings = [
            warn_finding(subject, f"{provider}: {rejection.message}", rejection.hint)
            for rejection in registry.find_missing(spec)
        ]
    yield from findings
    if findings:
        return
    try:
        registry.import_implementation(spec)
    except HeadstockError as error:
        yield fail_finding(subject, str(error), remedy)
    else:
        yield pass_finding(subject, provider)
