"""The operations of a decoder. `headstock.ops.fine_tier` composes them of smaller ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from attrs.validators import ge, instance_of, lt

from headstock.spi.environment import DeviceRange
from headstock.spi.executor import ALONE, Collectives
from headstock.spi.kv import LayoutKind
from headstock.spi.plugin import PluginSpec
from headstock.spi.weight import WeightFormat, WeightKind

if TYPE_CHECKING:
    from torch import Tensor

    from headstock.spi.batch import Batch, Sample, Sampling
    from headstock.spi.environment import DeviceEnv
    from headstock.spi.model import ParamSpec
    from headstock.spi.model_config import LayerConfig, ModelConfig
    from headstock.spi.part_query import PartQuery
    from headstock.spi.weight import Params, Weight


LAYER_OPERATIONS = ("qkv_rope_store", "attn_out", "short_conv", "delta_rule", "mlp", "moe")
OPERATIONS = ("embed", *LAYER_OPERATIONS, "final_norm", "lm_head", "lm_head_sample")
"""The operations that `Ops.takes` is asked about: those of a layer, and all in a step's order."""


@define(eq=False)
class Stream:
    """The residual stream between two operations: `total + pending`.

    Operations may write to it and hand it on, so a model keeps no earlier one.

    total: [tokens, hidden]
    pending: [tokens, hidden], the last term, which the next operation adds; None when it is added.
        Or [parts, tokens, hidden] float32, whose sum over the parts, rounded, is the term
    normed: [tokens, hidden], the first norm of the total if `embed` made it; only while nothing
        has been added
    shared: what operations work out once in a step and use in every layer, by a key of their own
    sum_over: the ranks over which the pending term is still to be summed; `ALONE` if it is whole
    """

    # A term may wait, so that one kernel adds it and normalizes the sum. The record is core's, so
    # that fused and composed operations, of which one waits and the other adds, meet in a forward.
    total: Tensor
    pending: Tensor | None = None
    normed: Tensor | None = None
    shared: dict[Hashable, Any] = field(factory=dict)
    sum_over: Collectives = ALONE

    def copy_total(self) -> Tensor:
        """The whole stream, [tokens, hidden], a tensor of its own."""
        return Stream(self.total.clone(), self.pending, sum_over=self.sum_over).settle()

    def settle(self) -> Tensor:
        """The whole stream, [tokens, hidden].   writes: self and its total; nothing pends then"""
        if self.pending is not None:
            term = self.pending
            if term.dim() > self.total.dim():
                term = term.sum(0).to(self.total.dtype)
            self.total.add_(self.sum_over.all_reduce(term))
            self.pending, self.sum_over = None, ALONE
        self.normed = None
        return self.total


@frozen(kw_only=True)
class OpsCapabilities:
    """Where the operations run, on which weight dtypes (torch names), and which pages they write.

    layouts: of the KV groups of a model
    weight_loss: how far results of a layer may be from torch's because `prepare` keeps weights in
        fewer bits, as a share of the largest number; checks of the set allow so much more
    formats: the packed numbers that products may take; `Ops.takes_format` says of which parameters
    """

    devices: tuple[DeviceRange, ...]
    dtypes: frozenset[str]
    layouts: frozenset[LayoutKind]
    weight_loss: float = field(default=0.0, validator=[ge(0), lt(1)])
    formats: frozenset[WeightKind] = frozenset()


@frozen(kw_only=True)
class OpsSpec(PluginSpec):
    """A set of operations as its entry point returns it; `implementation` names an `Ops`."""

    capabilities: OpsCapabilities = field(validator=instance_of(OpsCapabilities))


class Ops(ABC):
    """The operations of a decoder. `headstock.ops.torch_ops.TorchOps` defines what they mean.

    They find parameters in `self.params`, by name. After a layer's prefix: attn_norm, qkv, qk_norm
    (one row a head) or q_norm and k_norm (of all heads), v_norm, attn_out, attn_post_norm, latent,
    q_latent_norm, kv_latent_norm, q_up, k_up, v_up, attn_gate, conv_in, conv, conv_out, delta_in,
    delta_gate, delta_gates, delta_bias, delta_rate, delta_norm, delta_out, mlp_norm, gate_up, down,
    mlp_post_norm, router, router_bias, experts_gate_up, experts_down, shared_gate, shared_gate_up,
    shared_down, expert_scales, router_norm, dense_post_norm, experts_norm,
    experts_post_norm, scalar. Outside layers: embed, norm, lm_head, and rope.0, rope.1, ... for
    each of `ModelConfig.ropes`.
    """

    params: Params
    config: ModelConfig
    collectives: Collectives = ALONE

    def configure(self, query: PartQuery, env: DeviceEnv) -> None:
        """Learn what will be computed, and where; called once, before `takes`.

        raises: ValueError with the reason when this set cannot serve it
        """
        return

    def tune(self, query: PartQuery, env: DeviceEnv) -> Mapping[str, str]:
        """Measure this set's own options on the device: those that are best there, by field.

        `headstock tune` calls it after `configure`, with no engine on the device. A value is text,
        as `--opt NAME.FIELD=VALUE` has it. An engine takes the options from then on where it is
        faster with them than without, and a user's own `--opt` comes first.
        """
        return {}

    @abstractmethod
    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """Whether this set's own `operation` (one of `OPERATIONS`) serves the layer.

        Core asks once for each operation and layer, before weights load; layer is None outside
        layers. Where the answer is no, the fine operations of `FineTierOps` do the work.
        `headstock.spi.find_variants` says what the operation must do beyond a plain decoder. A set
        that compares them with those it knows stays right when a model brings others.
        """

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        """Whether `prepare` takes the parameter packed so; loading makes it plain otherwise.

        Core asks for what a checkpoint stores, and for what `--quant` makes of a plain parameter,
        of numbers in `OpsCapabilities.formats`. Columns of groups are never in another order. Of
        experts numbers, scales and zeros are stacked alike.
        """
        return False

    # BLAS lays a plain weight out for its kernels anew in every product, though inference uses the
    # same one in every step (docs/decisions/0007-onednn-ops.md).
    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        """The parameter as these operations need it (packed, transposed); called once, at load.

        `spec.roles` says which operations will use it: prepare a weight for all of them.
        """
        return weight

    def count_kernel_bytes(self, params: Params, max_tokens: int) -> int:
        """The maximum bytes of what is compiled while steps of up to `max_tokens` tokens run.

        Where memory cannot be measured, as on a CPU, the memory plan keeps this much free.
        """
        return 0

    def bind(self, params: Params, config: ModelConfig, collectives: Collectives = ALONE) -> None:
        """Learn the parameters that the operations use; called once, when they are prepared.

        collectives: of the ranks, where `config` is a shard of the model
        writes: self.params, self.config, self.collectives
        """
        self.params, self.config, self.collectives = params, config, collectives

    @abstractmethod
    def embed(self, batch: Batch) -> Stream:
        """The stream at the batch's tokens."""

    @abstractmethod
    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """Norm, qkv projection, optional q- and k-norm, rope; keys and values go to the pool.

        returns: [tokens, heads, head_dim], each token's part contiguous
        writes: keys and values to batch.pools[layer.index] at batch.slots[layer.group]
        """

    @abstractmethod
    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """The stream with the projected attention added.   attention: [tokens, heads, head_dim]"""

    def short_conv(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's gated convolution added (`layer.conv`).

        Sets without it serve no model that asks for it.

        writes: the states of the batch's rows, in batch.kv[layer.index] at
            batch.state_pages[layer.group], and behind batch.saved_tokens at batch.saved_pages
        """
        raise NotImplementedError(f"{type(self).__name__} has no short_conv")

    def delta_rule(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's gated delta rule added (`layer.delta`).

        Sets without it serve no model that asks for it. A set's own launches as many kernels for a
        long prompt as for a short one: where sets take it, prompts are captured in graphs.

        writes: the states of the batch's rows, as `short_conv`
        """
        raise NotImplementedError(f"{type(self).__name__} has no delta_rule")

    @abstractmethod
    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's feed-forward part added (norm, gate-up, activation, down)."""

    @abstractmethod
    def moe(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's mixture of experts added."""

    @abstractmethod
    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """The normalized hidden states.   returns: [tokens, hidden]"""

    @abstractmethod
    def lm_head(self, hidden: Tensor) -> Tensor:
        """Scores, scaled and bounded as `config.head` says.

        hidden: [n, hidden]    returns: [n, vocab] float32
        """

    @abstractmethod
    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        """One token for each row of `logits` [n, vocab] float32, which may be written."""

    # One call, so that operations can sample without a copy of the scores in float32.
    def lm_head_sample(self, hidden: Tensor, sampling: Sampling) -> Sample:
        """Tokens sampled from the scores of `hidden` [n, hidden]."""
        return self.sample(self.lm_head(hidden), sampling)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over ranks (itself on one rank)."""
        return self.collectives.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """`x` of all ranks, joined on the last dimension (itself on one rank)."""
        return self.collectives.all_gather(x)
