"""Maps that a set multiplies by as they are packed, compared with the numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.decoder import forward
from headstock.ops.bound import BoundOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import ModelConfig, Ops, ParamSpec, Role, Weight, WeightFormat, WeightKind
from headstock.weights import choose_format, dequantize_, quantize
from headstock_conformance.device_reads import forbid_device_reads
from headstock_conformance.ops.models import Weights, draw_weights
from headstock_conformance.ops.steps import (
    ROUNDING,
    check_places,
    compare_steps,
    make_batch,
    run_step,
)

TOKENS = (1, 2, 7, 33, 100)
_BLOCKS = {
    WeightKind.FP8_E4M3: WeightFormat(kind=WeightKind.FP8_E4M3, group=(32, 32)),
    WeightKind.FP4_E2M1: WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32)),
}
"""What checkpoints have beside the formats that `--quant` makes."""
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LOSS = 0.1
"""What products may be off by beside rounding, as they may round activations too."""


def check_packed(
    make: Callable[[], Ops],
    kind: WeightKind,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    loss: float,
) -> None:
    """Steps with maps in these numbers agree with torch's over what these stand for.

    make: the set, configured for the model
    loss: what its results may be off by anyway
    """
    drawn, block = draw_weights(config, dtype, device), _BLOCKS.get(kind)
    chosen = [(lambda spec: choose_format(kind, spec), quantize)]
    if kind is WeightKind.FP4_E2M1:  # which `--quant` does not make
        chosen = []
    if block is not None:
        chosen.append((lambda spec: _fit_blocks(block, spec), pack_blocks))
    found = [_pack_weights(drawn, choose, pack, make()) for choose, pack in chosen]
    taken = [each for each in found if each is not None]
    assert taken, f"OpsCapabilities.formats has {kind.value}, but takes_format takes no map in it"
    for packed, plain in taken:
        _check_steps(make, config, packed, plain, dtype, device, loss)


def _check_steps(
    make: Callable[[], Ops],
    config: ModelConfig,
    packed: Weights,
    plain: Weights,
    dtype: torch.dtype,
    device: str,
    loss: float,
) -> None:
    """Compare steps of several sizes with those over the plain numbers.   raises: AssertionError"""
    for tokens in TOKENS:
        batch = make_batch(config, tokens, dtype, device)
        ours = run_step(make(), config, packed, batch)
        exact_batch = make_batch(config, tokens, torch.float32, device)
        truth = run_step(TorchOps(), config, plain, exact_batch)
        check_places(ours, truth)
        try:
            compare_steps(ours, truth, truth, ROUNDING[dtype] + LOSS + loss)
        except AssertionError as error:
            raise AssertionError(f"{error} (a step of {tokens} tokens)") from error
        if device == "cpu":
            continue
        ops = make()
        bound = BoundOps(type(ops).__name__, ops, config)
        params = packed.prepare(ops)
        bound.bind(params, config)
        with torch.inference_mode(), forbid_device_reads():
            forward(params, config, batch, lambda q, layer: q, bound)


def _pack_weights(
    weights: Weights,
    choose: Callable[[ParamSpec], WeightFormat | None],
    pack: Callable[[Tensor, WeightFormat], Weight],
    ops: Ops,
) -> tuple[Weights, Weights] | None:
    """The weights with the maps that the set takes so, and all in float32; None for no map."""
    packed, plain = {}, {}
    for name, weight in weights.params.items():
        spec = weights.specs[name]
        format = choose(spec)
        packed[name], plain[name] = weight, weight
        if format is None or not ops.takes_format(spec, format):
            continue
        packed[name] = evolve(pack(weight.tensor, format), bias=weight.bias)
        numbers = torch.empty(spec.shape, device=weight.tensor.device)
        dequantize_(packed[name], numbers)
        plain[name] = evolve(weight, tensor=numbers)
    if all(each.format is None for each in packed.values()):
        return None
    return Weights(weights.specs, packed), Weights(weights.specs, plain).widen()


def _fit_blocks(format: WeightFormat, spec: ParamSpec) -> WeightFormat | None:
    """The format, if a linear map is made of such blocks."""
    assert format.group is not None
    is_map = spec.roles == {Role.LINEAR} and len(spec.shape) == 2
    if not is_map or any(n % size for n, size in zip(spec.shape, format.group, strict=True)):
        return None
    return format


def pack_blocks(tensor: Tensor, format: WeightFormat) -> Weight:
    """The nearest numbers in the blocks of the format."""
    assert format.group is not None
    (rows, columns), (outs, width) = format.group, tensor.shape
    largest = 448.0 if format.kind is WeightKind.FP8_E4M3 else 6.0
    blocks = tensor.float().view(outs // rows, rows, width // columns, columns)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-6) / largest
    if format.kind is WeightKind.FP4_E2M1:  # as MXFP4 has them
        scales = scales.log2().ceil().exp2()
    numbers = (blocks / scales[:, None, :, None]).view(outs, width)
    if format.kind is WeightKind.FP8_E4M3:
        return Weight(tensor=numbers.to(torch.float8_e4m3fn), scales=scales, format=format)
    codes = (numbers.abs()[..., None] - _FP4.to(tensor.device)).abs().argmin(-1)
    codes = codes.to(torch.uint8) | (numbers < 0).to(torch.uint8) << 3
    return Weight(tensor=codes[:, ::2] | codes[:, 1::2] << 4, scales=scales, format=format)
