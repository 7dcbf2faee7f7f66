"""Step runners: how a step's forward pass and sampling are launched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import instance_of

from headstock.spi.attention import GraphSupport, Planning
from headstock.spi.environment import DeviceRange
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from headstock.spi.attention import AttentionBackend, LayerInfo
    from headstock.spi.batch import Batch, Sample, Sampling
    from headstock.spi.model import Attend, Model, ModelConfig
    from headstock.spi.ops import Ops, Params

CaptureReport = Callable[[int, int], None]
"""Told how many captures are done, and of how many."""


@frozen(kw_only=True)
class RunnerCapabilities:
    """Where the runner works and the least graph support it needs of the decode backend."""

    devices: tuple[DeviceRange, ...]
    needs_graph: GraphSupport


@frozen(kw_only=True)
class RunnerSpec(PluginSpec):
    """A runner as its entry point returns it; `implementation` names a `Runner`."""

    capabilities: RunnerCapabilities = field(validator=instance_of(RunnerCapabilities))


@frozen(kw_only=True, eq=False)
class Seats:
    """What the device knows of each seat. The last one is nobody's: rows that pad a batch sit there, and its page
    tables hold the dummy page alone.

    tokens: [seats, max_len + 1] int64, every token known or sampled so far
    page_tables: one a KV group, [seats, max_pages] int32, 0 past a row's last page
    pools: one a layer, [pages, 2, page_size, kv_heads, head_dim]
    temperature, top_p, min_p: [seats] float32       top_k, seeds: [seats] int64, vocab for no top_k
    """

    page_size: int
    tokens: Tensor
    page_tables: tuple[Tensor, ...]
    pools: tuple[Tensor, ...]
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seeds: Tensor

    @property
    def nobody(self) -> int:
        """The seat of rows that pad a batch."""
        return len(self.tokens) - 1


@frozen(kw_only=True, eq=False)
class DecodeAttention:
    """The decode backend, how it is planned, and the layers it serves."""

    backend: AttentionBackend
    planning: Planning
    layers: tuple[LayerInfo, ...]
    max_seq_len: int


@frozen(kw_only=True, eq=False)
class Program:
    """What a step computes: a model, its parameters and the operations they go through, over what the device knows of
    the seats.

    `most_logits` is how many positions may be scored at once; a batch that asks for more is scored in parts.
    """

    config: ModelConfig
    params: Params
    model: Model
    ops: Ops
    seats: Seats
    attention: DecodeAttention
    most_logits: int


@frozen(kw_only=True, eq=False)
class DecodeStep:
    """A step in which each row computes one token after earlier ones, and is given the next.

    rows, positions: [n] int64 numpy, seats and the positions of the tokens to compute
    `settings` names the columns of `Seats` that matter for some row ("temperature", ...), or is None when sampling
    needs more than these; `sampling` makes the whole of it either way.
    """

    rows: np.ndarray
    positions: np.ndarray
    settings: frozenset[str] | None
    sampling: Callable[[], Sampling]


class Runner(ABC):
    """Runs batches through a program."""

    @abstractmethod
    def __init__(self, program: Program) -> None:
        """A runner of `program`."""

    @abstractmethod
    def run(self, batch: Batch, attend: Attend) -> Sample:
        """What the batch's logit positions sample.

        writes: batch.pools
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what was recorded."""

    def buckets(self, most_rows: int) -> tuple[int, ...]:
        """The batch sizes that it would record for steps of up to `most_rows` rows, largest first; none by default."""
        return ()

    def capture(self, buckets: Sequence[int], report: CaptureReport) -> None:
        """Record steps of these sizes, in place of those recorded before, so that `decode` can replay them.

        Whatever it raises, `run` works on.
        """
        if buckets:
            raise TypeError(f"{type(self).__name__} names buckets but has no capture")

    def decode(self, step: DecodeStep) -> Sample | None:
        """What the step samples, by a replay; None when this is a step for `run`.

        The sample's tensors may be overwritten by the next call.
        writes: the pools; seats.tokens at each row's next position
        """
        return None
