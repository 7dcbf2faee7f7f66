"""The coarse operations, made of fine ones that a set of operations may replace one by one."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from headstock.nn.delta_rule import (
    apply_delta_rule_,
    make_decay,
    normalize_gated,
    split_heads,
)
from headstock.nn.kv import divide_by_scales
from headstock.nn.rope import CosSin
from headstock.nn.short_conv import ConvInputs
from headstock.ops.latent_queries import make_latent_queries
from headstock.ops.mixture import run_beside_mlp, run_mixture
from headstock.ops.step_values import (
    find_cells,
    find_rotations,
    find_spans,
    scale_queries,
)
from headstock.spi import (
    Activation,
    Batch,
    ClampedGate,
    Experts,
    LayerConfig,
    ModelConfig,
    Ops,
    QkNorm,
    Sample,
    Sampling,
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
        """Each head multiplied by its own matrix.

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
        activation: Activation | ClampedGate,
        batch: Batch,
    ) -> Tensor:
        """The weighted sum of what each token's experts make of it, with the biases in `Weight`s.

        x, result: [tokens, hidden]    weights: [tokens, per_token]
        ids: [tokens, per_token], among the experts of this rank. With `Shard.by_expert` experts of
            other ranks have the id `Experts.held`, and add nothing
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
        normed = self._normalize(x, f"{prefix}attn_norm")
        if layer.latent is not None:
            assert layer.rope is not None, "the rope of the part that is turned"
            cos_sin = find_rotations(x, self.params, layer.rope, batch)
            queries = make_latent_queries(self, normed, cos_sin, layer, batch)
            return scale_queries(queries, config, x, batch)
        sizes = config.sizes_of(layer)
        heads, kv_heads, turned = sizes.heads, sizes.kv_heads, sizes.heads + sizes.kv_heads
        qkv = self.linear(normed, self.params[f"{prefix}qkv"], batch)
        qkv = qkv.view(-1, turned + kv_heads, sizes.head_dim)
        qk = unturned = qkv[:, :turned]
        if config.qk_norm is _HEAD:
            # Queries and keys in one norm: the weight has a row a head.
            unturned = self.head_norm(qk, self.params[f"{prefix}qk_norm"], config.norm_eps)
        elif config.qk_norm is _WHOLE:
            unturned = self._normalize_whole(qk, heads, prefix)
        if layer.rope is not None:
            # Turned in place, so that keys and values stay side by side and are stored by one
            # operation.
            found: CosSin | None = x.shared.get(("rope", layer.rope))
            if found is None:
                found = find_rotations(x, self.params, layer.rope, batch)
            self.rotate_(unturned, found, qk)
        elif unturned is not qk:
            qk.copy_(unturned)
        if config.value_norm:
            values, weight = qkv[:, turned:], self.params[f"{prefix}v_norm"]
            values.copy_(self.head_norm(values, weight, config.norm_eps))
        kv = qkv[:, heads:].view(-1, 2, kv_heads, sizes.head_dim)
        if layer.k_scale != 1 or layer.v_scale != 1:
            kv = divide_by_scales(kv, layer.k_scale, layer.v_scale)
        cells = x.shared.get(("cells", layer.group))
        self.store_kv_(
            batch.pools[layer.index], find_cells(x, layer, batch) if cells is None else cells, kv
        )
        return scale_queries(qkv[:, :heads], config, x, batch)

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
        attention = attention.flatten(1)
        if layer.has_gate:
            # The norm once more: a gate made with the queries would have to wait for attention.
            normed = self._normalize(x, f"{layer.prefix}attn_norm")
            gate = self.linear(normed, self.params[f"{layer.prefix}attn_gate"], batch)
            attention = attention * gate.sigmoid_()
        out = self.linear(attention, self.params[f"{layer.prefix}attn_out"], batch)
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

    def delta_rule(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's gated delta rule added.

        writes: x; the states of the batch's rows
        """
        delta, prefix, params = layer.delta, layer.prefix, self.params
        assert delta is not None
        normed = self._normalize(x, f"{prefix}attn_norm")
        mixed = self.linear(normed, params[f"{prefix}delta_in"], batch)
        gate = self.linear(normed, params[f"{prefix}delta_gate"], batch)
        beta, decay = self.linear(normed, params[f"{prefix}delta_gates"], batch).chunk(2, -1)
        state = batch.kv[layer.index].state
        inputs = find_conv_inputs(x, layer, delta.taps, batch)
        convolved = self.convolve_(mixed, params[f"{prefix}conv"], state["conv"], inputs)
        out = apply_delta_rule_(
            *split_heads(F.silu(convolved), delta),
            make_decay(
                decay, params[f"{prefix}delta_rate"].tensor, params[f"{prefix}delta_bias"].tensor
            ),
            beta.sigmoid().float(),
            state["delta"],
            inputs.pages,
            find_spans(x, batch),
            inputs.saved,
        )
        weight = params[f"{prefix}delta_norm"].tensor
        read = normalize_gated(out, gate.view(out.shape), weight, self.config.norm_eps)
        product = self.linear(read.flatten(1), params[f"{prefix}delta_out"], batch)
        return self._add(x, product, f"{prefix}attn_post_norm")

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's feed-forward part added.   writes: x"""
        prefix = layer.prefix
        normed = self._normalize(x, f"{prefix}mlp_norm")
        gate_up = self.linear(normed, self.params[f"{prefix}gate_up"], batch)
        inner = self.activate_and_mul(gate_up, self.config.activation)
        out = self.linear(inner, self.params[f"{prefix}down"], batch)
        self._add(x, out, f"{prefix}mlp_post_norm")
        return x if layer.scalar is None else self._scale(x, layer.scalar)

    def moe(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream with the layer's mixture of experts added.   writes: x"""
        assert layer.experts is not None
        prefix, is_beside = layer.prefix, layer.experts.beside_mlp
        if is_beside:
            out = run_beside_mlp(self, x.settle(), layer, batch)
        else:
            out = run_mixture(self, self._normalize(x, f"{prefix}mlp_norm"), layer, batch)
        self._add(x, out, f"{prefix}mlp_post_norm", is_whole=is_beside)
        return x if layer.scalar is None else self._scale(x, layer.scalar)

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """The normalized hidden states.   returns: [tokens, hidden]    writes: x"""
        return self.rms_norm(x.settle(), self.params["norm"], self.config.norm_eps)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Scores, scaled and bounded as `config.head` says.

        hidden: [n, hidden]    returns: [n, vocab] float32
        """
        scores = self._multiply_head(hidden)
        if self.config.shard.count > 1:
            scores = self.all_gather(scores)[:, : self.config.full_vocab]
        return self._finish_scores(scores)

    def score_shard(self, hidden: Tensor) -> Tensor:
        """`lm_head` of this rank's part of the vocabulary.

        hidden: [n, hidden]    returns: [n, config.vocab] float32, undefined where it is padded
        """
        return self._finish_scores(self._multiply_head(hidden))

    def sample_shard(self, logits: Tensor, sampling: Sampling) -> Sample:
        """`sample` where each rank has its part of the rows; all ranks return the same tokens.

        logits: [n, config.vocab] float32, which may be written
        sampling: for which `headstock.nn.vocab_shard.needs_whole_rows` does not hold
        """
        # A set that has no more than a sampler of whole rows is given these.
        return self.sample(self.all_gather(logits)[:, : self.config.full_vocab], sampling)

    def _multiply_head(self, hidden: Tensor) -> Tensor:
        """The product with the output matrix, in its type.   returns: [n, config.vocab]"""
        weight = self.params["embed" if self.config.tied_embeddings else "lm_head"]
        return self.linear(hidden, weight, None)

    def _finish_scores(self, product: Tensor) -> Tensor:
        """Scores in float32, scaled and bounded."""
        scores = product.to(torch.float32).contiguous()
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

    def _scale(self, x: Stream, name: str) -> Stream:
        """The stream times the parameter of that name.   writes: x"""
        x.settle().mul_(self.params[name].tensor)
        return x

    def _add(self, x: Stream, out: Tensor, post_norm: str, *, is_whole: bool = False) -> Stream:
        """The stream with what a part of a layer gives added.   writes: x

        is_whole: whether `out` is summed over the ranks
        """
        config = self.config
        if config.shard.count > 1 and not is_whole:
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
        """The tokens' embeddings; a shard holds some of them.   returns: [tokens, hidden]"""
        if self.config.shard.count == 1:
            return self.lookup(tokens, weight)
        ids = tokens - self.config.shard.index * self.config.vocab
        is_absent = (ids < 0) | (ids >= self.config.vocab)
        rows = self.lookup(ids.masked_fill(is_absent, 0), weight)
        return self.all_reduce(rows.masked_fill(is_absent[:, None], 0))

    def _normalize_whole(self, qk: Tensor, heads: int, prefix: str) -> Tensor:
        """The first `heads`, of queries, normalized together, and those of keys.

        qk, result: [tokens, heads and kv_heads, head_dim]
        """
        parts = zip((qk[:, :heads], qk[:, heads:]), "qk", strict=True)
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


def find_conv_inputs(x: Stream, layer: LayerConfig, taps: int, batch: Batch) -> ConvInputs:
    """Where the inputs of the step's tokens lie in layers of the group.   writes: x.shared"""
    inputs: ConvInputs | None = x.shared.get(("conv", layer.group, taps))
    if inputs is None:
        inputs = ConvInputs.of(batch, layer.group, taps)
        x.shared["conv", layer.group, taps] = inputs
    return inputs
