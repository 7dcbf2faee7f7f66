"""Step runners: how a step's forward pass and sampling are launched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import instance_of

from headstock.spi.attention import GraphSupport, Planning
from headstock.spi.batch import Sample
from headstock.spi.environment import DeviceRange
from headstock.spi.kv import LayoutKind
from headstock.spi.plugin import PluginSpec
from headstock.spi.row_tables import RowTables
from headstock.spi.step import Step

if TYPE_CHECKING:
    from headstock.spi.attention import AttentionBackend, LayerInfo
    from headstock.spi.model import Model
    from headstock.spi.model_config import ModelConfig
    from headstock.spi.ops import Ops
    from headstock.spi.weight import Params

CaptureProgress = Callable[[int, int], None]
"""`report(done, total)`: how many captures are done, and of how many."""


@frozen(kw_only=True)
class RunnerCapabilities:
    """Where the runner works and the least graph support it needs of the decode backend.

    layouts: of the KV groups of the models that it runs
    models: the architectures that it runs; None for any
    ops: the sets of operations that it runs over, by name; None for any
    pooling: `run` pools the rows of `Batch.pooling`, as `headstock.nn.eager_step` does
    """

    devices: tuple[DeviceRange, ...]
    needs_graph: GraphSupport
    layouts: frozenset[LayoutKind]
    models: frozenset[str] | None = None
    ops: frozenset[str] | None = None
    pooling: bool = False


@frozen(kw_only=True)
class RunnerSpec(PluginSpec):
    """A runner as its entry point returns it.

    `implementation` names a `Runner`, which is given its options behind the program if the spec
    has a class for them.
    """

    capabilities: RunnerCapabilities = field(validator=instance_of(RunnerCapabilities))


@frozen(kw_only=True, eq=False)
class DecodeAttention:
    """The decode backend, how it is planned, and the layers it serves.

    layers: by number; those that keep a state have no attention
    shares_prefixes: steps may have `groups`, which the backend makes use of
    shares_beside_prompts: so it does beside prompts, if it attends for these too
    """

    backend: AttentionBackend
    planning: Planning
    layers: Mapping[int, LayerInfo]
    max_seq_len: int
    shares_prefixes: bool = False
    shares_beside_prompts: bool = False


@frozen(kw_only=True, eq=False)
class Program:
    """What a step computes: a model, its parameters and the operations, over the row tables.

    prompt_attention: the backend of prompts if a graph may capture its calls
        (`GraphSupport.ALWAYS`), else None
    max_logits: the most positions that are scored at once; a batch with more is scored in parts
    verify_len: tokens of a row that verifies as many drafts as there may be; 1 without a proposer
    verify_attention: the backend of such rows if a graph may capture its calls for rows of one
        length (`GraphSupport.UNIFORM`, by its `capture_plan`), else None
    rules: what a `kind` of sampling may name beside settings. `RowTables.sampling` makes these
        too, and for rows that do not ask for a rule it is neutral
    """

    config: ModelConfig
    params: Params
    model: Model
    ops: Ops
    row_tables: RowTables
    attention: DecodeAttention
    max_logits: int
    prompt_attention: AttentionBackend | None = None
    verify_len: int = 1
    verify_attention: AttentionBackend | None = None
    rules: frozenset[str] = frozenset()


class Runner(ABC):
    """Runs batches through a program."""

    @abstractmethod
    def __init__(self, program: Program) -> None:
        """Make a runner of `program`."""

    @abstractmethod
    def run(self, step: Step) -> Sample:
        """Run the step, sample its scored tokens, and store those samples that are tokens of rows.

        Whether it is a replay is the runner's own affair: what cannot be replayed is for
        `headstock.nn.eager_step.run_eager_step`. Without `capture` nothing is replayed. The next
        call may overwrite the sample's tensors.

        writes: the pools; the token table, by `RowTables.keep`, as `Step.list_stored` says
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
        """Capture steps of these sizes for `run` to replay.

        They take the place of all earlier captures. After any exception `run` still works.

        returns: those of `prompt_buckets` that are worth replaying, largest first
        """
        # A runner without graphs is asked for none: it named no buckets.
        if buckets or prompt_buckets:
            raise TypeError(f"{type(self).__name__} names buckets but has no capture")
        return ()

    def defer_captures(self, buckets: Sequence[int], prompt_buckets: Sequence[int] = ()) -> bool:
        """Capture each of these sizes later: when a step first needs it, or in `capture_next`.

        They take the place of all earlier captures, and what `capture` raises may be raised here. A
        size that cannot be captured later is logged and left to `run`.

        returns: False when the runner does not defer, as by default; `capture` is called then
        """
        return False

    def capture_next(self) -> int:
        """Capture one graph of those that were deferred.

        It is called while no step is due, and a request that arrives meanwhile waits for it.

        returns: how many sizes are still to be captured; 0 by default
        """
        return 0
