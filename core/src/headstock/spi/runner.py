"""Step runners: how a step's forward pass and sampling are launched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
    drafts: `run` returns `Sample.make_drafts` and `Sample.verified` where
        `Program.has_own_drafts`, as that does
    """

    devices: tuple[DeviceRange, ...]
    needs_graph: GraphSupport
    layouts: frozenset[LayoutKind]
    models: frozenset[str] | None = None
    ops: frozenset[str] | None = None
    pooling: bool = False
    drafts: bool = False


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
    takes_bounds: `capture_plan` plans a step of decode rows from upper bounds of their lengths
    """

    backend: AttentionBackend
    planning: Planning
    layers: Mapping[int, LayerInfo]
    max_seq_len: int
    shares_prefixes: bool = False
    shares_beside_prompts: bool = False
    takes_bounds: bool = False


@frozen(kw_only=True, eq=False)
class Program:
    """What a step computes: a model, its parameters and the operations, over the row tables.

    params: for the family's own code    ops: bound to the parameters and the configuration
    prompt_attention: the backend of prompts if a graph may capture its calls
        (`GraphSupport.ALWAYS`), else None
    max_logits: the most positions that are scored at once; a batch with more is scored in parts
    verify_len: tokens of a row that verifies as many drafts as there may be; 1 without a proposer
    verify_attention: the backend of such rows if a graph may capture its calls for rows of one
        length (`GraphSupport.UNIFORM`, by its `capture_plan`), else None
    has_own_drafts: whether the model's own layers guess `verify_len - 1` tokens behind each row of
        every step, by `headstock.nn.drafts`
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
    has_own_drafts: bool = False
    rules: frozenset[str] = frozenset()


@frozen(kw_only=True)
class ReplayLimits:
    """Up to which sizes replays of steps are wanted.

    max_rows: rows of a step of decode rows; 0: no replays at all
    max_tokens: tokens of a step with prompt tokens; 0: none of these
    full_tokens: tokens of a full step with prompt tokens, which has a replay beside those of up to
        `max_tokens`; 0 where it needs none
    may_defer: replays may be made later, when a step first needs one or in `prepare_next`. What
        cannot be made then is logged and left to `run`
    """

    max_rows: int = 0
    max_tokens: int = 0
    full_tokens: int = 0
    may_defer: bool = False


@frozen(kw_only=True)
class ReplaySizes:
    """The steps that a runner replays; smaller ones are padded to the next size.

    rows: of steps of decode rows, largest first
    tokens: of steps with prompt tokens, largest first; those that are not worth it are left out
    num_left: how many sizes are left for `prepare_next`
    """

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    num_left: int = 0


class Runner(ABC):
    """Runs batches through a program."""

    @abstractmethod
    def __init__(self, program: Program) -> None:
        """Make a runner of `program`."""

    @abstractmethod
    def run(self, step: Step) -> Sample:
        """Run the step, sample its scored tokens, and store those samples that are tokens of rows.

        Whether it is a replay is the runner's own affair: what cannot be replayed is for
        `headstock.nn.eager_step.run_eager_step`. Without `prepare` nothing is replayed. The next
        call may overwrite the sample's tensors.

        writes: the pools; the token table, by `RowTables.keep`, as `Step.list_stored` says
        """

    @abstractmethod
    def close(self) -> None:
        """Free what was captured."""

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        """Make what `run` replays, replacing all earlier replays.

        After any exception `run` still works, and nothing is replayed. By default nothing ever is.
        """
        return ReplaySizes()

    def prepare_next(self) -> int:
        """Make one of the replays that `prepare` has left for later.

        It is called while no step is due, and a request that arrives meanwhile waits for it.

        returns: how many sizes are still left; 0 by default
        """
        return 0
