"""The methods of quantization by the names that configurations give them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headstock.errors import ModelError, shorten
from headstock.weights.directory import read_json
from headstock.weights.quantization.compressed_tensors import CompressedTensorsReader
from headstock.weights.quantization.fp4 import Mxfp4Reader
from headstock.weights.quantization.fp8 import Fp8Reader
from headstock.weights.quantization.integers import WordReader
from headstock.weights.quantization.modelopt import ModelOptReader
from headstock.weights.quantization.reader import QuantReader

METHOD_FIELDS = ("quant_method", "quant_algo", "format")
"""The fields that name a method: transformers', ModelOpt's, compressed-tensors'."""

QUANTIZATION_FIELDS = (
    "quantization_config",
    "compression_config",
    "quantization",
    "quant_config",
)
"""The fields of config.json that say how weights are quantized; the first one is transformers'."""

_MODELOPT_FILE = "hf_quant_config.json"

_READERS: Mapping[str, Callable[[Mapping[str, Any]], QuantReader]] = {
    "fp8": Fp8Reader.parse,
    "fbgemm_fp8": Fp8Reader.parse,
    "compressed-tensors": CompressedTensorsReader.parse,
    "gptq": WordReader.parse_gptq,
    "awq": WordReader.parse_awq,
    "mxfp4": Mxfp4Reader.parse,
    "modelopt": ModelOptReader.parse,
}
"""Values of `quant_method` -> what makes the reader of a configuration."""


def find_quant_reader(hf: Mapping[str, Any]) -> QuantReader | None:
    """Find the reader for a parsed config.json; None where the weights are not quantized.

    raises: ValueError when they are by a method that nothing here reads
    """
    for field, value in _list_statements(hf):
        method = _find_method(value)
        if method in _READERS:
            try:
                return _READERS[method](value)
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from error
        by = f" by {shorten(method)}" if method else ""
        raise ValueError(
            f"{field} says that the weights are quantized{by}, and only {', '.join(_READERS)} are "
            "read; use the full-precision model"
        )
    return None


def read_quantization(directory: Path) -> QuantReader | None:
    """Find the reader of a model directory; None where its weights are not quantized.

    raises: ModelError when they are in a way that is not served
    """
    hf, file = read_json(directory, "config.json"), "config.json"
    # ModelOpt's earlier files say it beside config.json.
    if not [*_list_statements(hf)] and (directory / _MODELOPT_FILE).is_file():
        fields, file = read_json(directory, _MODELOPT_FILE), _MODELOPT_FILE
        hf = {QUANTIZATION_FIELDS[0]: {"quant_method": "modelopt", **fields}}
    try:
        return find_quant_reader(hf)
    except ValueError as error:
        raise ModelError(f"{file} in {directory}: {error}") from error


def drop_quantization(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json without those that say how weights are quantized."""
    plain = {name: value for name, value in hf.items() if name not in QUANTIZATION_FIELDS}
    text = plain.get("text_config")
    return plain | {"text_config": drop_quantization(text)} if isinstance(text, Mapping) else plain


def _list_statements(hf: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a config.json says of its weights, by the name of the field.

    Models that take more than text may say it in their text decoder's table, as transformers reads
    it.
    """
    text = hf.get("text_config")
    for prefix, fields in (("", hf), ("text_config.", text if isinstance(text, Mapping) else {})):
        for name in QUANTIZATION_FIELDS:
            if fields.get(name) is not None:
                yield f"{prefix}{name}", fields[name]


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
