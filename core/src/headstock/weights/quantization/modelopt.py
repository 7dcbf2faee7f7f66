"""FP8 and NVFP4 as ModelOpt publishes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from headstock.spi import WeightFormat, WeightKind
from headstock.weights.quantization.fp4 import find_fp4
from headstock.weights.quantization.reader import (
    PackedTensors,
    QuantReader,
    check_choice,
    check_leftovers,
    find_ignored_fields,
    find_kv_numbers,
    find_unread,
)
from headstock.weights.quantization.scaled import find_scaled
from headstock.weights.safetensors_header import TensorEntry

_ALGORITHMS = {
    "FP8": WeightFormat(kind=WeightKind.FP8_E4M3),
    "NVFP4": WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 16)),
}
_FIELDS = (
    *("quant_method", "quant_algo", "ignore", "exclude_modules", "kv_cache_scheme", "producer"),
    *("kv_cache_quant_algo", "config_groups", "group_size", "quantization"),
)


@frozen
class ModelOptReader(QuantReader):
    """X.weight and X.weight_scale; of NVFP4 also X.weight_scale_2, the scale of all."""

    algorithm: str
    ignored_fields: tuple[str, ...]
    kv_numbers: str = ""

    @property
    def summary(self) -> str:  # type: ignore[override]
        """The format in words."""
        return f"{self.algorithm} of ModelOpt"

    @property
    def formats(self) -> tuple[WeightFormat, ...]:
        """That of the algorithm."""
        return (_ALGORITHMS[self.algorithm],)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> ModelOptReader:
        """Read the configuration.   raises: ValueError with the field, expected and got"""
        inner = fields.get("quantization")  # as in hf_quant_config.json
        if isinstance(inner, Mapping):
            fields = {**fields, **inner}
        algorithm = {"quant_algo": fields.get("quant_algo") or "none"}
        check_choice(algorithm, "quant_algo", tuple(_ALGORITHMS))
        ignored = find_ignored_fields(fields, _FIELDS)
        return cls(algorithm["quant_algo"], ignored, find_kv_numbers(fields))

    def sort(self, entries: Mapping[str, TensorEntry]) -> PackedTensors:
        """See `QuantReader.sort`."""
        packed = {}
        for name, entry in entries.items():
            if entry.dtype == "F8_E4M3" and name.endswith(".weight"):
                packed[name] = find_scaled(name, entries, None, ("_scale",))
            elif entry.dtype == "U8" and name.endswith(".weight"):
                packed[name] = find_fp4(name, entries, f"{name}_scale", f"{name}_scale_2")
        owners = {".weight_scale": ".weight", ".weight_scale_2": ".weight"}
        check_leftovers(entries, packed, owners)
        return PackedTensors(packed, find_unread(entries))
