"""Parameters on their device, from a checkpoint or as noise, by their declaration alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from headstock.errors import ModelError, PluginBroken, shorten
from headstock.spi import ModelConfig, Params, ParamSpec, Weight
from headstock.weights.checkpoint import Checkpoint, Piece, differing_copies, plan

Report = Callable[[str, int, int], None]
Prepare = Callable[[str, Weight], Weight]

DUMMY_STD = 0.02


def load(
    directory: Path,
    specs: Mapping[str, ParamSpec],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int,
    dummy: bool = False,
    report: Report | None = None,
    prepare: Prepare | None = None,
) -> Params:
    """Every declared parameter, floating tensors in `dtype` unless their declaration says
    otherwise.

    `report("weights", done, total)` is told of bytes. Dummy weights read nothing from `directory`.
    `prepare` is that of the operations that will use the weights; each plain tensor is freed as
    soon as it is prepared.
    raises: ModelError when files are damaged, do not fit the declaration, or hold NaN or infinities
    """

    def target(spec: ParamSpec) -> torch.dtype:
        return dtype if spec.dtype is None else getattr(torch, spec.dtype)

    tensors = {
        name: spec.compute(config, max_seq_len).to(device, target(spec))
        for name, spec in specs.items()
        if spec.compute
    }
    report = report or (lambda stage, done, total: None)
    if dummy:
        tensors |= noise(
            {name: spec for name, spec in specs.items() if spec.sources}, target, device, report
        )
    else:
        tensors |= read(directory, specs, target, device, report)
    return prepared(tensors, prepare or (lambda name, weight: weight))


def find_differing_copies(directory: Path, specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """The tensors in `directory` that are declared as copies of others and differ from them.

    raises: ModelError
    """
    if not any(spec.copies for spec in specs.values()):
        return ()
    with Checkpoint.open(directory) as checkpoint:
        try:
            return tuple(differing_copies(specs, checkpoint))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read the weights in {directory}: {shorten(error)}") from error


def check_headers(directory: Path, specs: Mapping[str, ParamSpec] | None) -> tuple[int, int, int]:
    """Tensors, files and bytes of the weights in `directory`, no tensor being read.

    raises: ModelError when a file is not what its header says, or the tensors are not those of
        `specs` (None: any are)
    """
    with Checkpoint.open(directory) as checkpoint:
        if specs is not None:
            plan(specs, checkpoint)
        files = {path for path, _ in checkpoint.entries.values()}
        return len(checkpoint.entries), len(files), sum(path.stat().st_size for path in files)


def weight_bytes(specs: Mapping[str, ParamSpec], dtype: torch.dtype) -> int:
    """Bytes that the parameters take on the device, as declared."""
    return sum(
        math.prod(spec.shape)
        * (dtype if spec.dtype is None else getattr(torch, spec.dtype)).itemsize
        for spec in specs.values()
    )


def read(
    directory: Path,
    specs: Mapping[str, ParamSpec],
    target: Callable[[ParamSpec], torch.dtype],
    device: torch.device,
    report: Report,
) -> dict[str, Tensor]:
    """The parameters as the checkpoint has them."""
    tensors: dict[str, Tensor] = {}
    with Checkpoint.open(directory) as checkpoint:
        plans = plan(specs, checkpoint)
        total, done = (
            sum(checkpoint.nbytes(piece.name) for parts in plans.values() for piece in parts),
            0,
        )
        report("weights", 0, total)
        for name, parts in plans.items():
            try:
                tensors[name] = assemble(
                    specs[name], parts, checkpoint, target(specs[name]), device
                )
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"cannot read {parts[0].name} in {directory}: {shorten(error)}"
                ) from error
            done += sum(checkpoint.nbytes(piece.name) for piece in parts)
            report("weights", done, total)
        check_finite({plans[name][0].name: tensor for name, tensor in tensors.items()}, directory)
    return tensors


def assemble(
    spec: ParamSpec,
    parts: list[Piece],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One parameter, its pieces copied into place; conversion and transfer happen in the copy."""
    tensor = torch.empty(spec.shape, dtype=dtype, device=device)
    for piece in parts:
        row = tensor if piece.row is None else tensor[piece.row]
        row.narrow(0, piece.start, piece.shape[0]).copy_(checkpoint.read(piece.name))
    return tensor


def check_finite(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Raise ModelError when a tensor holds NaN or infinities, with one wait for the device."""
    # A sum is finite exactly when all its terms are: no weights are so large that float32
    # overflows.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors.values()])
    broken = [
        name for name, good in zip(tensors, sums.isfinite().tolist(), strict=True) if not good
    ]
    if broken:
        dtype = str(tensors[broken[0]].dtype).removeprefix("torch.")
        raise ModelError(
            f"{broken[0]} in {directory} holds NaN or infinite numbers as {dtype}; the file is "
            "damaged or wants another --dtype"
        )


def noise(
    specs: Mapping[str, ParamSpec],
    target: Callable[[ParamSpec], torch.dtype],
    device: torch.device,
    report: Report,
) -> dict[str, Tensor]:
    """Parameters as their `dummy` says, else normal noise that depends on the parameter's name
    alone.
    """
    sizes = {name: math.prod(spec.shape) * target(spec).itemsize for name, spec in specs.items()}
    total, done = sum(sizes.values()), 0
    tensors: dict[str, Tensor] = {}
    for name, spec in specs.items():
        tensor = torch.empty(spec.shape, dtype=target(spec), device=device)
        if spec.dummy is None:
            tensor.normal_(
                0.0,
                DUMMY_STD,
                generator=torch.Generator(device).manual_seed(zlib.crc32(name.encode())),
            )
        else:
            tensor.fill_(spec.dummy)
        tensors[name] = tensor
        done += sizes[name]
        report("weights", done, total)
    return tensors


def prepared(tensors: dict[str, Tensor], prepare: Prepare) -> dict[str, Weight]:
    """The tensors as weights, each `NAME.bias` inside that of NAME, prepared.

    writes: tensors, emptied
    raises: PluginBroken when `prepare` makes anything but a Weight
    """
    biases = {name: tensors.pop(name) for name in list(tensors) if name.endswith(".bias")}
    weights = {}
    for name in list(tensors):
        weights[name] = prepare(
            name, Weight(tensor=tensors.pop(name), bias=biases.get(f"{name}.bias"))
        )
        if not isinstance(weights[name], Weight):
            who, made = getattr(prepare, "__qualname__", "prepare"), type(weights[name]).__name__
            raise PluginBroken(
                f"operations: {who}({name!r}) returned a {made}; wanted a headstock.spi.Weight"
            )
    return weights
