"""Read model directories: configuration and weights.

Files are data: nothing in them is executed.
"""

from headstock.weights.directory import read_config
from headstock.weights.hub import NotDownloaded, download_model, find_cached, resolve_directory
from headstock.weights.kv_scales import list_kv_scales, read_kv_scales
from headstock.weights.load import (
    check_headers,
    find_differing_copies,
    find_left_out,
    find_missing_heads,
    load_weights,
)
from headstock.weights.quantization import (
    QUANTIZATION_FIELDS,
    QuantReader,
    choose_format,
    dequantize_,
    drop_quantization,
    quantize,
    read_quantization,
)
from headstock.weights.stored_tensors import find_block_types

__all__ = [
    "QUANTIZATION_FIELDS",
    "NotDownloaded",
    "QuantReader",
    "check_headers",
    "choose_format",
    "dequantize_",
    "download_model",
    "drop_quantization",
    "find_block_types",
    "find_cached",
    "find_differing_copies",
    "find_left_out",
    "find_missing_heads",
    "list_kv_scales",
    "load_weights",
    "quantize",
    "read_config",
    "read_kv_scales",
    "read_quantization",
    "resolve_directory",
]
