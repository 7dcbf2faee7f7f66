"""A device's minimum time for a workload, from its reads and multiplications."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from attrs import frozen

from headstock import UsageError
from headstock.spi import Experts, ModelConfig
from headstock_bench.workloads import Workload

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
"""Bytes of the timed copy, by kind of device: more than any cache holds."""
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the multiplied matrices."""
SECONDS = 1.0
"""Duration of each measurement: clocks fall to the power limit within tenths of a second."""
REPEATS = 8
"""Repetitions in a run, so that launching and waiting hardly matter."""


@frozen(kw_only=True)
class DeviceRates:
    """The measured rates of the device under sustained load.

    bytes_s: bytes that a copy reads and writes    flops_s: multiplications and additions
    """

    bytes_s: float
    flops_s: float


@frozen(kw_only=True)
class WorkloadLimit:
    """The minimum seconds of a workload if the device were never idle and read nothing twice.

    products_s: for linear layers and scores; a step is bound by reading weights or by multiplying
    attention_s: for keys and values, likewise
    """

    rates: DeviceRates
    products_s: float
    attention_s: float

    @property
    def seconds(self) -> float:
        """The sum."""
        return self.products_s + self.attention_s


@frozen(kw_only=True)
class ModelWork:
    """The cost of a model's tokens: elements of weights, keys and values, and multiplications.

    A token multiplies by the `active` elements of a layer's experts; a step reads more of them.
    """

    dense: int
    mixtures: tuple[tuple[Experts, int], ...]
    head: int
    kv: int
    attention: int

    @property
    def active(self) -> int:
        """Elements of the layers by which a token is multiplied."""
        return self.dense + sum(experts.per_token * size for experts, size in self.mixtures)

    def count_read(self, rows: int) -> float:
        """Expected elements of the layers read by a step of `rows` random tokens."""
        read = float(self.dense)
        for experts, size in self.mixtures:
            missed = (1 - experts.per_token / experts.count) ** rows
            read += experts.count * size * (1 - missed)
        return read


def measure_rates(device: str, dtype: torch.dtype) -> DeviceRates:
    """Time a copy and a matrix product of this dtype.

    raises: UsageError if the device lacks the memory for them
    """
    try:
        return _time_rates(device, dtype)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"--limits times a copy of {COPIED_BYTES[device] >> 20} MiB, and the engine has left "
            "no room for it; leave more free by a lower --memory-ratio"
        ) from error
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # memory that the engine may need for a step


def _time_rates(device: str, dtype: torch.dtype) -> DeviceRates:
    source = torch.zeros(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = MATRIX_SIZE[device]
    # Random numbers: zeros need less power and are multiplied faster.
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return DeviceRates(
        bytes_s=2 * source.numel() / time_settled(lambda: target.copy_(source), device),
        flops_s=2 * size**3 / time_settled(lambda: one @ other, device),
    )


def time_settled(
    work: Callable[[], object], device: str, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The seconds of the work at settled clocks: the median of the second half of its runs."""

    def run() -> float:
        begin = clock()
        for _ in range(REPEATS):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        return (clock() - begin) / REPEATS

    end = clock() + SECONDS
    run()
    times = [run()]
    while clock() < end:
        times.append(run())
    return median(times[len(times) // 2 :])


def count_work(model: ModelConfig) -> ModelWork:
    """The cost of a token.   raises: UsageError for layers that are not modelled"""
    if any(layer.latent is not None or layer.conv is not None for layer in model.layers):
        raise UsageError(
            f"--limits counts layers of attention over keys and values, and {model.architecture} "
            "has others; leave --limits out"
        )
    sizes = [model.sizes_of(layer) for layer in model.layers]
    attention = sum(2 * (each.heads + each.kv_heads) * each.head_dim for each in sizes)
    inner = sum(model.sizes_of(each).intermediate for each in model.layers if each.has_mlp)
    mixtures = [layer.experts for layer in model.layers if layer.experts is not None]
    gated = 3 * model.hidden
    return ModelWork(
        dense=attention * model.hidden
        + gated * inner
        + sum(each.count * model.hidden + gated * each.shared for each in mixtures),
        mixtures=tuple((each, gated * each.intermediate) for each in mixtures),
        head=model.vocab * model.hidden,
        kv=sum(2 * each.kv_heads * each.head_dim for each in sizes),
        attention=sum(4 * each.heads * each.head_dim for each in sizes),
    )


def limit_workload(
    model: ModelConfig, workload: Workload, rates: DeviceRates, *, weight_bytes: int, kv_bytes: int
) -> WorkloadLimit:
    """The minimum time of a workload whose requests run at once, with an empty prefix cache.

    Tokens of common prefixes are computed once, and the prefix of all prompts is read once per
    step. Windows count as full contexts.

    weight_bytes, kv_bytes: of an element
    raises: UsageError for a model with layers that are not modelled
    """
    work = count_work(model)
    prompts, outputs = sorted(workload.prompts), np.array(workload.outputs)
    shared = [0, *map(count_shared, prompts[:-1], prompts[1:])]
    positions = [np.arange(start, len(each)) for start, each in zip(shared, prompts, strict=True)]
    computed = sum(map(len, positions))
    contexts = sum(int((each + 1).sum()) for each in positions)
    weights = weight_bytes * (work.count_read(computed) + work.head) / rates.bytes_s
    flops = 2 * (work.active * computed + work.head * len(prompts))
    products, attention = (
        max(weights, flops / rates.flops_s),
        work.attention * contexts / rates.flops_s,
    )
    lengths = np.array([len(each) for each in workload.prompts])
    # The common prefix of the first and the last sorted prompt is that of all prompts.
    common = count_shared(prompts[0], prompts[-1]) if len(prompts) > 1 else 0
    for step in range(1, int(outputs.max())):
        context = lengths[outputs > step] + step
        rows, total = len(context), int(context.sum())
        weights = weight_bytes * (work.count_read(rows) + work.head) / rates.bytes_s
        products += max(weights, 2 * rows * (work.active + work.head) / rates.flops_s)
        read = kv_bytes * work.kv * (total - (rows - 1) * common) / rates.bytes_s
        attention += max(read, work.attention * total / rates.flops_s)
    return WorkloadLimit(rates=rates, products_s=products, attention_s=attention)


def count_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of common leading tokens of two prompts."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
