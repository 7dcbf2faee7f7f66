"""Plugins of every kind but attention that are wrong in one way each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve
from torch import Tensor

from headstock.builtin import mixed
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    Batch,
    Budget,
    CacheStats,
    LayerConfig,
    Match,
    ModelConfig,
    Params,
    ParamSpec,
    Proposer,
    Role,
    Sample,
    Sampling,
    ScheduleDecision,
    Stream,
    View,
    Weight,
)
from headstock.spi.arrays import Ints
from headstock_ngram_proposer.options import NgramOptions
from headstock_ngram_proposer.proposer import NgramProposer
from headstock_qwen.families import QWEN3
from headstock_radix_cache.policy import RadixCache


class NamespaceIgnored(RadixCache):
    """Shares pages between tenants."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, keys, "")

    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Any:
        return super().insert(index, handle, keys, pages, "")


class FirstKeysCompared(RadixCache):
    """Compares the first key of each page alone."""

    def blur(self, keys: Ints) -> Ints:
        whole = keys[: len(keys) // self.page_size * self.page_size]
        return whole.reshape(-1, self.page_size)[:, :1].repeat(self.page_size, 1).reshape(-1)

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, self.blur(keys), namespace)

    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Any:
        return super().insert(index, handle, self.blur(keys), pages, namespace)


class MatchShort(RadixCache):
    """Never gives the last page."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, keys[: -self.page_size], namespace)


class PagesReversed(RadixCache):
    """Gives the pages of a match in the wrong order."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        found = super().match_prefix(index, keys, namespace)
        return Match(found.pages[:, ::-1].copy(), found.handle)


class HoldsForgotten(RadixCache):
    """Evicts what rows still read."""

    def hold(self, index: Any, handle: Any) -> None:
        pass

    def release(self, index: Any, handle: Any) -> None:
        pass

    def check_index(self, index: Any) -> None:
        pass


class PagesLost(RadixCache):
    """Keeps a page to itself when it evicts."""

    def evict(self, index: Any, group: int, count: int) -> Sequence[Ints]:
        return [pages[:-1] for pages in super().evict(index, group, count)]


class MatchHolds(RadixCache):
    """Holds what it matches from the 30th match on."""

    matches = 0

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        found = super().match_prefix(index, keys, namespace)
        self.matches += 1
        if self.matches > 30:
            self.hold(index, found.handle)
        return found


class EvictAllKeepsOne(RadixCache):
    """Keeps a page when it evicts more than 25."""

    def evict_all(self, index: Any) -> Sequence[Ints]:
        return [
            self.evict(index, group, count - (count > 25))[group]
            for group in range(1)
            for count in [self.count_evictable(index, group)]
        ]


class LatePagesWrong(RadixCache):
    """Gives a page twice from the 37th on."""

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        found = super().match_prefix(index, keys, namespace)
        pages = found.pages.copy()
        if pages.shape[1] > 37:
            pages[:, 37] = pages[:, 36]
        return Match(pages, found.handle)


class NamespacesCut(RadixCache):
    """Shares pages between tenants behind the 50th."""

    def find(self, namespace: str) -> str:
        names = vars(self).setdefault("names", {})
        return str(min(names.setdefault(namespace, len(names)), 50))

    def match_prefix(self, index: Any, keys: Ints, namespace: str) -> Match:
        return super().match_prefix(index, keys, self.find(namespace))

    def insert(self, index: Any, handle: Any, keys: Ints, pages: Ints, namespace: str) -> Any:
        return super().insert(index, handle, keys, pages, self.find(namespace))


class StatsWrong(RadixCache):
    """Counts held pages as free."""

    def stats(self, index: Any) -> CacheStats:
        stats = super().stats(index)
        return evolve(stats, held=tuple(0 for _ in stats.held))


class OwnEps(TorchOps):
    """Takes the eps that most models have."""

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        return super().rms_norm(x, weight, 1e-6)


class KVMisplaced(TorchOps):
    """Stores keys and values one cell further."""

    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        flat = pool.flatten(0, 2)
        super().store_kv_(pool, (cells + 1) % len(flat), kv)


class KVSwapped(TorchOps):
    """Stores values where keys belong."""

    def store_kv_(self, pool: Tensor, cells: Tensor, kv: Tensor) -> None:
        super().store_kv_(pool, cells, kv.flip(1))


class StartsWritten(TorchOps):
    """Counts the first positions up in place."""

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        if batch is not None:
            batch.starts.add_(1)
        return super().linear(x, weight, batch)


class FewBits(TorchOps):
    """Keeps the weights of linear maps as so many steps to either side of 0."""

    steps = 127

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        if Role.LINEAR not in spec.roles:
            return weight
        scale = weight.tensor.abs().amax(-1, keepdim=True).clamp(min=1e-12) / self.steps
        return evolve(weight, tensor=(weight.tensor / scale).round() * scale)


class TwoBits(FewBits):
    steps = 1


class BiasForgotten(TorchOps):
    """Has products without their biases."""

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        return super().linear(x, evolve(weight, bias=None), batch)


class GreedyAlone(TorchOps):
    """Samples the best token whatever is asked."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        return super().sample(logits, Sampling())


class SettingsIgnored(TorchOps):
    """Samples as if some settings were not there."""

    names: tuple[str, ...] = ()

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        return super().sample(logits, evolve(sampling, **dict.fromkeys(self.names)))


class MaskIgnored(SettingsIgnored):
    names = ("mask",)


class ProcessorsIgnored(SettingsIgnored):
    names = ("processing",)


class BansIgnored(SettingsIgnored):
    names = ("banned",)


class PenaltiesIgnored(SettingsIgnored):
    names = ("repetition", "presence", "frequency")


class TargetsIgnored(SettingsIgnored):
    names = ("targets",)


class TopKIgnored(SettingsIgnored):
    names = ("top_k",)


class TopPIgnored(SettingsIgnored):
    names = ("top_p",)


class MinPIgnored(SettingsIgnored):
    names = ("min_p",)


class RepetitionIgnored(SettingsIgnored):
    names = ("repetition",)


class PresenceIgnored(SettingsIgnored):
    names = ("presence",)


class FrequencyIgnored(SettingsIgnored):
    names = ("frequency",)


class BiasIgnored(SettingsIgnored):
    names = ("bias",)


class HeadMinPIgnored(TorchOps):
    """Ignores min-p where scores and samples are one call."""

    def lm_head_sample(
        self, params: Params, config: ModelConfig, hidden: Tensor, sampling: Sampling
    ) -> Sample:
        return super().lm_head_sample(params, config, hidden, evolve(sampling, min_p=None))


class OneSeed(TorchOps):
    """Takes the seed of the first row for all."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        if sampling.seeds is not None:
            sampling = evolve(sampling, seeds=sampling.seeds[:1].expand(len(logits)))
        return super().sample(logits, sampling)


class OnePosition(TorchOps):
    """Takes the position of the first row for all."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        if sampling.positions is not None:
            sampling = evolve(sampling, positions=sampling.positions[:1].expand(len(logits)))
        return super().sample(logits, sampling)


class SampleRowsCut(TorchOps):
    """Samples the first 50 rows."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        logits[50:] = logits[:1]
        return super().sample(logits, sampling)


class SampleCallsCounted(TorchOps):
    """Is greedy from the 400th call on."""

    calls = 0

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        self.calls += 1
        return super().sample(logits, sampling if self.calls < 400 else Sampling())


class LinearTokensCut(TorchOps):
    """Has products of the first 900 tokens alone."""

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        out = super().linear(x, weight, batch)
        out[900:] = 0
        return out


class TokensRead(TorchOps):
    """Looks at the step before it computes."""

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        if len(x) > 300 and float(x.abs().max()) == 0.0:
            return x
        return super().rms_norm(x, weight, eps)


class SequencesCut(TorchOps):
    """Stores keys and values of the first 45 rows alone."""

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        out = super().linear(x, weight, batch)
        if batch is not None and len(batch.row_ids) > 45:
            out[int(batch.query_start[45]) :] = 0
        return out


class LateLayersForgotten(TorchOps):
    """Leaves out the feed-forward part from layer 23 on."""

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        return operation == "mlp" or super().takes(operation, config, layer)

    def mlp(
        self, x: Stream, params: Params, config: ModelConfig, layer: LayerConfig, batch: Batch
    ) -> Stream:
        return x if layer.index >= 23 else super().mlp(x, params, config, layer, batch)


def starve(view: View, budget: Budget) -> ScheduleDecision:
    """Run the row of highest priority alone, and admit nobody beside it."""
    if len(view.rows_by_priority):
        decision = mixed.schedule(view, evolve(budget, free_rows=0))
        return evolve(decision, rows=decision.rows[:0], counts=decision.counts[:0])
    return mixed.schedule(view, budget)


CALLS: list[int] = []


def alternate(view: View, budget: Budget) -> ScheduleDecision:
    """Decide otherwise at each second call."""
    CALLS.append(view.step)
    decision = mixed.schedule(view, budget)
    if len(CALLS) % 2:
        return decision
    return evolve(decision, rows=decision.rows[::-1], counts=decision.counts[::-1])


def overspend(view: View, budget: Budget) -> ScheduleDecision:
    """Run every row with all of its tokens, whatever the budget."""
    rows = view.rows_by_priority[view.num_new_tokens[view.rows_by_priority] > 0]
    admit = np.arange(min(budget.free_rows, len(view.waiting_lengths)), dtype=np.int32)
    return ScheduleDecision(rows=rows, counts=view.num_new_tokens[rows], admit=admit)


class RoomIgnored(NgramProposer):
    """Always gives as many drafts as it may give at most."""

    def propose(self, tokens: Sequence[Ints], room: Ints) -> tuple[Ints, Ints]:
        return super().propose(tokens, np.full_like(room, self.max_drafts))


class AnswerReused(Proposer):
    """Gives the same arrays each time."""

    max_drafts = 2

    def __init__(self, options: NgramOptions) -> None:
        self.drafts = np.zeros(100, np.int32)

    def propose(self, tokens: Sequence[Ints], room: Ints) -> tuple[Ints, Ints]:
        for at, row in enumerate(tokens):
            self.drafts[at] = row[-1]
        return np.ones(len(tokens), np.int32), self.drafts[: len(tokens)]


class TokensWritten(NgramProposer):
    """Appends its guess to the row."""

    def propose(self, tokens: Sequence[Ints], room: Ints) -> tuple[Ints, Ints]:
        tokens[0][-1] = 3
        return super().propose(tokens, room)


EPS_IGNORED = evolve(QWEN3, config=lambda hf: evolve(QWEN3.config(hf), norm_eps=1e-6))
ROPE_IGNORED = evolve(
    QWEN3,
    config=lambda hf: evolve(
        config := QWEN3.config(hf), ropes=(evolve(config.ropes[0], theta=10_000.0),)
    ),
)
