"""Profile a workload: host operations and device kernels, by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import asdict, field, frozen

CLASSES = {
    "launches and waits": ("cudalaunch", "culaunch", "cudagraph", "synchronize", "cudaevent"),
    "attention": (
        "flash",
        "attention",
        "attend",
        "batchdecode",
        "batchprefill",
        "xqa",
        "fmha",
        "mha",
        "combine",
        "sampled_addmm",
        "embedding_bag",
    ),
    "experts": ("expert", "grouped"),
    "products": (
        "gemm",
        "nvjet",
        "cutlass",
        "xmma",
        "splitk",
        "gemv",
        "linear",
        "::mm",
        "::bmm",
        "::addmm",
        "::baddbmm",
    ),
    "sampling": ("sample", "gumbel", "argmax", "softmax", "sort", "pick", "draw", "winner", "topk"),
    "norm, rope, activation": ("norm", "rope", "turn", "silu", "gelu", "act_and_mul", "embed"),
    "copies and indexes": (
        "copy",
        "memcpy",
        "memset",
        "index",
        "gather",
        "scatter",
        "elementwise",
        "arange",
        "fill",
        "::cat",
        "::empty",
    ),
}
"""Class -> parts of lower-case names of kernels and operations; the first match counts."""

_OWN_KERNELS = {
    "attention": "attend_kernel decode_kernel merge_kernel schedule_kernel",
    "experts": "route_kernel arrange_kernel place_kernel gate_up_rows_kernel gate_up_tiles_kernel "
    "down_rows_kernel down_tiles_kernel combine_kernel gate_up_words_kernel down_words_kernel",
    "products": "rows_kernel tokens_kernel few_tokens_kernel split_kernel gated_kernel "
    "unpack_kernel words_kernel unpack_words_kernel fp8_kernel parts_kernel",
    "sampling": "part_kernel join_kernel survey_kernel choose_kernel cut_kernel "
    "take_kernel scale_kernel",
    "norm, rope, activation": "add_norm_kernel embed_norm_kernel heads_kernel silu_and_mul_kernel "
    "quantize_kernel",
    "sums over ranks": "sum_ranks_kernel join_ranks_kernel add_norm_ranks_kernel",
    "convolution": "step_kernel convolve_kernel keep_kernel",
    "delta rule": "learn_tokens_kernel prepare_chunks_kernel learn_chunks_kernel "
    "normalize_chunks_kernel list_chunks_kernel",
}
OWN_KERNELS = {name: label for label, names in _OWN_KERNELS.items() for name in names.split()}
"""Name of one of this project's kernels -> its class, which the name's parts do not reveal."""

NUM_LARGEST = 25

Span = tuple[str, float, float]
"""A name, and its begin and end in microseconds."""


@frozen(kw_only=True)
class TimeShare:
    """Microseconds and calls per step."""

    name: str
    us: float
    calls: float


@frozen(kw_only=True)
class WorkloadProfile:
    """One run of a workload under torch's profiler, which slows it down.

    steps: the number of steps with work for the device
    wall_us: a step's time
    idle_us: the part of it without a running kernel; None on a CPU
    python_us: the part of it without a running host operation on any thread
    device: by class; a kernel's time starts at the end of all kernels that began before it, so
        overlapping kernels add up to the busy time of the device
    host: by class; an operation's time excludes nested operations, and threads add up
    largest: kernels and operations by name, the longest first
    """

    workload: str
    steps: int
    wall_us: float
    idle_us: float | None
    python_us: float
    device: tuple[TimeShare, ...] = field(repr=False)
    host: tuple[TimeShare, ...] = field(repr=False)
    largest: tuple[TimeShare, ...] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)

    def format_lines(self) -> list[str]:
        """A table for people."""
        lines = [f"profile of {self.workload}: {self.steps} steps of {self.wall_us:,.0f} us"]
        for side, shares in (("device", self.device), ("host", self.host)):
            lines += [
                f"  {side:6}  {share.name:24}{share.us:10,.1f} us{share.calls:9,.1f} calls a step"
                for share in shares
            ]
        lines.append(f"  host    {'outside operations':24}{self.python_us:10,.1f} us")
        if self.idle_us is not None:
            lines.append(f"  device  {'idle':24}{self.idle_us:10,.1f} us")
        return lines


def classify_operation(name: str) -> str:
    """The class of a kernel or an operation, by its name."""
    if name in OWN_KERNELS:
        return OWN_KERNELS[name]
    lower = name.lower()
    return next(
        (label for label, parts in CLASSES.items() if any(part in lower for part in parts)), "other"
    )


def profile_workload(
    name: str,
    work: Callable[[], float],
    count_steps: Callable[[], int],
    *,
    on_gpu: bool,
) -> WorkloadProfile:
    """Do the work under torch's profiler.

    work: one run; returns its seconds
    count_steps: how many steps the engine has executed so far
    """
    # Imported late: torch takes 1.5 s, and `--help` does not need it.
    import torch
    from torch.profiler import ProfilerActivity, profile

    # The engine has its own thread, and torch has no public API to profile all threads.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    before = count_steps()
    with profile(activities=activities, experimental_config=threads) as found:
        seconds = work()
    host = [
        (event.key, event.self_cpu_time_total, event.count)
        for event in found.key_averages()
        if event.device_type.name == "CPU"
    ]
    spans: tuple[list[Span], list[Span]] = ([], [])
    for event in found.events() or ():
        if event.is_user_annotation:
            continue  # a range around operations, which would cover the gaps between them
        on_device = event.device_type.name != "CPU"
        spans[on_device].append((event.name, event.time_range.start, event.time_range.end))
    return make_profile(
        name, count_steps() - before, seconds, spans[1], host, spans[0], on_gpu=on_gpu
    )


def make_profile(
    name: str,
    steps: int,
    seconds: float,
    kernels: Sequence[Span],
    host: Sequence[tuple[str, float, int]],
    operations: Sequence[Span],
    *,
    on_gpu: bool,
) -> WorkloadProfile:
    """The profile of `steps` steps.

    kernels, operations: of the device and of the host, in any order
    host: name, microseconds without nested operations, and calls, over all steps
    """
    steps = max(steps, 1)
    wall = 1e6 * seconds / steps
    device = [(key, us, 1) for key, us in divide_busy_time(kernels)]
    busy, active = (
        sum(us for _, us in divide_busy_time(spans)) / steps for spans in (kernels, operations)
    )
    return WorkloadProfile(
        workload=name,
        steps=steps,
        wall_us=round(wall, 1),
        # The clock stops at the last token; the profiler's first and last spans may be outside.
        python_us=round(max(wall - active, 0.0), 1),
        idle_us=round(max(wall - busy, 0.0), 1) if on_gpu else None,
        device=_sum_shares(((classify_operation(key), us, n) for key, us, n in device), steps),
        host=_sum_shares(((classify_operation(key), us, n) for key, us, n in host), steps),
        largest=_sum_shares([*device, *host], steps)[:NUM_LARGEST],
    )


def divide_busy_time(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """Each span's contribution to the time covered by any span, in the order of their begins.

    Kernels overlap: with programmatic dependent launch, one begins early and waits for the one
    before it. So a kernel's time starts at the end of all kernels before it.
    """
    shares, reached = [], float("-inf")
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        shares.append((name, max(end - max(begin, reached), 0.0)))
        reached = max(reached, end)
    return shares


def _sum_shares(entries: Iterable[tuple[str, float, int]], steps: int) -> tuple[TimeShare, ...]:
    """Time and calls per step by name, the longest first."""
    times: dict[str, float] = {}
    calls: dict[str, int] = {}
    for name, us, count in entries:
        times[name] = times.get(name, 0.0) + us
        calls[name] = calls.get(name, 0) + count
    return tuple(
        TimeShare(
            name=name[:120], us=round(times[name] / steps, 1), calls=round(calls[name] / steps, 2)
        )
        for name in sorted(times, key=lambda name: -times[name])
    )
