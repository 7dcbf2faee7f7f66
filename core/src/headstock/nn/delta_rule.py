"""The gated delta rule: attention whose memory is one matrix a head, however long a sequence is.

Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

from headstock.nn.delta_spans import TokenSpans
from headstock.nn.saved_states import SavedStates
from headstock.spi import DeltaRule

SMALLEST_NORM = 1e-6


@frozen(eq=False)
class DeltaTokens:
    """What tokens ask of memories and write to them, in float32.

    q, k: [tokens, key_heads, key_dim], of length 1, and queries scaled
    v: [tokens, value_heads, value_dim]    decay, beta: [tokens, value_heads]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def take(self, which: Tensor) -> DeltaTokens:
        """Copies of some tokens.   which: [n] int64"""
        return DeltaTokens(
            self.q[which], self.k[which], self.v[which], self.decay[which], self.beta[which]
        )


def apply_delta_rule_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    pages: Tensor,
    spans: TokenSpans,
    saved: SavedStates | None = None,
) -> Tensor:
    """What a step's queries read from the memories of their sequences, after each token's update.

    In float32. Chunks are computed by themselves, and all other tokens one by one, so no neighbour
    changes a bit, nor does a cut at a multiple of `CHUNK`. Other cuts change what is a chunk, which
    is within rounding. A row that begins does not read what its page holds.

    q, k: [tokens, key_heads, key_dim]    v, result: [tokens, value_heads, value_dim]
    decay: [tokens, value_heads] float32, of which the memory is multiplied by the exponential
    beta: [tokens, value_heads] float32, how much of a value is written
    pages: [rows] int64    saved: at multiples of a chunk, or in rows with fewer tokens
    writes: state [pages, value_heads, key_dim, value_dim] float32, at the rows' pages and where
        states are saved
    """
    q, k = _normalize(q) * q.shape[-1] ** -0.5, _normalize(k)
    tokens = DeltaTokens(q, k, v.float(), decay, beta)
    # By `where` and not a product with 0: what another sequence left behind may be NaN.
    memory = torch.where(spans.is_first[:, None, None, None], 0, state[pages])
    if spans.is_decode:
        out = _learn_tokens_(memory, tokens)
        state[pages] = memory
        return out.to(v.dtype)
    # What is computed for nobody goes to places of its own, the last ones.
    memory = torch.cat((memory, memory.new_zeros(1, *memory.shape[1:])))
    out = tokens.v.new_zeros(len(v) + 1, *v.shape[1:])
    for learn, updates in (
        (_learn_tokens_, spans.heads),
        (_learn_chunk_, spans.chunks),
        (_learn_tokens_, spans.tails),
    ):
        for update in updates:
            # A copy, whose address is aligned whatever the row is: products may depend on that.
            own = memory[update.rows]
            out[update.targets] = learn(own, tokens.take(update.sources))
            memory[update.rows] = own
            if saved is not None:
                # Of a chunk, at its end. Page 0 keeps what it has.
                to = saved.by_token[update.targets[-len(own) :]]
                state[to] = torch.where((to > 0)[:, None, None, None], own, state[0])
    state[pages] = memory[:-1]
    return out[:-1].to(v.dtype)


def split_heads(x: Tensor, delta: DeltaRule) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, by head.   x: [tokens, channels]"""
    keys = delta.key_heads * delta.key_dim
    shape = (len(x), delta.key_heads, delta.key_dim)
    q, k, v = x[:, :keys], x[:, keys : 2 * keys], x[:, 2 * keys :]
    return q.reshape(shape), k.reshape(shape), v.reshape(len(x), -1, delta.value_dim)


def _learn_tokens_(memory: Tensor, tokens: DeltaTokens) -> Tensor:
    """What queries read from memories that forget, and then learn one token each.

    result: [tokens, heads, value_dim]
    writes: memory [tokens, heads, key_dim, value_dim]
    """
    repeats = tokens.v.shape[1] // tokens.k.shape[1]
    q, k = (each.repeat_interleave(repeats, 1)[..., None] for each in (tokens.q, tokens.k))
    memory.mul_(tokens.decay.exp()[..., None, None])
    known = (memory * k).sum(-2)
    learned = (tokens.v - known) * tokens.beta[..., None]
    memory.add_(k * learned[..., None, :])
    read: Tensor = (memory * q).sum(-2)
    return read


def _learn_chunk_(memory: Tensor, tokens: DeltaTokens) -> Tensor:
    """The same for successive tokens of one row, whose updates are solved for together.

    With G the sum of decays up to a token, its update u is the solution of
    u_i = beta_i (v_i - exp(G_i) k_i S - sum over j < i of exp(G_i - G_j) (k_i k_j) u_j).
    Every product has the same shape in any step, so that its bits are the same.

    result: [tokens, heads, value_dim]
    writes: memory [1, heads, key_dim, value_dim]
    """
    repeats, size = tokens.v.shape[1] // tokens.k.shape[1], len(tokens.v)
    k, v, beta = tokens.k.transpose(0, 1), tokens.v.transpose(0, 1), tokens.beta.t()[..., None]
    # Queries and keys are multiplied by the same: one product each instead of two.
    both = torch.cat((tokens.q.transpose(0, 1), k), 1)
    alike = (both @ k.mT).repeat_interleave(repeats, 0)
    total = tokens.decay.t().cumsum(-1)
    # Masked before the exponential, which would overflow for tokens that come later.
    is_later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    kept = (total[..., None] - total[:, None]).masked_fill(is_later, -torch.inf).exp()
    share = total.exp()[..., None]
    held = both.repeat_interleave(repeats, 0) @ memory[0]
    learned = torch.linalg.solve_triangular(
        alike[:, size:] * kept * beta,
        (v - held[:, size:] * share) * beta,
        upper=False,
        unitriangular=True,
    )
    read = torch.baddbmm(held[:, :size] * share, alike[:, :size] * kept, learned)
    # What is left of each update at the end of the chunk.
    left = learned * kept[:, -1, :, None]
    memory.mul_(share[:, -1:]).add_(k.repeat_interleave(repeats, 0).mT @ left)
    return read.transpose(0, 1)


def _normalize(x: Tensor) -> Tensor:
    """Vectors of length 1, in float32."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + SMALLEST_NORM)


def make_decay(a: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """The logarithm of what memories keep.

    a: [tokens, value_heads]    rate, bias: [value_heads] float32    returns: as `a`, float32
    """
    return -rate * F.softplus(a.float() + bias)


def normalize_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each head's norm, times the gate's silu.   x, gate: [tokens, heads, dim]   weight: [dim]"""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype) * F.silu(gate.float())).to(x.dtype)
