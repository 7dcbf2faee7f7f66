"""The versions of the contract, one for each kind of plugin."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import field, frozen
from attrs.validators import ge, instance_of

SPI: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "attention": (0, 3, 0),
        "cache": (0, 3, 0),
        "scheduler": (0, 3, 0),
        "runner": (0, 3, 0),
        "ops": (0, 3, 0),
        "model": (0, 3, 0),
        "checkpoint": (0, 3, 0),
        "command": (0, 3, 0),
        "proposer": (0, 3, 0),
        "tools": (0, 3, 0),
        "logits": (0, 3, 0),
        "grammar": (0, 3, 0),
        "executor": (0, 3, 0),
    }
)
"""Kind of plugin -> (major, edition, revision) that this core offers.

A revision only adds, as docs/plugins.md defines; any other change is an edition. The entry-point
group of a kind is `headstock.KIND`.
"""

RESERVED = ("quant", "weights")
"""Kinds whose group names are taken for later and must not be used by anyone else."""


@frozen
class SpiRange:
    """The versions of its kind's contract that a plugin works with.

    The major and the edition must be equal, the revision at least this: `SpiRange(0, 3, 0)` is
    0.2.1 and every later 0.2.x.
    """

    major: int = field(validator=[instance_of(int), ge(0)])
    edition: int = field(validator=[instance_of(int), ge(0)])
    revision: int = field(default=0, validator=[instance_of(int), ge(0)])

    def accepts(self, offered: tuple[int, int, int]) -> bool:
        """Whether a core that offers `offered` can use the plugin."""
        *edition, revision = offered
        return edition == [self.major, self.edition] and revision >= self.revision

    def __str__(self) -> str:
        return format_version((self.major, self.edition, self.revision))


def format_version(version: tuple[int, int, int]) -> str:
    """The version as text: 0.3.1, and 0.3 for revision 0."""
    major, edition, revision = version
    return f"{major}.{edition}.{revision}" if revision else f"{major}.{edition}"
