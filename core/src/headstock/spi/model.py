"""Models: parameters declared as data, and pure functions over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from attrs import frozen

from headstock.spi.model_config import ModelConfig, Shard
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    from torch import Tensor

    from headstock.spi.batch import Batch
    from headstock.spi.ops import Ops
    from headstock.spi.weight import Params


class Role(Enum):
    """Which operations use a parameter, and so what `Ops.prepare` may make of it.

    LINEAR: `linear` alone          EMBEDDING: the look-up of tokens
    HEAD: `linear`, for scores      NORM, HEAD_NORM: `rms_norm`, `head_norm`
    HEAD_LINEAR: `head_linear`      ROPE: a table of rotations
    EXPERTS: `mix_experts`          ROUTER: `linear`, for what chooses or weighs experts
    RAW: the model's own code; it stays as it is
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    HEAD_NORM = "head-norm"
    HEAD_LINEAR = "head-linear"
    EXPERTS = "experts"
    ROUTER = "router"
    ROPE = "rope"
    RAW = "raw"


@frozen(kw_only=True)
class ParamSpec:
    """One parameter and the checkpoint tensors that it is made of.

    shape: as the model uses it
    roles: who uses it; several for a tied embedding
    sources: rows of checkpoint names; names in a row are concatenated on their first dimension
    stacked: whether the rows are stacked on a new first dimension
    dtype: a torch name; None for the model's
    compute: makes the tensor of the configuration and the length of the longest sequence, in place
        of sources (rope tables)
    parts: the sizes of a row's names on the concatenated dimension, or of what one name merges;
        empty for equal sizes
    whole: one tensor that is used instead of the sources where the checkpoint has it
    may_swap_whole: whether `whole` may be stored with its last two dimensions swapped, as its shape
        tells
    ignored: names that the checkpoint may have and that are not read
    left_out: beginnings of the names of parts of a model that are not computed here, such as layers
        that predict further tokens; the engine says at its start that it leaves them out
    towers: the same of parts for other inputs than text, each beginning with what the part is, such
        as "vision tower"
    renames: beginnings of stored names, each with the one that the sources have instead; where
        several fit, the longest counts
    copies: names that may hold a copy of the first source, or replace it
    dummy: what dummy weights hold everywhere; None for noise
    source_shape: the shape that the sources make, where `transform` gives it another one
    transform: makes the tensor out of the one that the sources make, which it may write; of the
        same dtype
    packed_rows: makes the rows of a packed parameter, [..., rows, columns], of those of its one
        source, which has the last two dimensions swapped: the same that `transform` makes, by
        moving rows alone; None where a packed source is made plain

    A parameter named `NAME.bias` becomes the bias in NAME's `Weight`. `left_out`, `towers` and
    `renames` of any parameter hold for the whole checkpoint.
    """

    shape: tuple[int, ...]
    roles: frozenset[Role] = frozenset((Role.RAW,))
    sources: tuple[tuple[str, ...], ...] = ()
    stacked: bool = False
    dtype: str | None = None
    compute: Callable[[ModelConfig, int], Tensor] | None = None
    parts: tuple[int, ...] = ()
    whole: str | None = None
    may_swap_whole: bool = False
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    towers: tuple[tuple[str, str], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()
    dummy: float | None = None
    source_shape: tuple[int, ...] | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    packed_rows: Callable[[Tensor], Tensor] | None = None


Attend = Callable[["Tensor", int], "Tensor"]
"""`attend(q, layer_index)`: attention of the step's queries over their rows' KV.

q: [tokens, heads, head_dim]; the result has `LayerInfo.out_dim` elements a head
"""


@frozen(kw_only=True)
class Model:
    """A family of models, as functions.

    config(hf): reads a parsed config.json; raises ValueError with a reason when it cannot be served
    params(config): declares the parameters by name
    forward(params, config, batch, attend, ops): hidden states [tokens, hidden]
    logits(params, config, hidden, ops): float32 scores [n, vocab] of `hidden` [n, hidden], which
        are what is sampled from; None for `Ops.lm_head`, which applies `ModelConfig.head`
    shard(config, shard): the part of the model that one rank computes; raises ValueError with a
        reason when it cannot be cut so; None for a family that cannot be cut. The loader compares
        the parameters of the part with those of the whole: where a part of `ParamSpec.parts` is
        shorter in a dimension, the rank gets its slice of that dimension, else all of it.
    draft_config(hf, config): `config` with the layers that guess further tokens, which checkpoints
        of the family may have, as the last `ModelConfig.draft_layers` ones; raises ValueError with
        a reason for a config.json without them. None for a family that computes none
    draft(params, config, hidden, batch, attend, ops): hidden states [tokens, hidden], whose scores
        guess the second token after each of the batch's positions. `hidden` [tokens, hidden] is
        what `forward`, or `draft` itself, gave there, and `batch.tokens` are those that follow.
        Writes what these layers keep; `forward` leaves them out
    check(params, config): looks at the loaded parameters before a step runs; raises ValueError with
        a reason for a model that would be served wrong; None for a family that looks at nothing
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    params: Callable[[ModelConfig], Mapping[str, ParamSpec]]
    forward: Callable[[Params, ModelConfig, Batch, Attend, Ops], Tensor]
    logits: Callable[[Params, ModelConfig, Tensor, Ops], Tensor] | None = None
    shard: Callable[[ModelConfig, Shard], ModelConfig] | None = None
    check: Callable[[Params, ModelConfig], None] | None = None
    draft_config: Callable[[Mapping[str, Any], ModelConfig], ModelConfig] | None = None
    draft: Callable[[Params, ModelConfig, Tensor, Batch, Attend, Ops], Tensor] | None = None


@frozen(kw_only=True)
class ModelSpec(PluginSpec):
    """A model family as its entry point returns it; `implementation` names a `Model`.

    The name of the entry point is the architecture. A family of `MineForCausalLM` serves a
    `MineModel` too, which has no head; beside a `vision_config` that is the model of
    `MineForConditionalGeneration`. With a class of options, `implementation` names
    a function that makes a `Model` out of them.
    """
