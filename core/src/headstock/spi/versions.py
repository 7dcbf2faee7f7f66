"""The versions of the contract, one for each kind of plugin."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import field, frozen
from attrs.validators import ge, instance_of

SPI: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "attention": (0, 2),
        "cache": (0, 2),
        "scheduler": (0, 2),
        "runner": (0, 2),
        "ops": (0, 2),
        "model": (0, 2),
        "checkpoint": (0, 2),
        "command": (0, 2),
    }
)
"""Kind of plugin -> (major, minor) that this core offers.

The entry-point group of a kind is `headstock.KIND`.
"""

RESERVED = ("grammar", "tools", "quant", "proposer", "weights")
"""Kinds whose group names are taken for later and must not be used by anyone else."""


@frozen
class SpiRange:
    """The versions of its kind's contract that a plugin works with.

    The major must be equal and the minor at least this. While the major is 0 a new minor may break
    plugins, so there the minor must be equal too.
    """

    major: int = field(validator=[instance_of(int), ge(0)])
    minor: int = field(validator=[instance_of(int), ge(0)])

    def accepts(self, offered: tuple[int, int]) -> bool:
        """Whether a core that offers `offered` can use the plugin."""
        # As in semantic versioning, where 0.x promises nothing between minors.
        major, minor = offered
        return major == self.major and (minor == self.minor if major == 0 else minor >= self.minor)

    def __str__(self) -> str:
        return (
            f"{self.major}.{self.minor}"
            if self.major == 0
            else f"{self.major}.{self.minor} or a later {self.major}.x"
        )
