"""Checks of the installed plugins: each is loaded on its own, so that a broken one hides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from headstock import registry
from headstock.doctor.finding import Finding, failed, findings, passed, warned
from headstock.errors import AmbiguousPlugin, HeadstockError
from headstock.registry import Installed
from headstock.registry.first_party import CHECKOUT, sources
from headstock.spi import SPI, CheckpointSpec

NEEDED = ("attention", "cache", "scheduler", "runner", "ops", "model", "executor")
"""Kinds without which nothing can run."""


def plugins(unfit: Callable[[Any], str]) -> Iterator[Finding]:
    """Whether every installed plugin loads, fits the contract, has what it needs and can serve; if
    no kind is empty.

    `unfit(spec)` says why one cannot serve here, or nothing; that is no failure, for another may be
    chosen.
    """
    for kind in SPI:
        found = registry.specs(kind)
        if not found and kind in NEEDED:
            hint = next(
                iter(sources(kind).values()), f"pip install --force-reinstall ./core {CHECKOUT}"
            )
            yield failed(kind, f"no {registry.noun(kind)} is installed", hint)
        for plugin, spec in found:
            yield from findings(f"{kind} {plugin.name}", partial(one, plugin, spec, unfit))


def one(plugin: Installed, spec: Any, unfit: Callable[[Any], str]) -> Iterator[Finding]:
    """The findings about one plugin, given its spec or the error that choosing it raises."""
    subject = f"{plugin.kind} {plugin.name}"
    remedy = f"repair it or remove it: pip uninstall {plugin.distribution}"
    provider = f"{plugin.distribution} {plugin.version}"
    if isinstance(spec, HeadstockError):
        said = "pip " in str(spec) or isinstance(spec, AmbiguousPlugin)
        yield failed(subject, str(spec), "" if said else remedy)
        return
    if isinstance(spec, CheckpointSpec):
        yield passed(subject, provider)
        return
    if reason := unfit(spec):  # no installation would help, or the reason says which one would
        found = [warned(subject, f"{provider}: {reason}", "")]
    else:
        found = [
            warned(subject, f"{provider}: {each.message}", each.hint)
            for each in registry.missing(spec)
        ]
    yield from found
    if found:
        return
    try:
        registry.implementation(spec)
    except HeadstockError as error:
        yield failed(subject, str(error), remedy)
    else:
        yield passed(subject, provider)
