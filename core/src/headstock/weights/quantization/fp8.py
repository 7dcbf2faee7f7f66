"""FP8 as DeepSeek, Qwen and Meta publish it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from headstock.errors import shorten
from headstock.spi import WeightFormat, WeightKind
from headstock.weights.quantization.reader import (
    PackedTensors,
    QuantReader,
    check_choice,
    check_leftovers,
    check_plain,
    find_ignored_fields,
    find_unread,
    read_names,
)
from headstock.weights.quantization.scaled import find_scaled
from headstock.weights.safetensors_header import TensorEntry

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "activation_scheme": ("dynamic", "static"),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
}
"""Field -> what it may say. All is served: the numbers are those of the file, whichever scheme made
them, and scales that are powers of two are multiplied by like others."""

_LISTS = ("modules_to_not_convert", "ignored_layers")
_FIELDS = (*_CHOICES, *_LISTS, "quant_method", "weight_block_size", "activation_scale_ub")


@frozen
class Fp8Reader(QuantReader):
    """X times X_scale_inv or X_scale: a scale for each block, each row, or the tensor.

    block: rows and columns of a block; None for scales by row or tensor
    plain_modules: modules whose weights are not quantized
    """

    block: tuple[int, int] | None
    plain_modules: tuple[str, ...]
    ignored_fields: tuple[str, ...]

    @property
    def summary(self) -> str:  # type: ignore[override]
        """The format in words."""
        return "FP8" if self.block is None else f"block FP8 ({self.block[0]} x {self.block[1]})"

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """FP8, in blocks or not."""
        return (WeightFormat(kind=WeightKind.FP8_E4M3, group=self.block),)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Fp8Reader:
        """Read the configuration.   raises: ValueError with the field, expected and got"""
        size = fields.get("weight_block_size")
        for name, allowed in _CHOICES.items():
            check_choice(fields, name, allowed)
        return cls(
            block=None if size is None else read_block(size),
            plain_modules=read_names(fields, *_LISTS),
            ignored_fields=find_ignored_fields(fields, _FIELDS),
        )

    def sort(self, entries: Mapping[str, TensorEntry]) -> PackedTensors:
        """See `QuantReader.sort`."""
        packed = {}
        for name, entry in entries.items():
            if entry.dtype == "F8_E4M3":
                module = name.removesuffix(".weight")
                is_plain = any(_is_within(module, plain) for plain in self.plain_modules)
                check_plain(name, module, is_plain=is_plain, stored=entry.dtype)
                packed[name] = find_scaled(name, entries, self.block)
        ends = {"_scale_inv": "", ".weight_scale": ".weight"}
        check_leftovers(entries, packed, ends)
        return PackedTensors(packed, find_unread(entries))


def read_block(size: object) -> tuple[int, int]:
    """Rows and columns of a block.   raises: ValueError"""
    if (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(type(n) is int and n > 0 for n in size)
    ):
        return size[0], size[1]
    raise ValueError(
        f"weight_block_size: expected two whole numbers above 0, got {shorten(repr(size))}"
    )


def _is_within(module: str, plain: str) -> bool:
    """Whether a module is the named one, or inside it."""
    return module == plain or module.endswith(f".{plain}") or module.startswith(f"{plain}.")
