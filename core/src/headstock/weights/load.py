"""Load parameters onto their device, from a checkpoint or as noise, by their declaration alone."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from attrs import evolve, frozen
from safetensors import SafetensorError
from torch import Tensor

from headstock.callbacks import ProgressCallback
from headstock.errors import ModelError, PluginBroken, describe_type, shorten
from headstock.spi import (
    ModelConfig,
    Params,
    ParamSpec,
    Role,
    Weight,
    WeightFormat,
    WeightKind,
)
from headstock.weights.quantization import (
    NUMBER_BYTES,
    QuantReader,
    choose_format,
    quantize,
    read_quantization,
)
from headstock.weights.reader import (
    CheckpointReader,
    list_differing_copies,
    plan_pieces,
)
from headstock.weights.sources import FileSource, NoiseSource, Packed, Source
from headstock.weights.stored_tensors import find_parts_left_out

LOG = logging.getLogger(__name__)

_Prepare = Callable[[ParamSpec, Weight], Weight]
_TakesFormat = Callable[[ParamSpec, WeightFormat], bool]

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
    takes_format: _TakesFormat | None = None,
    quant: WeightKind | None = None,
    check_size: Callable[[int], None] | None = None,
    whole: Mapping[str, ParamSpec] | None = None,
) -> Params:
    """Load every declared parameter; floating tensors get `dtype` unless declared otherwise.

    `whole` are the parameters of the whole model where `config` is a shard of it.
    `check_size` gets the bytes that all will take before one is read, and raises if they are too
    many. `on_progress("weights", done, total)` counts bytes. Dummy weights read nothing from
    `directory` but how config.json says that weights are packed.
    `prepare` and `takes_format` are those of the operations that will use the weights; what a
    checkpoint packs in a format that they take stays packed, and with `quant` plain maps are packed
    in such numbers. Parameters are read, transformed
    and prepared one after the other: beside those that are done there is memory for one alone,
    and up to 16 MiB of what earlier ones freed.

    raises: ModelError when files are damaged, do not fit the declaration, or hold NaN or
        infinities; PluginBroken when `prepare` makes anything but a Weight
    """
    on_progress = on_progress or (lambda stage, bytes_done, total: None)
    with ExitStack() as stack:
        source: Source = (
            NoiseSource(_find_packing(directory))
            if dummy
            else FileSource(
                stack.enter_context(_open_checkpoint(directory, whole or specs)),
                specs,
                whole or specs,
                config.shard,
            )
        )
        for remark in source.remarks:
            LOG.warning(remark)
        packer = _Packer(takes_format, quant)
        target = _Target(specs, config, dtype, device, max_seq_len, source, packer)
        if check_size is not None:
            check_size(sum(map(target.count_device_bytes, specs)))
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


def _find_packing(directory: Path) -> QuantReader | None:
    """Find how a model directory's weights are packed, if it says.   raises: ModelError"""
    return read_quantization(directory) if (directory / "config.json").is_file() else None


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


def find_left_out(directory: Path, specs: Mapping[str, ParamSpec]) -> dict[str, str]:
    """Find the tensors of parts of the model that are not computed, from headers alone.

    returns: by name, the tower that each is of; "" for parts of the decoder
    raises: ModelError
    """
    if not any(spec.left_out or spec.towers for spec in specs.values()):
        return {}
    with _open_checkpoint(directory, specs) as checkpoint:
        return dict(sorted(find_parts_left_out(checkpoint.tensors, specs.values()).items()))


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


def parameter_dtype(spec: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """The type of a parameter of a model in `dtype`."""
    found: torch.dtype = dtype if spec.dtype is None else getattr(torch, spec.dtype)
    return found


@frozen
class _Packer:
    """Which parameters are packed.

    takes_format: as `Ops.takes_format`; None where nothing is
    quant: the numbers that plain parameters are packed in; None for none
    """

    takes_format: _TakesFormat | None
    quant: WeightKind | None

    def takes(self, spec: ParamSpec, format: WeightFormat | None) -> bool:
        """Whether the operations take the parameter in that format."""
        return (
            format is not None and self.takes_format is not None and self.takes_format(spec, format)
        )

    def choose(self, spec: ParamSpec) -> WeightFormat | None:
        """The format to pack a plain parameter in, or None."""
        format = None if self.quant is None else choose_format(self.quant, spec)
        return format if self.takes(spec, format) else None


@frozen
class _Target:
    """What tensors are made for."""

    specs: Mapping[str, ParamSpec]
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_seq_len: int
    source: Source
    packer: _Packer

    def count_bytes(self, name: str) -> int:
        """How many bytes of the source the parameter takes; 0 for one that has none."""
        spec = self.specs.get(name)
        if spec is None or not spec.sources:
            return 0
        return self.source.count_bytes(name, spec, self.dtype_of(spec))

    def count_device_bytes(self, name: str) -> int:
        """How many bytes the parameter takes on the device, before it is prepared."""
        spec = self.specs[name]
        packed = self.find_packed(name)
        format = self.packer.choose(spec) if packed is None else packed.format
        count = math.prod(spec.shape)
        if format is None:
            return count * self.dtype_of(spec).itemsize
        rows, columns = format.group or spec.shape[-2:]
        scales = -(-spec.shape[-2] // rows) * -(-spec.shape[-1] // columns)
        scales *= math.prod(spec.shape[:-2])
        return int(count * NUMBER_BYTES[format.kind]) + scales * (4 + format.has_zeros)

    def find_packed(self, name: str) -> Packed | None:
        """The parameter as it is stored, if it stays so; None if it is made plain."""
        spec = self.specs[name]
        packed = self.source.find_packed(name, spec) if spec.sources else None
        return packed if packed and self.packer.takes(spec, packed.format) else None

    def dtype_of(self, spec: ParamSpec) -> torch.dtype:
        """The type of the parameter."""
        return parameter_dtype(spec, self.dtype)

    def make_weight(self, name: str) -> Weight:
        """The parameter, packed where the operations take it so.   raises: ModelError"""
        spec = self.specs[name]
        packed = self.find_packed(name)
        if packed is not None:
            weight = packed.read(self.device)
            if packed.format.kind is WeightKind.FP8_E4M3:
                self.source.check(name, weight.tensor)
            return weight
        tensor = self.make(name)
        format = self.packer.choose(spec)
        return Weight(tensor=tensor) if format is None else quantize(tensor, format)

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
    weight = target.make_weight(name)
    if bias in target.specs:
        weight = evolve(weight, bias=target.make(bias))
    if prepare is None:
        return weight
    prepared: object = prepare(spec, weight)
    if not isinstance(prepared, Weight):
        function = getattr(prepare, "__qualname__", "prepare")
        raise PluginBroken(
            f"operations: {function}({name!r}): expected a headstock.spi.Weight, got "
            f"{describe_type(prepared)}"
        )
    return prepared
