"""The coarse operations, made of fine ones that a set of operations may replace one by one."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from headstock.nn.kv import kv_cells
from headstock.nn.rope import CosSin
from headstock.nn.short_conv import ConvInputs
from headstock.ops.latent_queries import make_latent_queries
from headstock.spi import (
    Activation,
    Batch,
    Experts,
    LayerConfig,
    ModelConfig,
    Ops,
    Params,
    QkNorm,
    Shard,
    Stream,
    Weight,
)

# A member of an Enum takes as long to find as a small operation to run, so each is found once.
_HEAD, _WHOLE = QkNorm.HEAD, QkNorm.WHOLE


class FineTierOps(Ops):
    """The operations of a decoder, composed of finer ones that a subclass supplies.

    `TorchOps` defines what the finer ones mean. Compositions serve every variant. A subclass that
    replaces one says by `takes` where it serves; elsewhere the composition stays.
    """

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """No: nothing is fused here."""
        return False

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """`x` normalized over its last dimension, times the weight.

        A weight in float32 multiplies before a result in 16 bits is rounded.
        x, result: [tokens, n]    weight: [n], of role NORM
        """

    @abstractmethod
    def head_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        """Each head normalized by itself; else as `rms_norm`.

        x, result: [tokens, heads, head_dim]
        weight: [heads, head_dim], of role HEAD_NORM
        """

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        """`x` through a linear map.

        x: [tokens, in]
        weight: [out, in], of role LINEAR or HEAD
        batch: the step's, whose tokens are those of `x`; None for scores, whose rows are positions
        returns: [tokens, out]
        """

    @abstractmethod
    def activate_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """The activation of the first half, times the second half.

        gate_up: [tokens, 2 * n]
        returns: [tokens, n]
        """

    @abstractmethod
    def rotate_(self, x: Tensor, cos_sin: CosSin, out: Tensor) -> None:
        """Turn heads, or their first part, by their positions.

        x: [tokens, heads, head_dim]
        writes: out, of the same shape; it may be `x`
        """

    @abstractmethod
    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        """Put keys and values into cells of the pool.

        kv: [tokens, 2, kv_heads, head_dim]
        writes: pool
        """

    @abstractmethod
    def store_latent_(self, pool: Tensor, slots: Tensor, latent: Tensor) -> None:
        """Put latent vectors into slots of the pool.

        slots: [tokens] int64    latent: [tokens, dim]
        writes: pool
        """

    @abstractmethod
    def head_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """Each head through a linear map of its own.

        x: [tokens, heads, in]
        weight: [heads, out, in], of role HEAD_LINEAR
        returns: [tokens, heads, out]
        """

    @abstractmethod
    def convolve_(self, x: Tensor, weight: Weight, state: Tensor, inputs: ConvInputs) -> Tensor:
        """Each channel convolved over its row's latest tokens, plus the bias.

        x, result: [tokens, width]    weight: [taps, width], of role RAW
        writes: state [pages, taps - 1, width], at the rows' pages
        """

    @abstractmethod
    def route(self, scores: Tensor, experts: Experts, bias: Weight | None) -> tuple[Tensor, Tensor]:
        """The weights and numbers of each token's experts.

        scores: [tokens, experts]    bias: [experts] float32, of role RAW, if the experts have one
        returns: [tokens, per_token] in the dtype of `scores`, [tokens, per_token] int64
        """

    @abstractmethod
    def mix_experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Weight,
        down: Weight,
        activation: Activation,
        batch: Batch,
    ) -> Tensor:
        """The weighted sum of what each token's experts make of it.

        x, result: [tokens, hidden]    weights, ids: [tokens, per_token]
        """

    @abstractmethod
    def lookup(self, tokens: Tensor, weight: Weight) -> Tensor:
        """The tokens' embeddings.

        tokens: [tokens] int64
        weight: [vocab, hidden], of role EMBEDDING
        returns: [tokens, hidden]
        """

    def embed(self, batch: Batch) -> Stream:
        """The stream at the batch's tokens."""
        hidden = self._lookup_tokens(batch.tokens, self.params["embed"])
        if self.config.embedding_scale != 1:
            # Rounded as a number of the embeddings' type, which is how such models were trained.
            hidden.mul_(torch.tensor(self.config.embedding_scale, dtype=hidden.dtype).item())
        return Stream(hidden)

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """Queries of the layer.

        returns: [tokens, heads, head_dim]
        writes: x; batch.pools[layer.index]
        """
        config, prefix = self.config, layer.prefix
        turned = config.heads + config.kv_heads
        normed = self._normalize(x, f"{prefix}attn_norm")
        if layer.latent is not None:
            assert layer.rope is not None, "the rope of the part that is turned"
            cos_sin = _rotations(x, self.params, layer.rope, batch)
            return make_latent_queries(self, normed, cos_sin, layer, batch)
        qkv = self.linear(normed, self.params[f"{prefix}qkv"], batch)
        qkv = qkv.view(-1, turned + config.kv_heads, config.head_dim)
        qk = heads = qkv[:, :turned]
        if config.qk_norm is _HEAD:
            # Queries and keys in one norm: the weight has a row a head.
            heads = self.head_norm(qk, self.params[f"{prefix}qk_norm"], config.norm_eps)
        elif config.qk_norm is _WHOLE:
            heads = self._normalize_whole(qk, prefix)
        if layer.rope is not None:
            # Turned in place, so that keys and values stay side by side and are stored by one
            # operation.
            found: CosSin | None = x.shared.get(("rope", layer.rope))
            if found is None:
                found = _rotations(x, self.params, layer.rope, batch)
            self.rotate_(heads, found, qk)
        elif heads is not qk:
            qk.copy_(heads)
        kv = qkv[:, config.heads :].view(-1, 2, config.kv_heads, config.head_dim)
        cells = x.shared.get(("cells", layer.group))
        self.store_kv_(
            batch.pools[layer.index], _find_cells(x, layer, batch) if cells is None else cells, kv
        )
        return qkv[:, : config.heads]

    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """The stream with the projected attention added.

        attention: [tokens, heads, head_dim], or as wide as the layer's outputs are
        writes: x
        """
        if layer.latent is not None:
            attention = self.head_linear(attention, self.params[f"{layer.prefix}v_up"])
        out = self.linear(attention.flatten(1), self.params[f"{layer.prefix}attn_out"], batch)
        return self._add(x, out, f"{layer.prefix}attn_post_norm")

    def short_conv(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's gated convolution added.

        writes: x; the states of the batch's rows
        """
        assert layer.conv is not None
        prefix = layer.prefix
        normed = self._normalize(x, f"{prefix}attn_norm")
        projected = self.linear(normed, self.params[f"{prefix}conv_in"], batch)
        before, after, inner = projected.chunk(3, -1)
        state = batch.kv[layer.index].state["conv"]
        inputs = find_conv_inputs(x, layer, layer.conv.taps, batch)
        inner = self.convolve_(before * inner, self.params[f"{prefix}conv"], state, inputs)
        out = self.linear(inner.mul_(after), self.params[f"{prefix}conv_out"], batch)
        return self._add(x, out, f"{prefix}attn_post_norm")

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's feed-forward part added.   writes: x"""
        prefix = layer.prefix
        normed = self._normalize(x, f"{prefix}mlp_norm")
        gate_up = self.linear(normed, self.params[f"{prefix}gate_up"], batch)
        inner = self.activate_and_mul(gate_up, self.config.activation)
        out = self.linear(inner, self.params[f"{prefix}down"], batch)
        return self._add(x, out, f"{prefix}mlp_post_norm")

    def moe(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's mixture of experts added.   writes: x"""
        assert layer.experts is not None
        prefix, experts = layer.prefix, layer.experts
        normed = self._normalize(x, f"{prefix}mlp_norm")
        # The map's weights are in float32 then, too.
        routed = normed.float() if experts.wide_scores else normed
        scores = self.linear(routed, self.params[f"{prefix}router"], batch)
        weights, ids = self.route(scores, experts, self.params.get(f"{prefix}router_bias"))
        out = self.mix_experts(
            normed,
            weights.to(normed.dtype),
            ids,
            self.params[f"{prefix}experts_gate_up"],
            self.params[f"{prefix}experts_down"],
            self.config.activation,
            batch,
        )
        if experts.shared:
            out = out.add_(self._run_shared_expert(normed, layer, batch))
        return self._add(x, out, f"{prefix}mlp_post_norm")

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """The normalized hidden states.   returns: [tokens, hidden]    writes: x"""
        return self.rms_norm(x.settle(), self.params["norm"], self.config.norm_eps)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Scores, scaled and bounded as `config.head` says.

        hidden: [n, hidden]    returns: [n, vocab] float32
        """
        weight = self.params["embed" if self.config.tied_embeddings else "lm_head"]
        scores = self.linear(hidden, weight, None)
        if self.config.shard.count > 1:
            scores = self.all_gather(scores)[:, : self.config.full_vocab]
        scores = scores.to(torch.float32).contiguous()
        if self.config.head.scale != 1:
            scores.mul_(self.config.head.scale)
        if self.config.head.softcap:
            scores.div_(self.config.head.softcap).tanh_().mul_(self.config.head.softcap)
        return scores

    def _normalize(self, x: Stream, name: str) -> Tensor:
        """What a part of a layer computes on: the stream, normalized if a norm comes before.

        writes: x
        """
        # Composed operations leave nothing pending, and a call that finds nothing to do is felt.
        total = x.total if x.pending is None else x.settle()
        config = self.config
        return (
            self.rms_norm(total, self.params[name], config.norm_eps) if config.pre_norm else total
        )

    def _add(self, x: Stream, out: Tensor, post_norm: str) -> Stream:
        """The stream with what a part of a layer gives added.   writes: x"""
        config = self.config
        if config.shard.count > 1:
            out = self.all_reduce(out)
        if config.post_norm:
            out = self.rms_norm(out, self.params[post_norm], config.norm_eps)
        total = x.total if x.pending is None else x.settle()
        x.normed = None
        if config.residual_scale == 1:
            total.add_(out)
        else:
            total.add_(out, alpha=config.residual_scale)
        return x

    def _lookup_tokens(self, tokens: Tensor, weight: Weight) -> Tensor:
        """The tokens' embeddings, of which a shard holds some.   returns: [tokens, hidden]"""
        if self.config.shard.count == 1:
            return self.lookup(tokens, weight)
        ids = tokens - self.config.shard.index * self.config.vocab
        is_absent = (ids < 0) | (ids >= self.config.vocab)
        rows = self.lookup(ids.masked_fill(is_absent, 0), weight)
        return self.all_reduce(rows.masked_fill(is_absent[:, None], 0))

    def _normalize_whole(self, qk: Tensor, prefix: str) -> Tensor:
        """Queries normalized together, and keys.   qk, result: [tokens, heads, head_dim]"""
        parts = zip((qk[:, : self.config.heads], qk[:, self.config.heads :]), "qk", strict=True)
        return torch.cat(
            [
                self._normalize_parts(
                    part.flatten(1),
                    self.params[f"{prefix}{name}_norm"],
                    self.config.norm_eps,
                    self.config.shard,
                )
                for part, name in parts
            ],
            1,
        ).view(qk.shape)

    def _normalize_parts(self, x: Tensor, weight: Weight, eps: float, shard: Shard) -> Tensor:
        """`x` normalized together with what the other shards have of its rows.

        x, result: [tokens, n]    weight: [n], of role NORM
        """
        normed = self.rms_norm(x, weight, eps)
        if shard.count == 1:
            return normed
        # A set's norm knows the mean square of this part alone; that of all parts corrects it.
        mean = x.float().square().mean(-1, keepdim=True)
        whole_mean = self.all_reduce(mean.clone()) / shard.count
        return normed.mul_(((mean + eps) / (whole_mean + eps)).sqrt())

    def _run_shared_expert(self, x: Tensor, layer: LayerConfig, batch: Batch) -> Tensor:
        """What the expert that every token uses makes of `x` [tokens, hidden], times its gate."""
        prefix = layer.prefix
        gate_up = self.linear(x, self.params[f"{prefix}shared_gate_up"], batch)
        inner = self.activate_and_mul(gate_up, self.config.activation)
        out = self.linear(inner, self.params[f"{prefix}shared_down"], batch)
        assert layer.experts is not None
        if layer.experts.shared_gate:
            out = out * self.linear(x, self.params[f"{prefix}shared_gate"], batch).sigmoid()
        return out


# Worked out once a step, since all layers of a rope or a KV group use the same.
def _rotations(x: Stream, params: Params, rope: int, batch: Batch) -> CosSin:
    """The rotations of the step's tokens.   writes: x.shared"""
    cos_sin: CosSin | None = x.shared.get(("rope", rope))
    if cos_sin is None:
        table = params[f"rope.{rope}"].tensor
        cos_sin = CosSin.at_positions(table, batch.positions, x.total.dtype)
        x.shared["rope", rope] = cos_sin
    return cos_sin


def find_conv_inputs(x: Stream, layer: LayerConfig, taps: int, batch: Batch) -> ConvInputs:
    """Where the inputs of the step's tokens lie in layers of the group.   writes: x.shared"""
    inputs: ConvInputs | None = x.shared.get(("conv", layer.group, taps))
    if inputs is None:
        inputs = ConvInputs.of(batch, layer.group, taps)
        x.shared["conv", layer.group, taps] = inputs
    return inputs


def _find_cells(x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
    """Find where the step's keys and values go in pools of the layer's group.

    writes: x.shared
    """
    cells = kv_cells(batch.slots[layer.group], batch.pools[layer.index].shape[2])
    x.shared["cells", layer.group] = cells
    return cells
