"""The options of `radix`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, instance_of, optional


@frozen(kw_only=True)
class RadixOptions:
    """How the index is kept.

    `max_prefixes`: the maximum number of prefixes of ended requests that are kept, the latest ones;
        None: as many as fit, 0: none.
    `debug`: each call is checked against the contract, at a cost that grows with the pages it
        names.
    """

    max_prefixes: int | None = field(default=None, validator=optional([instance_of(int), ge(0)]))
    debug: bool = False
