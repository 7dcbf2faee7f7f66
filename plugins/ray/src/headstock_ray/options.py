"""The options of `ray`."""

from __future__ import annotations

from typing import Any

import attrs
from attrs import field, frozen
from attrs.validators import ge, instance_of

from headstock_multiprocess.options import MultiprocessOptions


def _check_address(instance: object, attribute: attrs.Attribute[str], value: Any) -> None:
    """Refuse Ray's client, which runs no code on a node of the cluster."""
    if not isinstance(value, str) or not value or "://" in value:
        raise ValueError("address: expected auto, local, or the HOST:PORT of a cluster's head node")


@frozen(kw_only=True)
class RayOptions(MultiprocessOptions):
    """Which cluster has the ranks, and when one of them counts as lost.

    address: HOST:PORT of the cluster's head node; auto: RAY_ADDRESS, or the cluster of this node;
        local: a new one of this machine
    wait: seconds that the cluster may take to find room for the ranks
    """

    address: str = field(default="auto", validator=_check_address)
    wait: float = field(default=20.0, converter=float, validator=[instance_of(float), ge(1)])
