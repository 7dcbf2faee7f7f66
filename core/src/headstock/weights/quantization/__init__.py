"""Quantized checkpoints: how each method stores weights, and what they stand for.

A reader is found by config.json, sorts the tensors of a file, and makes packed weights of them.
"""

from headstock.weights.quantization.dequantize import NUMBER_BYTES, dequantize_
from headstock.weights.quantization.methods import (
    QUANTIZATION_FIELDS,
    drop_quantization,
    find_quant_reader,
    read_quantization,
)
from headstock.weights.quantization.noise import NOISE_STD, choose_noise_format, make_noise
from headstock.weights.quantization.quantize import choose_format, quantize
from headstock.weights.quantization.reader import (
    KEY_SCALES,
    KEY_VALUE_SCALES,
    VALUE_SCALES,
    PackedTensor,
    QuantReader,
)

__all__ = [
    "KEY_SCALES",
    "KEY_VALUE_SCALES",
    "NOISE_STD",
    "NUMBER_BYTES",
    "QUANTIZATION_FIELDS",
    "VALUE_SCALES",
    "PackedTensor",
    "QuantReader",
    "choose_format",
    "choose_noise_format",
    "dequantize_",
    "drop_quantization",
    "find_quant_reader",
    "make_noise",
    "quantize",
    "read_quantization",
]
