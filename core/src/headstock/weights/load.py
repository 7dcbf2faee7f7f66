"""Load parameters onto their device, from a checkpoint or as noise, by their declaration alone."""

from __future__ import annotations

import ctypes
import logging
import math
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from attrs import field, frozen
from safetensors import SafetensorError
from torch import Tensor

from headstock.callbacks import ProgressCallback
from headstock.errors import ModelError, PluginBroken, shorten
from headstock.logs import LogEvent
from headstock.spi import ModelConfig, Params, ParamSpec, Role, Shard, Weight
from headstock.weights.quant_reader import KV_SCALE_SUFFIXES
from headstock.weights.reader import (
    CheckpointReader,
    Piece,
    list_differing_copies,
    list_left_out,
    plan_pieces,
    read_quantization,
)

LOG = logging.getLogger(__name__)

_Prepare = Callable[[ParamSpec, Weight], Weight]

_DUMMY_STD = 0.02

_CHECKED_NUMBERS = 1 << 20
"""How many numbers are summed at a time to see that all are finite."""

_TRIMMED_BYTES = 16 << 20
"""After how many bytes of parameters what was freed is given back: a call looks through the whole
heap of the process.
"""


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
    whole: Mapping[str, ParamSpec] | None = None,
) -> Params:
    """Load every declared parameter; floating tensors get `dtype` unless declared otherwise.

    `whole` are the parameters of the whole model where `config` is a shard of it.
    `on_progress("weights", done, total)` counts bytes. Dummy weights read nothing from `directory`.
    `prepare` is that of the operations that will use the weights. Parameters are read, transformed
    and prepared one after the other: beside those that are done there is memory for one alone,
    and up to 16 MiB of what earlier ones freed.

    raises: ModelError when files are damaged, do not fit the declaration, or hold NaN or
        infinities; PluginBroken when `prepare` makes anything but a Weight
    """
    on_progress = on_progress or (lambda stage, bytes_done, total: None)
    with ExitStack() as stack:
        source: _Source = (
            _Noise()
            if dummy
            else _Files(
                stack.enter_context(_open_checkpoint(directory, whole or specs)),
                specs,
                whole or specs,
                config.shard,
            )
        )
        for remark in source.remarks:
            LOG.warning(remark)
        target = _Target(specs, config, dtype, device, max_seq_len, source)
        total, bytes_done = sum(map(target.count_bytes, specs)), 0
        on_progress("weights", 0, total)
        weights, trim, bytes_trimmed = {}, _find_trim(), 0
        for name, spec in specs.items():
            if _is_bias(name, specs):
                continue
            weights[name] = _prepare_weight(name, spec, target, prepare)
            bytes_done += target.count_bytes(name) + target.count_bytes(f"{name}.bias")
            # What is freed below 32 MiB the C library keeps, and other sizes do not fit the holes.
            if trim is not None and bytes_done - bytes_trimmed >= _TRIMMED_BYTES:
                trim(0)
                bytes_trimmed = bytes_done
            if spec.sources:
                on_progress("weights", bytes_done, total)
    return weights


def _open_checkpoint(directory: Path, specs: Mapping[str, ParamSpec]) -> CheckpointReader:
    """Open a directory's weights, named as the parameters have it.   raises: ModelError"""
    return CheckpointReader.open(directory, read_quantization(directory), specs)


def _is_bias(name: str, specs: Mapping[str, ParamSpec]) -> bool:
    """Whether the parameter goes into the weight of another one."""
    return name.endswith(".bias") and name.removesuffix(".bias") in specs


def find_differing_copies(directory: Path, specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """List the tensors that are declared as copies of others and differ from them.

    raises: ModelError
    """
    if not any(spec.copies for spec in specs.values()):
        return ()
    with _open_checkpoint(directory, specs) as checkpoint:
        try:
            return tuple(list_differing_copies(specs, checkpoint))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read the weights in {directory}: {shorten(error)}") from error


def find_missing_heads(directory: Path, specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """List the output matrices that the checkpoint leaves out, from headers alone.

    One that the index names is lost and not left out.

    raises: ModelError
    """
    heads = {
        name
        for spec in specs.values()
        if spec.roles == {Role.HEAD}
        for row in spec.sources
        for name in row
    }
    if not heads:
        return ()
    with _open_checkpoint(directory, specs) as checkpoint:
        return tuple(sorted(heads - checkpoint.tensors.keys() - checkpoint.lost.keys()))


def find_left_out(directory: Path, specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """List the tensors of parts of the model that are not computed, from headers alone.

    raises: ModelError
    """
    if not any(spec.left_out for spec in specs.values()):
        return ()
    with _open_checkpoint(directory, specs) as checkpoint:
        return tuple(sorted(list_left_out(specs, checkpoint)))


def list_kv_scales(directory: Path) -> tuple[str, ...]:
    """List the tensors that scale keys and values, from headers alone.   raises: ModelError"""
    with CheckpointReader.open(directory, None) as checkpoint:
        return tuple(
            sorted(name for name in checkpoint.entries if name.endswith(KV_SCALE_SUFFIXES))
        )


def check_headers(directory: Path, specs: Mapping[str, ParamSpec] | None) -> tuple[int, int, int]:
    """Count the tensors, files and bytes of the weights; no tensor is read.

    raises: ModelError when a file does not match its header, or the tensors are not those of
        `specs` (None: any are)
    """
    # A model that is not known may have a config.json that nothing can read.
    reader = None if specs is None else read_quantization(directory)
    # Headers alone: the doctor checks a model of any size without reading it.
    with CheckpointReader.open(directory, reader, specs) as checkpoint:
        if specs is not None:
            plan_pieces(specs, checkpoint)
        files = checkpoint.list_files()
        return len(checkpoint.entries), len(files), sum(path.stat().st_size for path in files)


def weight_bytes(specs: Mapping[str, ParamSpec], dtype: torch.dtype) -> int:
    """Count the bytes that the declared parameters take on the device."""
    return sum(
        math.prod(spec.shape) * parameter_dtype(spec, dtype).itemsize for spec in specs.values()
    )


def parameter_dtype(spec: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """The type of a parameter of a model in `dtype`."""
    found: torch.dtype = dtype if spec.dtype is None else getattr(torch, spec.dtype)
    return found


class _Source(Protocol):
    """Where tensors come from.

    remarks: what is odd about it, for the log
    """

    @property
    def remarks(self) -> tuple[LogEvent, ...]: ...

    def count_bytes(self, name: str, spec: ParamSpec, dtype: torch.dtype) -> int:
        """How many bytes are read, or made."""

    def fill(self, name: str, spec: ParamSpec, out: Tensor) -> None:
        """Write the tensor that the sources make.   writes: out    raises: ModelError"""

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise ModelError when the finished tensor cannot be used."""


@frozen
class _Files:
    """Tensors of a checkpoint, conversion and transfer in one copy."""

    checkpoint: CheckpointReader
    specs: Mapping[str, ParamSpec]
    whole: Mapping[str, ParamSpec]
    shard: Shard
    pieces: Mapping[str, list[Piece]] = field(init=False)

    @pieces.default
    def _plan(self) -> Mapping[str, list[Piece]]:
        return plan_pieces(self.specs, self.checkpoint, self.whole, self.shard)

    @property
    def remarks(self) -> tuple[LogEvent, ...]:
        return self.checkpoint.remarks

    def count_bytes(self, name: str, spec: ParamSpec, dtype: torch.dtype) -> int:
        return sum(
            self.checkpoint.nbytes(piece.name) * math.prod(piece.size) // math.prod(piece.shape)
            for piece in self.pieces[name]
        )

    def fill(self, name: str, spec: ParamSpec, out: Tensor) -> None:
        if sum(math.prod(piece.size) for piece in self.pieces[name]) < out.numel():
            out.zero_()  # a shard's slice is padded
        # Each piece is copied from the mapped file into its slice: neither the host nor the device
        # holds the pieces and their concatenation at once.
        for piece in self.pieces[name]:
            try:
                self.checkpoint.copy_into(piece.view_in(out), piece.name, piece.begin)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"cannot read {piece.name} in {self.checkpoint.directory}: {shorten(error)}"
                ) from error

    def check(self, name: str, tensor: Tensor) -> None:
        # After conversion: a float32 number beyond float16's range is infinite only there.
        if not _is_finite(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(
                f"{self.pieces[name][0].name} in {self.checkpoint.directory} holds NaN or "
                f"infinite numbers as {dtype}; the file is damaged or needs another dtype "
                "(--dtype)"
            )


class _Noise:
    """Tensors without a checkpoint: the declared `dummy` value, else normal noise.

    The noise depends on the parameter's name alone.
    """

    remarks = ()

    def count_bytes(self, name: str, spec: ParamSpec, dtype: torch.dtype) -> int:
        return math.prod(spec.shape) * dtype.itemsize

    def fill(self, name: str, spec: ParamSpec, out: Tensor) -> None:
        if spec.dummy is not None:
            out.fill_(spec.dummy)
            return
        # By name, so that another layer or order changes no other parameter; crc32, since hash()
        # of a text differs from process to process.
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(name.encode()))
        out.normal_(0.0, _DUMMY_STD, generator=generator)

    def check(self, name: str, tensor: Tensor) -> None:
        """Noise is finite."""


@frozen
class _Target:
    """What tensors are made for."""

    specs: Mapping[str, ParamSpec]
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int
    source: _Source

    def count_bytes(self, name: str) -> int:
        """How many bytes of the source the parameter takes; 0 for one that has none."""
        spec = self.specs.get(name)
        if spec is None or not spec.sources:
            return 0
        return self.source.count_bytes(name, spec, self.dtype_of(spec))

    def dtype_of(self, spec: ParamSpec) -> torch.dtype:
        """The type of the parameter."""
        return parameter_dtype(spec, self.dtype)

    def make(self, name: str) -> Tensor:
        """The parameter, computed or from the source.   raises: ModelError"""
        spec = self.specs[name]
        dtype = self.dtype_of(spec)
        # Computed parameters, such as tables of RoPE, are in no file.
        if spec.compute:
            return spec.compute(self.config, self.max_seq_len).to(self.device, dtype)
        tensor = torch.empty(spec.source_shape or spec.shape, dtype=dtype, device=self.device)
        self.source.fill(name, spec, tensor)
        if spec.transform is not None:
            tensor = spec.transform(tensor)
        self.source.check(name, tensor)
        return tensor


def _find_trim() -> Callable[[int], int] | None:
    """The C library's function that gives freed memory back; None where it has none."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return trim


def _prepare_weight(
    name: str, spec: ParamSpec, target: _Target, prepare: _Prepare | None
) -> Weight:
    """Make one parameter, with `NAME.bias` inside, and prepare it.

    raises: ModelError, PluginBroken
    """
    bias = f"{name}.bias"
    weight = Weight(
        tensor=target.make(name), bias=target.make(bias) if bias in target.specs else None
    )
    if prepare is None:
        return weight
    prepared: object = prepare(spec, weight)
    if not isinstance(prepared, Weight):
        function = getattr(prepare, "__qualname__", "prepare")
        raise PluginBroken(
            f"operations: {function}({name!r}) returned a {type(prepared).__name__}; expected a "
            "headstock.spi.Weight"
        )
    return prepared


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite."""
    # A sum is finite exactly when all its terms are: no weights are so large that float32
    # overflows. In parts, since a CPU widens what it sums to float32 first.
    parts = torch.split(tensor.flatten(), _CHECKED_NUMBERS)
    sums = torch.stack([part.sum(dtype=torch.float32) for part in parts])
    return bool(sums.isfinite().all())
