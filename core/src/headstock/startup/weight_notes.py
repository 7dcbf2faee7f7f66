"""What the start says of a checkpoint's weights: how they are packed, and what is not read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve

from headstock import weights
from headstock.config import EngineConfig
from headstock.errors import CannotRun, UsageError, format_count, shorten
from headstock.logs import log_event
from headstock.selection.model_needs import find_quant_kind
from headstock.spi import Model, ModelConfig, ParamSpec, WeightFormat

LOG = logging.getLogger(__name__)


def check_quant(config: EngineConfig, directory: Path, formats: Sequence[WeightFormat]) -> None:
    """Check that weights that are to be quantized are not so already.   raises: UsageError"""
    kind, kinds = find_quant_kind(config), {format.kind for format in formats}
    if kind is not None and kinds and kinds != {kind}:
        names = " and ".join(sorted(each.value for each in kinds))
        raise UsageError(
            f"quant (--quant) {config.quant}: the weights in {directory} are {names} already; "
            "leave it out, or give the full-precision model"
        )


def check_quantized(
    config: EngineConfig,
    formats: Sequence[WeightFormat],
    name: str,
    specs: Sequence[ParamSpec],
    takes_format: Callable[[ParamSpec, WeightFormat], bool],
) -> None:
    """Check that the operations take any map as it is to be quantized.   raises: CannotRun"""
    kind = find_quant_kind(config)
    if kind is None or formats:
        return
    chosen = [(spec, weights.choose_format(kind, spec)) for spec in specs]
    if not any(format is not None and takes_format(spec, format) for spec, format in chosen):
        raise CannotRun(
            f"quant (--quant) {config.quant}: ops (--ops) {name} multiplies by no map of this "
            f"model in {kind.value}; set it to off, or choose other ops"
        )


def describe_weights(
    config: EngineConfig,
    directory: Path,
    dtype: str,
    name: str,
    takes_format: Callable[[WeightFormat], bool],
) -> str:
    """Describe what loading makes of quantized weights; empty where they are plain.

    name, takes_format: of the operations, and whether they take any map in that format

    raises: ModelError
    """
    reader = weights.read_quantization(directory)
    kind = find_quant_kind(config)
    types = weights.find_block_types(directory)
    if types and config.load_format != "dummy":
        text = f"{' and '.join(types)} of GGUF, dequantized to {dtype} at load"
        return text if kind is None else f"{text}, and linear maps quantized to {kind.value}"
    # Without formats keys and values alone are quantized.
    is_kept = reader is not None and any(map(takes_format, reader.formats))
    is_plain = config.load_format == "dummy" and not is_kept  # noise is not dequantized
    if reader is None or not reader.formats or is_plain:
        return "" if kind is None else f"linear maps quantized to {kind.value} at load"
    if config.load_format == "dummy":
        return f"random, as {reader.summary} where {name} multiplies by it as it is stored"
    text = f"{reader.summary}, dequantized to {dtype} at load"
    if is_kept:
        text += f", but for what {name} multiplies by as it is stored"
    LOG.info(log_event("weights are quantized", format=text))
    return text


def scale_kv(
    config: EngineConfig, directory: Path, family: Model, model: ModelConfig, kv_dtype: str
) -> tuple[ModelConfig, str]:
    """Give the layers of a whole model the scales that its checkpoint has for an 8-bit pool.

    returns: the model, and what is to be said of the scales; empty where there are none
    raises: ModelError; CannotRun for scales of other numbers than FP8
    """
    specs, reader = family.params(model), weights.read_quantization(directory)
    # Without a method of quantization such tensors are unexpected, which loading says.
    if reader is None or config.load_format == "dummy":
        return model, ""
    names = weights.list_kv_scales(directory, specs)
    if not names:
        return model, ""
    narrow = {
        layer.index: (model.kv_groups[layer.group].dtype or kv_dtype).startswith("float8")
        for layer in model.layers
    }
    if not any(narrow.values()):
        return model, (
            f"scales of keys and values are not read, as the KV pool is {kv_dtype}: "
            f"{format_count(len(names), 'tensor')}"
        )
    if reader.kv_numbers:
        raise CannotRun(
            f"{directory} has scales for other keys and values than FP8 with one scale "
            f"({reader.kv_numbers}); set kv_dtype (--kv-dtype) to auto"
        )
    scales = weights.read_kv_scales(directory, specs, model)
    layers = tuple(
        evolve(layer, k_scale=scales[layer.index].k, v_scale=scales[layer.index].v)
        if layer.index in scales and narrow[layer.index]
        else layer
        for layer in model.layers
    )
    count = format_count(len(scales), "layer")
    return evolve(model, layers=layers), f"keys and values of {count} have scales of the checkpoint"


def describe_left_out(directory: Path, family: Model, model: ModelConfig) -> list[str]:
    """Describe which tensors the family leaves out, a line for each reason.

    raises: ModelError
    """
    parts = weights.find_left_out(directory, family.params(model))
    names = [name for name, tower in parts.items() if not tower]
    counts = Counter(tower for tower in parts.values() if tower)
    lines = []
    if counts:
        texts = [f"{format_count(n, 'tensor')} of the {tower}" for tower, n in counts.items()]
        are = "is" if counts.total() == 1 else "are"
        lines.append(f"text alone; {' and '.join(texts)} {are} not read")
    if names:
        lines.append(
            f"{format_count(len(names), 'tensor')} left out, of parts that this version does not "
            f"compute: {shorten(names[0])}{', ...' if len(names) > 1 else ''}"
        )
    return lines
