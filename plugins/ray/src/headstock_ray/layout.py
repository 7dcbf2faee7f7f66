"""Where the processes of a Ray Serve application run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import field, fields, frozen

from headstock.errors import UsageError, shorten

_REFUSED = ("host", "port")
"""Flags of a server that listens itself."""


def _read_count(value: Any) -> int:
    """A number of processes, or the text of one.   raises: ValueError"""
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"expected a number from 1, got {shorten(value)}")
    return int(value)


def _read_table(value: Any) -> Mapping[str, Any]:
    """A table of a configuration file, or the JSON of one.   raises: ValueError"""
    try:
        table = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        table = None
    if not isinstance(table, Mapping):
        raise ValueError(f"expected a JSON object, got {shorten(value)}")
    return table


@frozen(kw_only=True)
class Layout:
    """Where an application runs, beside the flags of its servers.

    replicas: their number; with `autoscaling`, at most
    autoscaling: fields of Ray Serve's AutoscalingConfig, such as min_replicas; empty for none
    replica_resources: fields of a replica's ray_actor_options, such as num_gpus
    ingresses: processes that take requests
    ingress_resources: fields of their ray_actor_options, such as resources
    """

    replicas: int = field(default=1, metadata={"read": _read_count})
    autoscaling: Mapping[str, Any] = field(factory=dict, metadata={"read": _read_table})
    replica_resources: Mapping[str, Any] = field(factory=dict, metadata={"read": _read_table})
    ingresses: int = field(default=1, metadata={"read": _read_count})
    ingress_resources: Mapping[str, Any] = field(factory=dict, metadata={"read": _read_table})


def split_arguments(arguments: Mapping[str, Any]) -> tuple[Layout, list[str]]:
    """The layout, and the other arguments as flags.   raises: UsageError"""
    readers = {each.name: each.metadata["read"] for each in fields(Layout)}
    layout: dict[str, Any] = {}
    flags: list[str] = []
    for name, value in arguments.items():
        if name in readers:
            try:
                layout[name] = readers[name](value)
            except ValueError as error:
                raise UsageError(f"{name}: {error}") from error
        elif name in _REFUSED:
            raise UsageError(f"{name} {shorten(value)}: Ray Serve listens; set its http_options")
        else:
            flags += _write_flags(f"--{name.replace('_', '-')}", value)
    return Layout(**layout), flags


def _write_flags(flag: str, value: Any) -> list[str]:
    """A setting as flags: none, one without a value, or one for each value."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    return [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]
