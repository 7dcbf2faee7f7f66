"""Load parameters onto their device, from a checkpoint or as noise, by their declaration alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from headstock.callbacks import ProgressCallback
from headstock.errors import ModelError, PluginBroken, shorten
from headstock.spi import ModelConfig, Params, ParamSpec, Weight
from headstock.weights.reader import CheckpointReader, Piece, list_differing_copies, plan_pieces

_Prepare = Callable[[ParamSpec, Weight], Weight]

_DUMMY_STD = 0.02


def load_weights(
    directory: Path,
    specs: Mapping[str, ParamSpec],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int,
    dummy: bool = False,
    on_progress: ProgressCallback | None = None,
    prepare: _Prepare | None = None,
) -> Params:
    """Load every declared parameter; floating tensors get `dtype` unless declared otherwise.

    `on_progress("weights", done, total)` counts bytes. Dummy weights read nothing from `directory`.
    `prepare` is that of the operations that will use the weights. Each plain tensor is freed as
    soon as it is prepared, so that two copies of all weights never exist at once.

    raises: ModelError when files are damaged, do not fit the declaration, or hold NaN or
        infinities
    """

    def target_dtype(spec: ParamSpec) -> torch.dtype:
        return dtype if spec.dtype is None else getattr(torch, spec.dtype)

    # Computed parameters, such as tables of RoPE, are in no file.
    tensors = {
        name: spec.compute(config, max_seq_len).to(device, target_dtype(spec))
        for name, spec in specs.items()
        if spec.compute
    }
    on_progress = on_progress or (lambda stage, bytes_done, total: None)
    if dummy:
        tensors |= _make_dummy_weights(
            {name: spec for name, spec in specs.items() if spec.sources},
            target_dtype,
            device,
            on_progress,
        )
    else:
        tensors |= _read_parameters(directory, specs, target_dtype, device, on_progress)
    return _prepare_weights(specs, tensors, prepare or (lambda spec, weight: weight))


def find_differing_copies(directory: Path, specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """List the tensors that are declared as copies of others and differ from them.

    raises: ModelError
    """
    if not any(spec.copies for spec in specs.values()):
        return ()
    with CheckpointReader.open(directory) as checkpoint:
        try:
            return tuple(list_differing_copies(specs, checkpoint))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read the weights in {directory}: {shorten(error)}") from error


def check_headers(directory: Path, specs: Mapping[str, ParamSpec] | None) -> tuple[int, int, int]:
    """Count the tensors, files and bytes of the weights; no tensor is read.

    raises: ModelError when a file does not match its header, or the tensors are not those of
        `specs` (None: any are)
    """
    with CheckpointReader.open(directory) as checkpoint:
        # Headers alone: the doctor checks a model of any size without reading it.
        if specs is not None:
            plan_pieces(specs, checkpoint)
        files = {path for path, _ in checkpoint.entries.values()}
        return len(checkpoint.entries), len(files), sum(path.stat().st_size for path in files)


def weight_bytes(specs: Mapping[str, ParamSpec], dtype: torch.dtype) -> int:
    """Count the bytes that the declared parameters take on the device."""
    return sum(
        math.prod(spec.shape)
        * (dtype if spec.dtype is None else getattr(torch, spec.dtype)).itemsize
        for spec in specs.values()
    )


def _read_parameters(
    directory: Path,
    specs: Mapping[str, ParamSpec],
    target_dtype: Callable[[ParamSpec], torch.dtype],
    device: torch.device,
    on_progress: ProgressCallback,
) -> dict[str, Tensor]:
    """Read the parameters from the checkpoint.   raises: ModelError"""
    tensors: dict[str, Tensor] = {}
    with CheckpointReader.open(directory) as checkpoint:
        pieces_by_parameter = plan_pieces(specs, checkpoint)
        bytes_done = 0
        total = sum(
            checkpoint.nbytes(piece.name)
            for parts in pieces_by_parameter.values()
            for piece in parts
        )
        on_progress("weights", 0, total)
        for name, parts in pieces_by_parameter.items():
            try:
                tensors[name] = _assemble_parameter(
                    specs[name], parts, checkpoint, target_dtype(specs[name]), device
                )
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"cannot read {parts[0].name} in {directory}: {shorten(error)}"
                ) from error
            bytes_done += sum(checkpoint.nbytes(piece.name) for piece in parts)
            on_progress("weights", bytes_done, total)
        # After conversion: a float32 number beyond float16's range is infinite only there.
        _check_finite(
            {pieces_by_parameter[name][0].name: tensor for name, tensor in tensors.items()},
            directory,
        )
    return tensors


def _assemble_parameter(
    spec: ParamSpec,
    parts: list[Piece],
    checkpoint: CheckpointReader,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Assemble one parameter from its pieces; conversion and transfer happen in the copy."""
    # Each piece is copied from the mapped file into its slice: neither the host nor the device
    # holds the pieces and their concatenation at once.
    tensor = torch.empty(spec.shape, dtype=dtype, device=device)
    for piece in parts:
        row = tensor if piece.row is None else tensor[piece.row]
        row.narrow(0, piece.start, piece.shape[0]).copy_(checkpoint.read(piece.name))
    return tensor if spec.transform is None else spec.transform(tensor)


def _check_finite(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Check all tensors for NaN and infinities, with one wait for the device.

    raises: ModelError"""
    # A sum is finite exactly when all its terms are: no weights are so large that float32
    # overflows. Reading the flags of all tensors at once waits for the device once, not per tensor.
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


def _make_dummy_weights(
    specs: Mapping[str, ParamSpec],
    target_dtype: Callable[[ParamSpec], torch.dtype],
    device: torch.device,
    on_progress: ProgressCallback,
) -> dict[str, Tensor]:
    """Make parameters without a checkpoint: the declared `dummy` value, else normal noise.

    The noise depends on the parameter's name alone.
    """
    sizes = {
        name: math.prod(spec.shape) * target_dtype(spec).itemsize for name, spec in specs.items()
    }
    total, bytes_done = sum(sizes.values()), 0
    tensors: dict[str, Tensor] = {}
    for name, spec in specs.items():
        tensor = torch.empty(spec.shape, dtype=target_dtype(spec), device=device)
        if spec.dummy is None:
            tensor.normal_(
                0.0,
                _DUMMY_STD,
                # By name, so that another layer or order changes no other parameter; crc32, since
                # hash() of a text differs from process to process.
                generator=torch.Generator(device).manual_seed(zlib.crc32(name.encode())),
            )
        else:
            tensor.fill_(spec.dummy)
        tensors[name] = tensor if spec.transform is None else spec.transform(tensor)
        bytes_done += sizes[name]
        on_progress("weights", bytes_done, total)
    return tensors


def _prepare_weights(
    specs: Mapping[str, ParamSpec], tensors: dict[str, Tensor], prepare: _Prepare
) -> dict[str, Weight]:
    """Make weights of the tensors, with each `NAME.bias` inside that of NAME, and prepare them.

    writes: tensors, emptied
    raises: PluginBroken when `prepare` makes anything but a Weight
    """
    biases = {name: tensors.pop(name) for name in list(tensors) if name.endswith(".bias")}
    weights = {}
    for name in list(tensors):
        weights[name] = prepare(
            specs[name], Weight(tensor=tensors.pop(name), bias=biases.get(f"{name}.bias"))
        )
        if not isinstance(weights[name], Weight):
            function = getattr(prepare, "__qualname__", "prepare")
            type_name = type(weights[name]).__name__
            raise PluginBroken(
                f"operations: {function}({name!r}) returned a {type_name}; wanted a "
                "headstock.spi.Weight"
            )
    return weights
