"""Plugins of a toy model for the real engine: its next token is a hash of the whole history, exact
in float32.

The KV pool holds tokens and positions in place of keys and values. "Attention" reads a row's
context back through its page table, raises when what it finds is not the row's own, and gives the
hash. So a wrong page, slot, table or token shows as a failed step or a wrong token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.decoder import forward
from headstock.nn.sampler import sample
from headstock.scheduler.limits import MAX_DRAFTS
from headstock.spi import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    AttentionSpec,
    AttentionStep,
    Batch,
    DeviceRange,
    Feature,
    FullKV,
    GraphSupport,
    IntSet,
    KVGroup,
    LayerConfig,
    LayerInfo,
    LayoutKind,
    Model,
    ModelConfig,
    ModelSpec,
    Ops,
    OpsCapabilities,
    OpsSpec,
    ParamSpec,
    Phase,
    Planning,
    Rope,
    Sample,
    Sampling,
    ShortConv,
    SpiRange,
    Stream,
)
from headstock_conformance.scheduler.toy_device import PRIME, VOCAB, hash_prefixes

CPU = (DeviceRange("cpu"),)
ENTRY_POINTS = """[headstock.attention]
toy = toy_plugins:attention
toy-planned = toy_plugins:planned_attention
toy-uniform = toy_plugins:uniform_attention
toy-sharing = toy_plugins:sharing_attention
[headstock.runner]
rerun = rerun:spec
[headstock.ops]
toy = toy_plugins:ops
lifted = toy_lift:ops
[headstock.proposer]
guess = toy_proposer:spec
[headstock.logits]
shift = toy_processor:shift_spec
sharpen = toy_processor:sharpen_spec
lift = toy_lift:spec
[headstock.grammar]
toy-rules = toy_grammar:spec
[headstock.model]
ToyForCausalLM = toy_plugins:model
"""


def install(folder: Path, window: int | None = None, *, state: bool = False) -> Path:
    """Make `folder`, which is to be on `sys.path`, a distribution with these plugins; a checkpoint
    of the toy model, with a window and with a state if asked for.
    """
    info = folder / "headstock_toy-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: headstock-toy\nVersion: 0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    checkpoint = folder / f"toy-{window}-{state}"
    checkpoint.mkdir(exist_ok=True)
    config = {"architectures": ["ToyForCausalLM"], "window": window, "state": state}
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return checkpoint


def attention() -> AttentionSpec:
    """The backend `toy`."""
    return AttentionSpec(
        name="toy",
        spi=SpiRange(0, 3),
        summary="hashes a row's context",
        implementation="toy_plugins:ToyAttention",
        capabilities=AttentionCapabilities(
            phases=frozenset(Phase),
            devices=CPU,
            dtypes=frozenset({("float32",) * 3}),
            layouts=frozenset({LayoutKind.FULL}),
            head_dims=IntSet.of(2),
            gqa_ratios=IntSet.of(1),
            page_sizes=IntSet.all(),
            mixed_groups=True,
            paged=True,
            contiguous=True,
            graph=GraphSupport.ALWAYS,
            planning=Planning.NONE,
            features=frozenset({Feature.SLIDING_WINDOW}),
        ),
    )


def planned_attention() -> AttentionSpec:
    """The backend `toy-planned`: `toy`, planned on the host before each replay."""
    spec = attention()
    narrow = evolve(spec.capabilities, planning=Planning.PER_STEP, graph=GraphSupport.DECODE)
    return evolve(spec, name="toy-planned", capabilities=narrow)


def uniform_attention() -> AttentionSpec:
    """The backend `toy-uniform`: `toy`, whose graphs have rows of one length alone."""
    spec = attention()
    narrow = evolve(spec.capabilities, graph=GraphSupport.UNIFORM)
    return evolve(spec, name="toy-uniform", capabilities=narrow)


def sharing_attention() -> AttentionSpec:
    """The backend `toy-sharing`: `toy`, which reads shared pages from its rows' group."""
    spec = attention()
    features = spec.capabilities.features | {Feature.SHARED_PREFIX}
    return evolve(
        spec,
        name="toy-sharing",
        spi=SpiRange(0, 3),
        implementation="toy_plugins:SharingToyAttention",
        capabilities=evolve(spec.capabilities, features=features),
    )


def ops() -> OpsSpec:
    """The operations `toy`."""
    return OpsSpec(
        name="toy",
        spi=SpiRange(0, 3),
        summary="stores tokens and positions",
        implementation="toy_plugins:ToyOps",
        capabilities=OpsCapabilities(
            devices=CPU,
            dtypes=frozenset({"float32"}),
            layouts=frozenset({LayoutKind.FULL, LayoutKind.STATE}),
        ),
    )


def model() -> ModelSpec:
    """The family of the toy model."""
    return ModelSpec(
        name="ToyForCausalLM",
        spi=SpiRange(0, 3),
        summary="a hash",
        implementation="toy_plugins:TOY",
    )


def config(hf: Mapping[str, Any]) -> ModelConfig:
    """One layer that sees everything, with a `window` another that sees the latest tokens, and with
    a `state` another that keeps the hash of all tokens and their number.
    """
    windows = (None,) if hf.get("window") is None else (None, int(hf["window"]))
    conv, last = ShortConv(taps=2, width=2), len(windows)
    state = LayerConfig(index=last, prefix="", group=last, scale=1.0, conv=conv)
    kept = KVGroup(layers=(last,), layout=conv.layout)
    return ModelConfig(
        architecture="ToyForCausalLM",
        vocab=VOCAB,
        hidden=1,
        heads=1,
        kv_heads=1,
        head_dim=2,
        intermediate=1,
        norm_eps=1e-6,
        max_position=2048,
        ropes=(Rope(theta=1.0, dim=2),),
        layers=tuple(
            LayerConfig(index=i, prefix="", group=i, scale=1.0, window=w)
            for i, w in enumerate(windows)
        )
        + ((state,) if hf.get("state") else ()),
        kv_groups=tuple(
            KVGroup(layers=(i,), layout=FullKV(kv_heads=1, k_dim=2, v_dim=2), window=w)
            for i, w in enumerate(windows)
        )
        + ((kept,) if hf.get("state") else ()),
    )


def params(config: ModelConfig) -> Mapping[str, ParamSpec]:
    """One unused number: an engine needs some weights."""
    return {"nothing": ParamSpec(shape=(1,), sources=(("nothing",),), dummy=0.0)}


TOY = Model(config=config, params=params, forward=forward)


class ToyOps(Ops):
    """A key is (token, position), a value (position, token); the stream is the hash."""

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """Yes: there is nothing to compose them of."""
        return True

    def embed(self, batch: Batch) -> Stream:
        """Nothing yet."""
        return Stream(torch.zeros((len(batch.tokens), 1)))

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """The position as query.   returns: [tokens, 1, 2]    writes: batch.pools[layer.index]"""
        pool, slots = batch.pools[layer.index], batch.slots[layer.group]
        size = pool.shape[2]
        cell = torch.stack((batch.tokens, batch.positions), -1).float()
        # whoever is not padding and has its first token there will not find it again
        padding = batch.positions == 0
        # Rows that verify drafts may be padded behind these; attention finds others out.
        verifies = 1 < batch.max_query_len <= MAX_DRAFTS + 1 and batch.logit_indices is None
        if not verifies:
            assert ((slots >= size) | padding).all(), "a token is written to the dummy page"
        pool[slots // size, 0, slots % size, 0] = cell
        pool[slots // size, 1, slots % size, 0] = cell.flip(-1)
        return cell.flip(-1)[:, None]

    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """The stream with the layer's hash added (a window layer's is 0)."""
        return Stream(x.total + attention[:, 0, :1])

    def short_conv(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The mean of the stream and the hashes that states give, which are the same if all is
        right. A row that was NaN leaves NaN.

        writes: the states of the batch's rows
        """
        state, pages = batch.kv[layer.index].state["conv"], batch.state_pages[layer.group]
        assert pages is not None
        found = torch.zeros_like(x.total)
        ends = batch.query_start.tolist()
        drafts: dict[int, int] = {}
        if batch.saved_tokens is not None:
            saved_pages = batch.saved_pages[layer.group]
            assert saved_pages is not None
            pairs = zip(batch.saved_tokens.tolist(), saved_pages.tolist(), strict=True)
            drafts = {token: page for token, page in pairs if page}
        for start, page, first, last in zip(
            batch.starts.tolist(), pages.tolist(), ends, ends[1:], strict=False
        ):
            assert page or not start, "a row that pads a batch begins"
            total, count = state[page, 0].tolist() if start else (0.0, 0.0)
            for at in range(first, last):
                # Not the row's own, or not up to date: a hash that is not right.
                total = (total * 31 + int(batch.tokens[at]) + 7) % PRIME if count == start else 0.5
                found[at] = total % VOCAB
                if at in drafts:
                    state[drafts[at], 0] = torch.tensor((total, start + at + 1.0 - first))
            # Rows that pad a batch attend to nothing that makes sense.
            is_sound = not page or bool(x.total[first:last].isfinite().all())
            state[page, 0, 0] = total if is_sound else np.nan
            state[page, 0, 1] = start + last - first
        return Stream((x.total + found) / 2)

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """The stream as it is."""
        return x

    moe = mlp

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """The stream as it is."""
        return x.total

    def lm_head(self, hidden: Tensor) -> Tensor:
        """0 for the hash, less for each token after it.   hidden: [n, 1]    returns: [n, vocab]"""
        return -((torch.arange(VOCAB) - hidden) % VOCAB)

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        """As every other model samples."""
        return sample(logits, sampling)


class ToyAttention(AttentionBackend):
    """Reads contexts back and hashes them."""

    def __init__(self, context: AttentionContext) -> None:
        self.pools = context.pools
        self.page_size = context.page_size

    def plan(self, step: AttentionStep) -> AttentionStep:
        """The step as it is."""
        return step

    def forward(
        self,
        q: Tensor,
        layer: LayerInfo,
        plan: AttentionStep,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Write the hash of each query's history, and 0 in a window layer.

        q: [tokens, 1, 2]
        writes: out
        """
        out.zero_()
        lens, queries = (
            plan.host_context_lens.astype(np.int64),
            plan.host_query_lens.astype(np.int64),
        )
        table = self.table(layer, plan).numpy()
        check_tails(table, lens, self.page_size)
        tokens = self.contexts(layer, table, lens, queries)
        if layer.window is not None:
            # Its pages are shared apart from the full layer's, and must be of the same tokens.
            whole = self.table(self.full_layer, plan).numpy()
            wanted = self.contexts(self.full_layer, whole, lens, queries)
            assert ((tokens == 0) | (tokens == wanted)).all(), "a window has another row's tokens"
            return
        self.full_layer = layer
        ends = np.cumsum(queries)
        query_positions = q[:, 0, 0].numpy()
        for row, (end, count, length) in enumerate(
            zip(ends.tolist(), queries.tolist(), lens.tolist(), strict=True)
        ):
            assert query_positions[end - 1] == length - 1, (
                f"row {row} asks for position {query_positions[end - 1]} of {length}"
            )
            out[end - count : end, 0, 0] = torch.from_numpy(hashes(tokens[row, :length], count))
            # Queries that see the dummy page: a row that is padded behind its drafts drops
            # them, and any other fails.
            if count > 1:
                seen = np.count_nonzero(table[row]) * self.page_size
                out[max(end - length + seen, end - count) : end] = torch.nan

    def table(self, layer: LayerInfo, plan: AttentionStep) -> Tensor:
        """The page table of the layer's rows."""
        return plan.page_tables[layer.group]

    def contexts(
        self, layer: LayerInfo, table: np.ndarray, lens: np.ndarray, queries: np.ndarray
    ) -> np.ndarray:
        """Each row's tokens as the pool has them.

        returns: [rows, longest] int64, of no meaning where unseen
        """
        width = -(-int(lens.max(initial=0)) // self.page_size)
        # [rows, pages, 2, size, 2]
        found = self.pools[layer.index].numpy()[table[:, :width], ..., 0, :]
        keys, values = (found[:, :, at].reshape(len(table), -1, 2) for at in range(2))
        positions = np.arange(keys.shape[1])
        seen = positions < lens[:, None]
        if layer.window is not None:
            seen &= positions > (lens - queries - layer.window)[:, None]
        good = (keys == values[..., ::-1]).all(-1) & (keys[..., 1] == positions)
        # Several queries a row: what those see of the dummy page shows in their hashes.
        has_more = np.logical_or.accumulate(table[:, ::-1] != 0, axis=1)[:, ::-1]
        is_dummy = ~has_more[:, :width].repeat(self.page_size, 1) & (queries > 1)[:, None]
        wrong = np.argwhere(seen & ~good & ~is_dummy)
        assert not len(wrong), (
            f"row {wrong[0][0]} reads at position {wrong[0][1]} what is not its own"
        )
        return np.where(seen, keys[..., 0], 0).astype(np.int64)

    def graph_init(self, buckets: Sequence[int], max_seq_len: int) -> None:
        """Note how wide page tables may become."""
        self.columns = -(-max_seq_len // self.page_size)

    def graph_plan(self, bucket: int, step: AttentionStep) -> AttentionStep:
        """A step of `bucket` rows whose tensors are written in place; what the host knows of
        lengths are they.
        """
        lens = torch.ones(bucket, dtype=torch.int32)
        plan = evolve(
            step,
            context_lens=lens,
            page_tables=tuple(
                table.new_zeros((bucket, self.columns)) for table in step.page_tables
            ),
            host_query_lens=np.ones(bucket, np.int32),
            host_context_lens=lens.numpy(),
        )
        self.graph_update(plan, step)
        return plan

    def capture_plan(self, step: AttentionStep) -> AttentionStep:
        """The step with the lengths that its tensors hold now, without the rows that pad it."""
        lens = step.query_start.diff()
        assert (lens <= torch.from_numpy(step.host_query_lens)).all()
        assert (step.context_lens <= torch.from_numpy(step.host_context_lens)).all()
        used = lens > 0
        return evolve(
            step,
            context_lens=step.context_lens[used],
            page_tables=tuple(table[used] for table in step.page_tables),
            host_query_lens=lens[used].numpy(),
            host_context_lens=step.context_lens[used].numpy(),
        )

    def graph_update(self, plan: AttentionStep, step: AttentionStep) -> None:
        """Write the step to the plan; rows that it lacks have one token in the dummy page."""
        count = step.num_rows
        plan.context_lens.fill_(1)[:count] = step.context_lens
        for static, table in zip(plan.page_tables, step.page_tables, strict=True):
            static.zero_()[:count, : table.shape[1]] = table

    def close(self) -> None:
        """Nothing is held."""


class SharingToyAttention(ToyAttention):
    """Puts page tables together again out of the two parts of a step."""

    min_shared_tokens = 1

    def capture_plan(self, step: AttentionStep) -> AttentionStep:
        """As the toy's; the rows that follow shared pages are without padding too."""
        plan, shared = super().capture_plan(step), step.shared
        if shared is None:
            return plan
        assert shared.rest.phase is step.phase
        assert torch.equal(shared.rest.query_start, step.query_start)
        lens = shared.shared_lens[step.query_start.diff() > 0]
        rest = super().capture_plan(shared.rest)
        return evolve(plan, shared=evolve(shared, rest=rest, shared_lens=lens))

    def table(self, layer: LayerInfo, plan: AttentionStep) -> Tensor:
        """The page tables that the parts make; they are those of the step if all is right."""
        if plan.shared is None or layer.window is not None:
            return super().table(layer, plan)
        prefixes, rest, shared_lens = (
            plan.shared.prefixes,
            plan.shared.rest,
            plan.shared.shared_lens,
        )
        assert torch.equal(rest.context_lens + shared_lens, plan.context_lens)
        assert (rest.context_lens > 0).all() and (prefixes.query_start.diff() >= 0).all()
        starts, joined = (
            prefixes.query_start.tolist(),
            torch.zeros_like(plan.page_tables[layer.group]),
        )
        assert not shared_lens[starts[-1] :].any(), "a row of no group shares pages"
        for group, (first, last) in enumerate(pairwise(starts)):
            length = int(prefixes.context_lens[group])
            if first == last:
                continue
            assert length and not length % self.page_size
            assert (shared_lens[first:last] == length).all()
            pages = length // self.page_size
            joined[first:last, :pages] = prefixes.page_tables[layer.group][group, :pages]
        for row, (shared, more) in enumerate(
            zip(shared_lens.tolist(), rest.context_lens.tolist(), strict=True)
        ):
            before, count = shared // self.page_size, -(-more // self.page_size)
            joined[row, before : before + count] = rest.page_tables[layer.group][row, :count]
        return joined


def check_tails(table: np.ndarray, lens: np.ndarray, page_size: int) -> None:
    """Raise AssertionError unless table entries past a row's last page are 0, as the contract
    says. Rejected drafts may leave the row pages that nothing else has.
    """
    columns = np.arange(table.shape[1])
    past = columns >= -(-lens // page_size)[:, None]
    drafted = columns < -(-(lens + MAX_DRAFTS) // page_size)[:, None]
    assert not (table * (past & ~drafted)).any(), "a page table holds pages past its row's end"
    assert not np.intersect1d(table[past & (table > 0)], table[~past]).size, (
        "a page table holds pages past its row's end that are another's"
    )


def hashes(tokens: np.ndarray, count: int) -> np.ndarray:
    """The next token after each of the last `count` prefixes.   returns: [count] float32"""
    ends = hash_prefixes(tokens)[len(tokens) - count :]
    return np.array([each % VOCAB for each in ends], np.float32)
