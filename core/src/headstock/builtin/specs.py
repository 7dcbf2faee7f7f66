"""What core's own plugins say of themselves; importing it imports no torch."""

from __future__ import annotations

from headstock.spi import (
    DeviceRange,
    GraphSupport,
    LayoutKind,
    OpsCapabilities,
    OpsSpec,
    RunnerCapabilities,
    RunnerSpec,
    SchedulerSpec,
    SpiRange,
    WeightKind,
)

DEVICES = (DeviceRange("cpu"), DeviceRange("cuda"))
LAYOUTS = frozenset(LayoutKind)
SPI = SpiRange(0, 3)


def mixed() -> SchedulerSpec:
    """The default scheduler."""
    return SchedulerSpec(
        name="mixed",
        spi=SPI,
        summary="decode rows in every step, prompts in what the token budget leaves",
        implementation="headstock.builtin.mixed:schedule",
    )


def prefill_first() -> SchedulerSpec:
    """The scheduler for short times to first tokens."""
    return SchedulerSpec(
        name="prefill-first",
        spi=SPI,
        summary="prompts before generation, with bounded waiting",
        implementation="headstock.builtin.prefill_first:schedule",
    )


def decode_first() -> SchedulerSpec:
    """The scheduler for even gaps between tokens."""
    return SchedulerSpec(
        name="decode-first",
        spi=SPI,
        summary="generation before prompts, with bounded waiting",
        implementation="headstock.builtin.decode_first:schedule",
    )


def equal_length() -> SchedulerSpec:
    """The scheduler for batches without padding."""
    return SchedulerSpec(
        name="equal-length",
        spi=SPI,
        summary="rows of equal length together, with bounded waiting",
        implementation="headstock.builtin.equal_length:schedule",
    )


def eager() -> RunnerSpec:
    """The runner that captures nothing."""
    return RunnerSpec(
        name="eager",
        spi=SPI,
        summary="launches every operation as it comes",
        implementation="headstock.builtin.eager:EagerRunner",
        capabilities=RunnerCapabilities(
            devices=DEVICES,
            needs_graph=GraphSupport.NEVER,
            layouts=frozenset(LayoutKind),
            pooling=True,
            drafts=True,
        ),
    )


def torch_ops() -> OpsSpec:
    """The reference operations."""
    return OpsSpec(
        name="torch",
        spi=SPI,
        summary="plain torch; what the other sets must agree with",
        implementation="headstock.ops.torch_ops:TorchOps",
        capabilities=OpsCapabilities(
            devices=DEVICES, dtypes=frozenset({"float32", "bfloat16", "float16"}), layouts=LAYOUTS
        ),
    )


def onednn_ops() -> OpsSpec:
    """The operations with weights packed for CPUs."""
    return OpsSpec(
        name="onednn",
        spi=SPI,
        summary="torch with the weights of linear maps packed for a CPU",
        implementation="headstock.ops.onednn_ops:OneDnnOps",
        capabilities=OpsCapabilities(
            devices=(DeviceRange("cpu"),), dtypes=frozenset({"float32"}), layouts=LAYOUTS
        ),
    )


def fbgemm_ops() -> OpsSpec:
    """The operations with weights in half the bytes for CPUs."""
    return OpsSpec(
        name="fbgemm",
        spi=SPI,
        summary="onednn, with linear maps kept in float16 where that loses nothing",
        implementation="headstock.ops.fbgemm_ops:FbgemmOps",
        capabilities=OpsCapabilities(
            devices=(DeviceRange("cpu"),),
            dtypes=frozenset({"float32"}),
            layouts=LAYOUTS,
            formats=frozenset((WeightKind.FP8_E4M3, WeightKind.INT8, WeightKind.INT4)),
        ),
    )
