"""Read model directories: configuration and weights.

Files are data: nothing in them is executed.
"""

from headstock.weights.directory import read_config
from headstock.weights.hub import NotDownloaded, download_model, find_cached, resolve_directory
from headstock.weights.load import (
    check_headers,
    find_differing_copies,
    find_left_out,
    find_missing_heads,
    list_kv_scales,
    load_weights,
    weight_bytes,
)
from headstock.weights.quant_reader import QUANTIZATION_FIELDS, QuantReader
from headstock.weights.reader import read_quantization

__all__ = [
    "QUANTIZATION_FIELDS",
    "NotDownloaded",
    "QuantReader",
    "check_headers",
    "download_model",
    "find_cached",
    "find_differing_copies",
    "find_left_out",
    "find_missing_heads",
    "list_kv_scales",
    "load_weights",
    "read_config",
    "read_quantization",
    "resolve_directory",
    "weight_bytes",
]
