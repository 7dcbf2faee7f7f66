"""Readers of quantized checkpoints: which tensors pack others, and in which format.

A reader is found by config.json and makes weights out of what a file holds. Today all of them are
dequantized at load (`headstock.weights.dequantize`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from headstock.errors import ModelError, shorten
from headstock.spi import WeightFormat, WeightKind
from headstock.weights.safetensors_header import TensorEntry

METHOD_FIELDS = ("quant_method", "quant_algo", "format")
"""The fields that name a method: transformers', ModelOpt's, compressed-tensors'."""

QUANTIZATION_FIELDS = (
    "quantization_config",
    "compression_config",
    "quantization",
    "quant_config",
)
"""The fields of config.json that say how weights are quantized; the first one is transformers'."""

_ABSENT: tuple[object, ...] = (None, "", (), [], {})


@frozen
class PackedTensor:
    """What a tensor packs, and which other tensor holds its scales."""

    format: WeightFormat
    scales: str


@frozen
class PackedTensors:
    """The tensors of a checkpoint by what they are for; `unread` are not used here."""

    packed: Mapping[str, PackedTensor]
    unread: frozenset[str]


class QuantReader(ABC):
    """Knows the tensors of one format.

    summary: the format in words
    ignored_fields: fields of the configuration that are not read
    """

    summary: str
    ignored_fields: tuple[str, ...]

    @property
    @abstractmethod
    def formats(self) -> tuple[WeightFormat, ...]:
        """The formats that its matrices may have."""

    @abstractmethod
    def sort(self, entries: Mapping[str, TensorEntry]) -> PackedTensors:
        """Find packed tensors and their scales.

        raises: ModelError for scales that are missing, left over or of a wrong shape or dtype
        """


@frozen
class Fp8Reader(QuantReader):
    """FP8 as DeepSeek and Qwen publish it: X times X_scale_inv, a scale for each block.

    Without `weight_block_size` there is one scale for a whole tensor.

    group: rows and columns of a block; None for one scale
    plain_modules: modules whose weights are not quantized
    """

    group: tuple[int, int] | None
    plain_modules: tuple[str, ...]
    ignored_fields: tuple[str, ...]

    @property
    def summary(self) -> str:  # type: ignore[override]
        """The format in words."""
        if self.group is None:
            return "FP8 with one scale a tensor"
        return f"block FP8 ({self.group[0]} x {self.group[1]})"

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """FP8, in blocks or not."""
        return (WeightFormat(kind=WeightKind.FP8_E4M3, group=self.group),)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Fp8Reader:
        """Read the configuration.   raises: ValueError with the field, found and wanted"""
        size = fields.get("weight_block_size")
        if size is not None and not _is_block(size):
            raise ValueError(
                f"weight_block_size is {shorten(repr(size))}, expected two whole numbers above 0"
            )
        for name, allowed in _FP8_CHOICES.items():
            if fields.get(name) is not None and fields[name] not in allowed:
                raise ValueError(
                    f"{name} is {shorten(repr(fields[name]))}, expected {' or '.join(allowed)}"
                )
        names = [fields.get(name) or () for name in ("modules_to_not_convert", "ignored_layers")]
        if not all(isinstance(each, list | tuple) for each in names) or not all(
            isinstance(module, str) for each in names for module in each
        ):
            raise ValueError(
                "modules_to_not_convert and ignored_layers must be lists of names of modules"
            )
        ignored = (
            name
            for name, value in fields.items()
            if name not in _FP8_FIELDS and value not in _ABSENT and value is not False
        )
        return cls(
            group=None if size is None else (size[0], size[1]),
            plain_modules=tuple(module for each in names for module in each),
            ignored_fields=tuple(ignored),
        )

    def sort(self, entries: Mapping[str, TensorEntry]) -> PackedTensors:
        """See `QuantReader.sort`."""
        packed = {
            name: PackedTensor(
                WeightFormat(kind=WeightKind.FP8_E4M3, group=self.group),
                self._find_scales(name, entry, entries),
            )
            for name, entry in entries.items()
            if entry.dtype == "F8_E4M3"
        }
        used = {each.scales for each in packed.values()}
        for name in entries:
            if name.endswith(_SCALE_SUFFIXES) and name not in used:
                raise ModelError(_explain_leftover(name, entries))
        return PackedTensors(
            packed, frozenset(name for name in entries if name.endswith(_UNREAD_SUFFIXES))
        )

    def _find_scales(
        self, name: str, entry: TensorEntry, entries: Mapping[str, TensorEntry]
    ) -> str:
        """Find the tensor with the scales of another one, and check it.   raises: ModelError"""
        module = name.removesuffix(".weight")
        if any(_is_within(module, plain) for plain in self.plain_modules):
            raise ModelError(
                f"{shorten(name)} is F8_E4M3, but quantization_config says that "
                f"{shorten(module)} is not quantized"
            )
        scales = next((name + end for end in ("_scale_inv", "_scale") if name + end in entries), "")
        if not scales:
            raise ModelError(
                f"{shorten(name)} is F8_E4M3, and {shorten(name)}_scale_inv is missing"
            )
        stored, shapes = entries[scales], self._scale_shapes(name, entry.shape)
        if stored.shape not in shapes:
            raise ModelError(
                f"{shorten(scales)} has shape {list(stored.shape)}, expected {list(shapes[0])} for "
                f"{self.summary} of {list(entry.shape)}"
            )
        if stored.dtype not in _SCALE_DTYPES:
            raise ModelError(
                f"{shorten(scales)} has dtype {stored.dtype}, expected one of "
                f"{', '.join(_SCALE_DTYPES)}"
            )
        return scales

    def _scale_shapes(self, name: str, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes that scales of a tensor may have.   raises: ModelError for a vector"""
        if len(shape) < 2:
            raise ModelError(f"{shorten(name)} is F8_E4M3 of shape {list(shape)}, and no matrix")
        if self.group is None:
            return [(), (1,)]
        rows, columns = (
            -(-size // block) for size, block in zip(shape[-2:], self.group, strict=True)
        )
        return [(*shape[:-2], rows, columns)]


_FP8_CHOICES: Mapping[str, tuple[str, ...]] = {
    "activation_scheme": ("dynamic", "static"),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
}
"""Field -> what it may say. All is served: the numbers are those of the file, whichever scheme made
them, and scales that are powers of two are multiplied by like others."""

_FP8_FIELDS = frozenset(
    (
        *_FP8_CHOICES,
        *("quant_method", "weight_block_size", "modules_to_not_convert", "ignored_layers"),
    )
)

_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_SCALE_SUFFIXES = ("_scale_inv", ".weight_scale")

KV_SCALE_SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".kv_scale")
"""Endings of the names of tensors that scale keys and values."""

_UNREAD_SUFFIXES = (
    # Of activations, which are not quantized here.
    *(".input_scale", ".activation_scale"),
    # Of keys and values, for pools of 8 bits; a model that has them is refused with such a pool.
    *KV_SCALE_SUFFIXES,
)

_READERS: Mapping[str, Callable[[Mapping[str, Any]], QuantReader]] = {"fp8": Fp8Reader.parse}
"""Values of `quant_method` -> what makes the reader of a configuration."""


def find_quant_reader(hf: Mapping[str, Any]) -> QuantReader | None:
    """Find the reader for a parsed config.json; None where the weights are not quantized.

    raises: ValueError when they are by a method that nothing here reads
    """
    for field in QUANTIZATION_FIELDS:
        value = hf.get(field)
        if value is None:
            continue
        method = _find_method(value)
        if field == QUANTIZATION_FIELDS[0] and method in _READERS:
            try:
                return _READERS[method](value)
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from error
        by = f" by {shorten(method)}" if method else ""
        raise ValueError(
            f"{field} says that the weights are quantized{by}, and only {', '.join(_READERS)} is "
            "read; use the full-precision model"
        )
    return None


def _find_method(quantization: object) -> str:
    """How weights are quantized; empty where the field does not say."""
    if not isinstance(quantization, Mapping):
        return ""
    methods: Iterator[str] = (
        quantization[name] for name in METHOD_FIELDS if isinstance(quantization.get(name), str)
    )
    method = next(methods, "")
    if not method and (quantization.get("load_in_8bit") or quantization.get("load_in_4bit")):
        return "bitsandbytes"  # transformers wrote no method before 4.33
    return method


def _is_block(size: object) -> bool:
    """Whether the value says how many rows and columns a block has."""
    return (
        isinstance(size, list | tuple)
        and len(size) == 2
        and all(type(n) is int and n > 0 for n in size)
    )


def _is_within(module: str, plain: str) -> bool:
    """Whether a module is the named one, or inside it."""
    return module == plain or module.endswith(f".{plain}") or module.startswith(f"{plain}.")


def _explain_leftover(scales: str, entries: Mapping[str, TensorEntry]) -> str:
    """Explain what is wrong with scales that no tensor needs."""
    name = scales.removesuffix("_inv").removesuffix("_scale")
    if name not in entries:
        return f"{shorten(scales)} is there, and {shorten(name)} is missing"
    return (
        f"{shorten(scales)} is there, but {shorten(name)} is {entries[name].dtype} and wants no "
        "scales"
    )
