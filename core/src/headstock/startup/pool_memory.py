"""The memory of the KV pool: what the rest of an engine leaves, and its buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch

from headstock.callbacks import ProgressCallback
from headstock.config import EngineConfig
from headstock.config.setting_rules import DEFAULT_MEMORY_RATIO, POOL_SIZES
from headstock.errors import CannotRun
from headstock.execution.buffers import Buffers, BufferShape, allocate_buffers
from headstock.spi import Ranks
from headstock.startup.build_inputs import BuildInputs
from headstock.startup.kept_profile import KeptProfile
from headstock.startup.memory_plan import (
    MemoryPlan,
    MemoryUse,
    count_scored_positions,
    estimate_memory_use,
    format_bytes,
    plan_memory,
)
from headstock.startup.profile_run import ProfileProgress, measure_memory_use, slow_notice


def plan_device_memory(
    inputs: BuildInputs,
    shape: BufferShape,
    max_len: int,
    free: int,
    kept: KeptProfile,
    notes: list[str],
    ranks: Ranks,
    on_progress: ProgressCallback | None,
    *,
    snapshot_ratio: float = 0.0,
) -> MemoryPlan:
    """Divide the bytes that were free before loading among weights, steps and the KV pool.

    On a GPU the rest is measured by a profile run, this one's or an earlier start's; on a CPU it is
    estimated. All ranks have the pages of the one that has room for the fewest.

    raises: CannotRun
    writes: notes, a line where an earlier start measured
    """
    config, model = inputs.config, inputs.model
    rows, tokens = config.max_running_requests, config.max_batch_tokens
    on_gpu = shape.device.type == "cuda"
    # Rank 0's for all ranks: one that skipped the profile run would leave the others in it.
    earlier = kept.read()
    shared = ranks.share(None if earlier is None else (attrs.asdict(earlier[0]), earlier[1]))
    if shared is not None:
        memory_use, day = MemoryUse(**shared[0]), shared[1]
        notes.append(
            f"the largest step and graphs were measured on {day}; memory_profiles "
            "(--memory-profiles) off measures them again"
        )
    elif on_gpu:
        memory_use = profile_memory_use(inputs, shape, max_len, on_progress)
        kept.write(memory_use)
    else:
        memory_use = estimate_memory_use(
            model,
            tokens,
            count_scored_positions(rows, inputs.parts.max_drafts),
            shape.dtype.itemsize,
            inputs.parts.operations.count_kernel_bytes(inputs.params, tokens),
            has_processors=bool(inputs.parts.processors),
            has_masks=inputs.masks is not None,
        )
    plan = partial(
        plan_memory,
        model=model,
        page_size=shape.page_size,
        kv_dtype=shape.kv_dtype,
        dtype=shape.dtype,
        weights=sum(weight.nbytes for weight in inputs.params.values()),
        other_use=memory_use,
        free=free,
        max_len=max_len,
        snapshot_ratio=snapshot_ratio,
        max_drafts=inputs.parts.max_drafts,
    )
    memory = plan(config)
    (least,) = ranks.take_least([memory.kv_tokens // shape.page_size])
    if least * shape.page_size == memory.kv_tokens:
        return memory
    return plan(set_num_pages(config, least))


def set_num_pages(config: EngineConfig, num_pages: int) -> EngineConfig:
    """The configuration with so many pages, whichever setting sized the pool."""
    unset: dict[str, Any] = dict.fromkeys(POOL_SIZES) | {"memory_ratio": DEFAULT_MEMORY_RATIO}
    return attrs.evolve(config, **unset | {"num_pages": num_pages})


def profile_memory_use(
    inputs: BuildInputs,
    shape: BufferShape,
    max_len: int,
    on_progress: ProgressCallback | None = None,
) -> MemoryUse:
    """Measure what the largest step, the backends and the graphs take.   raises: CannotRun"""
    parts = inputs.parts
    names = f"{parts.attention_name}, {parts.ops.name}"
    reason = (
        f"kernels of {names} that are new on this machine are compiled at their first use, and kept"
    )
    # Here most kernels run for the first time: 38 s of a first start are Triton's experts at the
    # 30B-A3B shape.
    try:
        with (
            slow_notice("measuring the largest step", reason),
            ProfileProgress(on_progress) as progress,
        ):
            return measure_memory_use(
                inputs,
                lambda: allocate_buffers(shape, (1,) * len(shape.groups), max_len),
                max_len,
                progress,
            )
    except torch.OutOfMemoryError as error:
        raise CannotRun(
            f"a step of max_batch_tokens (--max-batch-tokens) {inputs.config.max_batch_tokens} "
            "needs more memory than the device has; lower it or max_running_requests "
            "(--max-running-requests)"
        ) from error


def reserve_buffers(
    memory: MemoryPlan, kept: KeptProfile, allocate: Callable[[], Buffers]
) -> Buffers:
    """Allocate the buffers.   raises: CannotRun when the memory is not free after all"""
    try:
        return allocate()
    except (MemoryError, torch.OutOfMemoryError) as error:
        kept.forget()
        raise CannotRun(
            f"the KV pool needs {format_bytes(memory.pool)} of {format_bytes(memory.free)} that "
            "were free at the start, and could not be allocated; lower memory_ratio "
            "(--memory-ratio) or num_pages (--num-pages), or end what else uses the device"
        ) from error
