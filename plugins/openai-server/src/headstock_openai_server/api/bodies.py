"""The base of all request bodies."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

NoEffect: TypeAlias = Any
"""A field of other servers' schemas that changes no token: any value is accepted, and the response
names the field. Fields of type Any are refused instead, unless they have their default value.
"""


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body; undeclared fields are refused."""


def list_of(*kinds: type[Body]) -> msgspec.Meta:
    """The JSON schema of a list whose entries are checked one by one, so that errors name them."""
    references = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    return msgspec.Meta(extra_json_schema={"items": {"anyOf": references}})
