"""Modules of headstock's operations that stand where transformers' had equal ones."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headstock.nn.rope import CosSin
from headstock.spi import Activation, Weight
from headstock_transformers.attention import PAGED, STEP, store_kv
from headstock_transformers.operations import OPERATIONS


class OpsLinear(nn.Linear):
    """A linear map by `FineTierOps.linear`."""

    held: Weight

    def __init__(self, width: int, outs: int, *, bias: bool) -> None:
        super().__init__(width, outs, bias=bias, device="meta")
        self.requires_grad_(False)
        self.hold()

    def hold(self) -> None:
        """Compute with the parameters that the module has now."""
        bias = None if self.bias is None else self.bias.detach()
        self.held = Weight(tensor=self.weight.detach(), bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b.   x: [..., in]    returns: [..., out]"""
        linear = OPERATIONS.get().linear
        if x.dim() == 2:
            return linear(x, self.held, None)
        return linear(x.reshape(-1, x.shape[-1]), self.held, None).view(*x.shape[:-1], -1)


class OpsNorm(nn.Module):
    """A norm by `FineTierOps.rms_norm`, or one of heads by `head_norm`.

    weight: [n], or [heads, head_dim]
    """

    held: Weight

    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        super().__init__()
        weight = torch.empty(shape, dtype=torch.float32, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self.hold()

    def hold(self) -> None:
        """Compute with the parameter that the module has now."""
        self.held = Weight(tensor=self.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalized over its last dimension, times the weight.   x, result: [..., n]"""
        rms_norm = OPERATIONS.get().rms_norm
        if x.dim() == 2:
            return rms_norm(x, self.held, self.eps)
        return rms_norm(x.reshape(-1, x.shape[-1]), self.held, self.eps).view(x.shape)


class GatedMlp(nn.Module):
    """A gated feed-forward part, whose gate and up are one product."""

    def __init__(self, gate_up: OpsLinear, down: OpsLinear, activation: Activation) -> None:
        super().__init__()
        self.gate_up_proj = gate_up
        self.down_proj = down
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """down(activation(gate(x)) * up(x)).   x, result: [..., hidden]"""
        operations = OPERATIONS.get()
        flat = x.reshape(-1, x.shape[-1])
        gate_up = operations.linear(flat, self.gate_up_proj.held, None)
        inner = operations.activate_and_mul(gate_up, self.activation)
        return operations.linear(inner, self.down_proj.held, None).view(*x.shape[:-1], -1)


@frozen(kw_only=True)
class AttentionForm:
    """What a layer does before attention, beside the products.

    norm: "head", "whole" or "" for none
    offset: what is added to a norm's weight
    has_rope: whether queries and keys are turned by halves, after the norm
    """

    heads: int
    kv_heads: int
    head_dim: int
    norm: str
    eps: float
    offset: float
    has_rope: bool

    @property
    def rows(self) -> tuple[int, int, int]:
        """The outputs of the products for queries, keys and values."""
        kv = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, kv, kv


class PagedAttention(nn.Module):
    """Attention whose queries, keys and values are one product, turned in place.

    config: of the module that was here, for the name of the attention function
    out: the name of the last map
    """

    def __init__(
        self,
        config: Any,
        layer: int,
        form: AttentionForm,
        qkv: OpsLinear,
        out: OpsLinear,
        out_name: str,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.form = form
        self.qkv_proj = qkv
        self.add_module(out_name, out)
        # Found without a look-up of its name; a list, since a module would be registered twice.
        self.last = [out]
        if form.norm == "head":
            self.qk_norm = OpsNorm((form.heads + form.kv_heads, form.head_dim), form.eps)
        elif form.norm == "whole":
            self.q_norm = OpsNorm((form.rows[0],), form.eps)
            self.k_norm = OpsNorm((form.rows[1],), form.eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """What attention adds to the stream.   hidden_states, first result: [1, tokens, hidden]"""
        heads, kv_heads = self.form.heads, self.form.kv_heads
        is_paged = self.config._attn_implementation == PAGED
        step = STEP.get() if is_paged else None
        batch = None if step is None else step.batch
        operations = OPERATIONS.get()
        qkv = operations.linear(hidden_states[0], self.qkv_proj.held, batch)
        qkv = qkv.view(-1, heads + 2 * kv_heads, self.form.head_dim)
        self._turn_(qkv[:, : heads + kv_heads], position_embeddings)
        if step is not None:
            store_kv(step, self.layer_idx, qkv[:, heads:].view(-1, 2, kv_heads, self.form.head_dim))
            attention = step.attend(qkv[:, :heads], self.layer_idx)
        else:
            parts = torch.split(qkv.transpose(0, 1)[None], [heads, kv_heads, kv_heads], 1)
            function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            attention = function(self, *parts, attention_mask)[0][0]
        return operations.linear(attention.flatten(1), self.last[0].held, batch)[None], None

    def _turn_(self, qk: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> None:
        """Normalize queries and keys and turn them.

        writes: qk [tokens, heads and kv_heads, head_dim]
        """
        unturned = qk
        if self.form.norm == "head":
            norm = self.qk_norm
            unturned = OPERATIONS.get().head_norm(qk, norm.held, norm.eps)
        elif self.form.norm == "whole":
            queries, keys = qk[:, : self.form.heads], qk[:, self.form.heads :]
            parts = (self.q_norm(queries.flatten(1)), self.k_norm(keys.flatten(1)))
            unturned = torch.cat(parts, 1).view(qk.shape)
        if self.form.has_rope:
            assert position_embeddings is not None
            OPERATIONS.get().rotate_(unturned, find_rotations(position_embeddings, qk.dtype), qk)
        elif unturned is not qk:
            qk.copy_(unturned)


def find_rotations(embeddings: tuple[Tensor, Tensor], dtype: torch.dtype) -> CosSin:
    """The rotations of the step's tokens, made once for all layers that have the same.

    embeddings: cosines and sines, [1, tokens, dim], of any numbers
    """
    step = STEP.get(None)
    shared = {} if step is None else step.shared
    # With the embeddings themselves: while they are kept, no other object has their identity.
    found = shared.get(id(embeddings[0]))
    if found is not None and found[0] is embeddings[0] and found[1] is embeddings[1]:
        rotations: CosSin = found[2]
        return rotations
    cos, sin = (each[0].to(dtype)[:, None] for each in embeddings)
    # Rotation by halves takes the second half from the first with its sign turned.
    first, second = sin.chunk(2, -1)
    rotations = CosSin(cos, torch.cat((-first, second), -1))
    shared[id(embeddings[0])] = (*embeddings, rotations)
    return rotations
