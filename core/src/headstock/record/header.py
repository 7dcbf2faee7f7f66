"""The header of a recording: what the schedule of an engine depends on, and how to restore it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from attrs import evolve

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import CannotRun, HeadstockError, ModelError, UnknownPlugin, UsageError
from headstock.record.header_rules import LIMIT_RULES, NEWER_LIMITS
from headstock.scheduler import Limits
from headstock.spi import CachePolicy, FullKV, KVGroup, LatentKV, Layout, StateKV


def make_header(config: EngineConfig, limits: Limits) -> dict[str, Any]:
    """Return the header for an engine of these limits, for JSON."""
    plain = {name: getattr(limits, name) for name in LIMIT_RULES}
    return {
        "headstock": _core_version(),
        # The last part of the path alone: a recording is passed on, and folders name people.
        "model": PurePath(config.model).name,
        "limits": plain,
        "groups": [_describe_group(group) for group in limits.groups],
        "scheduler": config.scheduler,
        "cache": config.cache_type if limits.policy is not None else None,
        "options": list(config.opt),
        "prefix_cache_n": config.prefix_cache_n,
    }


def _describe_group(group: KVGroup) -> dict[str, Any]:
    """Return what the scheduler sees of a group, for JSON."""
    return {
        "layers": list(group.layers),
        "layout": group.layout.kind.value,
        "window": group.window,
    }


def _restore_group(group: Mapping[str, Any]) -> KVGroup:
    """Return a group that the scheduler serves as the recorded one; its pages have another size."""
    return KVGroup(
        layers=tuple(group["layers"]),
        layout=_LAYOUTS[group["layout"]],
        window=group["window"],
    )


_LAYOUTS: Mapping[str, Layout] = {
    layout.kind.value: layout
    for layout in (
        FullKV(kv_heads=1, k_dim=1, v_dim=1),
        LatentKV(dim=1, rope_dim=0),
        StateKV(tensors=()),
    )
}
"""A layout of each kind. Recordings are of schedules, which depend on the kind alone."""


def _core_version() -> str:
    """Return the installed version of core."""
    from importlib import metadata

    try:
        return metadata.version("headstock")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def restore_limits(header: Mapping[str, Any], *, check: bool = False) -> Limits:
    """Return the limits that the header describes, with the installed plugins of those names.

    raises: ModelError for a bad header, CannotRun when a plugin is not installed, and what the
    registry raises for a broken plugin
    """
    try:
        plain = {**NEWER_LIMITS, **header["limits"], "check": check}
        plain["num_pages"] = tuple(plain["num_pages"])
        groups = tuple(map(_restore_group, header["groups"]))
        # The scheduler and the policy are code, so the header has their names alone: a replay
        # proves that the installed plugins plan as the recorded ones did.
        schedule = registry.make_schedule(
            registry.load_spec("scheduler", header["scheduler"]), header["options"]
        )
        return Limits(
            **plain,
            groups=groups,
            cache=header["cache"] or "",
            schedule=schedule,
            policy=_restore_cache_policy(header, int(plain["page_size"]), groups),
        )
    except UnknownPlugin as error:
        raise CannotRun(str(error)) from error
    except UsageError as error:
        raise ModelError(
            f"the recording's header is not as this version writes it: {error}"
        ) from error
    except HeadstockError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(
            f"the recording's header is not as this version writes it: {error}"
        ) from error


def _restore_cache_policy(
    header: Mapping[str, Any], page_size: int, groups: Sequence[KVGroup]
) -> CachePolicy | None:
    """Return the cache policy with its recorded options; None where there was none."""
    if header["cache"] is None:
        return None
    spec = registry.load_spec("cache", header["cache"])
    registry.require_installed(spec)
    options = registry.make_options(spec, header["options"])
    if header["prefix_cache_n"] is not None:
        options = evolve(options, max_prefixes=header["prefix_cache_n"])
    cache_policy: CachePolicy = registry.import_implementation(spec)(page_size, groups, options)
    return cache_policy
