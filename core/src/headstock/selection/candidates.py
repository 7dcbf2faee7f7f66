"""Candidates for a part: whether one can run here, and the first that is accepted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headstock import registry
from headstock.errors import CannotRun, HeadstockError, PluginBroken, SpiMismatch
from headstock.logs import log_event
from headstock.selection.capabilities import explain_device_mismatch, join_refusals
from headstock.spi import DeviceEnv

T = TypeVar("T")

LOG = logging.getLogger(__name__)


def find_ready_spec(kind: str, name: str, env: DeviceEnv) -> Any:
    """Load a plugin's spec and check that its requirements are installed.

    A plugin that does not run on this device is not checked for packages: none would help, and the
    caller's error names the device.
    """
    spec = registry.load_spec(kind, name)
    if not explain_device_mismatch(spec, env):
        registry.require_installed(spec)
    return spec


def select_first_accepted(
    name_or_auto: str,
    names: Sequence[str],
    make: Callable[[str], T],
    flag: str,
) -> T:
    """Return what `make` gives for the name, or for `auto` the first of `names` that it accepts.

    raises: CannotRun with the reason of each candidate
    """
    return make(name_or_auto) if name_or_auto != "auto" else try_each(names, make, flag, "auto")


def try_each(names: Sequence[str], make: Callable[[str], T], flag: str, value: str) -> T:
    """Return what `make` gives for the first of the names that it accepts.

    flag, value: what the user set that stands for the names
    raises: CannotRun with the reason of each candidate
    """
    refusals = []
    for name in names:
        try:
            return make(name)
        except HeadstockError as error:
            refusals.append(error)
            # A candidate that does not suit the machine is what `auto` is for; a broken one is not.
            level = (
                logging.WARNING if isinstance(error, PluginBroken | SpiMismatch) else logging.DEBUG
            )
            LOG.log(
                level,
                log_event(f"{value} rejected", setting=flag, candidate=name, reason=str(error)),
            )
    raise CannotRun(f"{flag} {value}: nothing can run here: {join_refusals(refusals)}")
