"""Step runners: how a step's forward pass and sampling are launched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import instance_of

from headstock.spi.attention import AttentionStep, GraphSupport, Phase, Planning
from headstock.spi.batch import Batch, Sample, Sampling
from headstock.spi.environment import DeviceRange
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from headstock.spi.attention import AttentionBackend, LayerInfo
    from headstock.spi.model import Attend, Model, ModelConfig
    from headstock.spi.ops import Ops, Params

CaptureReport = Callable[[int, int], None]
"""Told how many captures are done, and of how many."""

AttendInto = Callable[["Tensor", int, "Tensor"], None]
"""`(q, layer, out)`: writes attention of a step's queries to `out`, both [tokens, heads, head_dim].
"""


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
    """What the device knows of each seat. The last one is nobody's: rows that pad a batch sit
    there, and its page tables hold the dummy page alone.

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

    def batch(self, token_rows: Tensor, positions: Tensor) -> Batch:
        """The batch of these tokens, every one of them scored. A graph may capture it.

        token_rows, positions: [tokens] int64, the seat and the place in its request of each token
        """
        size = self.page_size
        columns, offsets = positions.div(size, rounding_mode="floor"), positions % size
        return Batch(
            tokens=self.tokens[token_rows, positions],
            positions=positions,
            slots=tuple(
                offsets.add(table[token_rows, columns], alpha=size) for table in self.page_tables
            ),
            pools=self.pools,
            rows=token_rows,
            logit_indices=None,
            sampling=Sampling(),
        )

    def decode_attention(
        self, rows: Tensor, positions: Tensor, query_start: Tensor, host_context_lens: np.ndarray
    ) -> AttentionStep:
        """What attention is told of decode rows. A graph may capture it.

        rows, positions: [n] int64    query_start: [n + 1] int32, 0, 1, 2, ...
        host_context_lens: [n] int32, or the most that they may be
        """
        import torch  # importing the contract does not

        columns = -(-int(host_context_lens.max()) // self.page_size)
        return AttentionStep(
            phase=Phase.DECODE,
            query_start=query_start,
            context_lens=torch.add(
                positions, 1, out=torch.empty_like(positions, dtype=torch.int32)
            ),
            page_tables=tuple(
                table[:, :columns].index_select(0, rows) for table in self.page_tables
            ),
            host_query_lens=host_context_lens.clip(1, 1),
            host_context_lens=host_context_lens,
        )

    def prompt_attention(
        self,
        rows: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        most_tokens: int,
        max_seq_len: int,
    ) -> AttentionStep:
        """What attention is told of rows of any length, `most_tokens` query tokens together. A
        graph may capture it.

        rows: [n] int64    query_start: [n + 1] int32    context_lens: [n] int32
        """
        import numpy as np  # late, as torch in `decode_attention`

        lens = np.full(len(rows), most_tokens, np.int32)
        return AttentionStep(
            phase=Phase.EXTEND,
            query_start=query_start,
            context_lens=context_lens,
            page_tables=tuple(table.index_select(0, rows) for table in self.page_tables),
            host_query_lens=lens,
            host_context_lens=np.full_like(lens, max_seq_len),
        )

    def sampling(self, rows: Tensor, positions: Tensor, kind: frozenset[str]) -> Sampling:
        """How the tokens that come to these positions are sampled, by the columns that `kind`
        names. A graph may capture it.

        rows, positions: [n] int64
        """
        if not kind:
            return Sampling()
        columns = {name: getattr(self, name)[rows] for name in sorted(kind)}
        return Sampling(**columns, seeds=self.seeds[rows], positions=positions)

    def keep(self, rows: Tensor, positions: Tensor, sample: Sample) -> None:
        """Note the sampled tokens where they belong. A graph may capture it.

        rows, positions: [n] int64
        writes: tokens
        """
        self.tokens[rows, positions] = sample.tokens


@frozen(kw_only=True, eq=False)
class DecodeAttention:
    """The decode backend, how it is planned, and the layers it serves."""

    backend: AttentionBackend
    planning: Planning
    layers: tuple[LayerInfo, ...]
    max_seq_len: int


@frozen(kw_only=True, eq=False)
class Program:
    """What a step computes: a model, its parameters and the operations they go through, over what
    the device knows of the seats.

    `prompt_attention` is the backend of prompts where a graph may have its calls in it
    (`GraphSupport.ALWAYS`), else None. `most_logits` is how many positions may be scored at once; a
    batch that asks for more is scored in parts.
    """

    config: ModelConfig
    params: Params
    model: Model
    ops: Ops
    seats: Seats
    attention: DecodeAttention
    most_logits: int
    prompt_attention: AttentionBackend | None = None


@frozen(kw_only=True, eq=False)
class DecodeStep:
    """A step in which each row computes one token after earlier ones, and is given the next.

    rows, positions: [n] int64 numpy, seats and the positions of the tokens to compute `settings`
    names the columns of `Seats` that matter for some row ("temperature", ...), or is None when
    sampling needs more than these; `sampling` makes the whole of it either way.
    """

    rows: np.ndarray
    positions: np.ndarray
    settings: frozenset[str] | None
    sampling: Callable[[], Sampling]


@frozen(kw_only=True, eq=False)
class PromptStep:
    """A step in which some row computes several tokens or its first, and each row is scored at its
    last one.

    num_decode: how many rows at the front have one token each after earlier ones
    token_rows, positions: [tokens] int64 numpy, the seat and the place in its request of each token
    last_tokens: [n] int64 numpy, which of the tokens is the last of each row
    is_sampled: [n] bool numpy, False where the row's prompt goes on after this step, so that no
    token is kept `settings` and `sampling` are those of `DecodeStep`, for the last tokens.
    `attention` plans the step's attention on the host and gives what computes it: the first call of
    a step may be made after work has been launched.
    """

    num_decode: int
    token_rows: np.ndarray
    positions: np.ndarray
    last_tokens: np.ndarray
    is_sampled: np.ndarray
    settings: frozenset[str] | None
    sampling: Callable[[], Sampling]
    attention: Callable[[], AttendInto]


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
        """The batch sizes that it would record for steps of up to `most_rows` rows, largest first;
        none by default.
        """
        return ()

    def prompt_buckets(self, most_tokens: int) -> tuple[int, ...]:
        """The token counts that it would capture for steps with prompt tokens of up to
        `most_tokens` tokens, largest first; none by default.
        """
        return ()

    def capture(
        self, buckets: Sequence[int], report: CaptureReport, prompt_buckets: Sequence[int] = ()
    ) -> Sequence[int]:
        """Record steps of these sizes, in place of those recorded before, so that `decode` and
        `prompt` can replay them.

        Whatever it raises, `run` works on.
        returns: those of `prompt_buckets` that were worth it, largest first
        """
        if buckets or prompt_buckets:
            raise TypeError(f"{type(self).__name__} names buckets but has no capture")
        return ()

    def decode(self, step: DecodeStep) -> Sample | None:
        """What the step samples, by a replay; None when this is a step for `run`.

        The sample's tensors may be overwritten by the next call.
        writes: the pools; seats.tokens at each row's next position
        """
        return None

    def prompt(self, step: PromptStep) -> Sample | None:
        """What each row's last token samples, by a replay; None when this is a step for `run`.

        The sample's tensors may be overwritten by the next call.
        writes: the pools; seats.tokens at the next position of each row that is sampled
        """
        return None
