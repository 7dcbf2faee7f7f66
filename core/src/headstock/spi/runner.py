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
    from headstock.spi.model import Attend, Model
    from headstock.spi.model_config import ModelConfig
    from headstock.spi.ops import Ops, Params

CaptureProgress = Callable[[int, int], None]
"""`report(done, total)`: how many captures are done, and of how many."""

AttendInto = Callable[["Tensor", int, "Tensor"], None]
"""`attend(q, layer, out)`: writes attention of a step's queries to `out`, both
[tokens, heads, head_dim].
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
class RowTables:
    """The device's tables, one entry a row; `row_ids` index them.

    The last row is the padding row: it pads batches, and its page tables hold the dummy page alone.

    tokens: [rows, max_len + 1] int64, every token known or sampled so far
    page_tables: one a KV group, [rows, max_pages] int32, 0 past a row's last page
    pools: one a layer, [pages, 2, page_size, kv_heads, head_dim]
    temperature, top_p, min_p: [rows] float32
    top_k, seeds: [rows] int64, vocab for no top_k
    """

    # Steps with and without graphs read and write the same tables, so they follow each other in any
    # order, and a row may sit out a step without a message to a graph.
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
    def padding_row(self) -> int:
        """The row that pads a batch; any number of a batch's entries may use it."""
        return len(self.tokens) - 1

    def batch(self, token_rows: Tensor, positions: Tensor) -> Batch:
        """Make the batch of these tokens, every one of them scored. A graph may capture it.

        token_rows, positions: [tokens] int64, each token's row and its position in that row
        """
        # Few operations: a graph of a decode step pays for each in every replay.
        size = self.page_size
        columns, offsets = positions.div(size, rounding_mode="floor"), positions % size
        return Batch(
            tokens=self.tokens[token_rows, positions],
            positions=positions,
            slots=tuple(
                offsets.add(table[token_rows, columns], alpha=size) for table in self.page_tables
            ),
            pools=self.pools,
            token_rows=token_rows,
            logit_indices=None,
            sampling=Sampling(),
        )

    def decode_attention(
        self, row_ids: Tensor, positions: Tensor, query_start: Tensor, host_context_lens: np.ndarray
    ) -> AttentionStep:
        """Make the attention step of decode rows. A graph may capture it.

        row_ids, positions: [n] int64
        query_start: [n + 1] int32, 0, 1, 2, ...
        host_context_lens: [n] int32, or the most that they may be
        """
        import torch  # importing the contract does not

        # From the host's lengths: those on the device would have to be waited for, and a capture
        # cannot read them.
        columns = -(-int(host_context_lens.max()) // self.page_size)
        return AttentionStep(
            phase=Phase.DECODE,
            query_start=query_start,
            # Cast and addition in one operation.
            context_lens=torch.add(
                positions, 1, out=torch.empty_like(positions, dtype=torch.int32)
            ),
            page_tables=tuple(
                table[:, :columns].index_select(0, row_ids) for table in self.page_tables
            ),
            host_query_lens=host_context_lens.clip(1, 1),
            host_context_lens=host_context_lens,
        )

    def prompt_attention(
        self,
        row_ids: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        max_tokens: int,
        max_seq_len: int,
    ) -> AttentionStep:
        """Make the attention step of rows of any length. A graph may capture it.

        The host lengths are upper bounds, because a captured step serves all lengths up to them.

        row_ids: [n] int64
        query_start: [n + 1] int32
        context_lens: [n] int32
        max_tokens: the most query tokens of all rows together
        """
        import numpy as np  # late, as torch in `decode_attention`

        lens = np.full(len(row_ids), max_tokens, np.int32)
        return AttentionStep(
            phase=Phase.EXTEND,
            query_start=query_start,
            context_lens=context_lens,
            page_tables=tuple(table.index_select(0, row_ids) for table in self.page_tables),
            host_query_lens=lens,
            host_context_lens=np.full_like(lens, max_seq_len),
        )

    def sampling(self, row_ids: Tensor, positions: Tensor, kind: frozenset[str]) -> Sampling:
        """Select the columns that `kind` names, for the tokens that come to these positions.

        A graph may capture it.

        row_ids, positions: [n] int64
        """
        # Greedy rows skip the noise over the vocabulary.
        if not kind:
            return Sampling()
        columns = {name: getattr(self, name)[row_ids] for name in sorted(kind)}
        return Sampling(**columns, seeds=self.seeds[row_ids], positions=positions)

    def keep(self, row_ids: Tensor, positions: Tensor, sample: Sample) -> None:
        """Write the sampled tokens to the token table. A graph may capture it.

        row_ids, positions: [n] int64
        writes: tokens
        """
        self.tokens[row_ids, positions] = sample.tokens


@frozen(kw_only=True, eq=False)
class DecodeAttention:
    """The decode backend, how it is planned, and the layers it serves."""

    backend: AttentionBackend
    planning: Planning
    layers: tuple[LayerInfo, ...]
    max_seq_len: int


@frozen(kw_only=True, eq=False)
class Program:
    """What a step computes: a model, its parameters and the operations, over the row tables.

    prompt_attention: the backend of prompts if a graph may capture its calls
        (`GraphSupport.ALWAYS`), else None
    max_logits: the most positions that are scored at once; a batch with more is scored in parts
    """

    config: ModelConfig
    params: Params
    model: Model
    ops: Ops
    row_tables: RowTables
    attention: DecodeAttention
    max_logits: int
    prompt_attention: AttentionBackend | None = None


@frozen(kw_only=True, eq=False)
class DecodeStep:
    """A step in which each row computes one token after earlier ones, and samples the next.

    row_ids, positions: [n] int64 numpy, the rows and the positions of the tokens to compute
    kind: the columns of `RowTables` that matter for some row ("temperature", ...); None when
        sampling needs more than these
    sampling: makes the complete `Sampling`, for any kind
    """

    # Two numbers a row are all that a replay is given: nothing on the device says how far a row is,
    # so nothing there can drift from the plan (docs/decisions/0015-replayed-decode-steps.md).
    row_ids: np.ndarray
    positions: np.ndarray
    kind: frozenset[str] | None
    sampling: Callable[[], Sampling]


@frozen(kw_only=True, eq=False)
class PromptStep:
    """A step with prompt tokens: some row computes several tokens, or its first.

    Each row is scored at its last token.

    num_decode: how many rows at the front have one token each after earlier ones
    token_rows, positions: [tokens] int64 numpy, each token's row and its position in that row
    last_tokens: [n] int64 numpy, the index of each row's last token
    is_sampled: [n] bool numpy; False where the row's prompt goes on after this step, so that no
        token is stored
    kind, sampling: as in `DecodeStep`, for the last tokens
    attention: plans the step's attention on the host and returns the function that computes it;
        the first call of a step may come after work has been launched
    """

    num_decode: int
    # A token's batch follows from its row and position alone, for prompts as for decode, so that
    # one upload gives a graph both.
    token_rows: np.ndarray
    positions: np.ndarray
    last_tokens: np.ndarray
    is_sampled: np.ndarray
    kind: frozenset[str] | None
    sampling: Callable[[], Sampling]
    attention: Callable[[], AttendInto]


class Runner(ABC):
    """Runs batches through a program."""

    @abstractmethod
    def __init__(self, program: Program) -> None:
        """Make a runner of `program`."""

    @abstractmethod
    def run(self, batch: Batch, attend: Attend) -> Sample:
        """Run the batch and sample its logit positions.

        writes: batch.pools
        """

    @abstractmethod
    def close(self) -> None:
        """Free what was captured."""

    def buckets(self, max_rows: int) -> tuple[int, ...]:
        """The batch sizes to capture for steps of up to `max_rows` rows, largest first.

        There are none by default.
        """
        return ()

    def prompt_buckets(self, max_tokens: int) -> tuple[int, ...]:
        """The token counts to capture for prompt steps of up to `max_tokens`, largest first.

        There are none by default.
        """
        return ()

    def capture(
        self, buckets: Sequence[int], report: CaptureProgress, prompt_buckets: Sequence[int] = ()
    ) -> Sequence[int]:
        """Capture steps of these sizes for `decode` and `prompt` to replay.

        They take the place of all earlier captures. After any exception `run` still works.

        returns: those of `prompt_buckets` that are worth replaying, largest first
        """
        # A runner without graphs is asked for none: it named no buckets.
        if buckets or prompt_buckets:
            raise TypeError(f"{type(self).__name__} names buckets but has no capture")
        return ()

    # `decode` and `prompt` may refuse a step, because captures cover only some sizes and kinds.
    def decode(self, step: DecodeStep) -> Sample | None:
        """Replay the step and sample; None when `run` must do it.

        The next call may overwrite the sample's tensors.

        writes: the pools; row_tables.tokens at each row's next position
        """
        return None

    def prompt(self, step: PromptStep) -> Sample | None:
        """Replay the step and sample at each row's last token; None when `run` must do it.

        The next call may overwrite the sample's tensors.

        writes: the pools; row_tables.tokens at the next position of each row that is sampled
        """
        return None
