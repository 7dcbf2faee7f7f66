"""Fields that a later revision of the contract adds reach models, operations and backends through
runners that do not know of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import toy_plugins
from attrs import frozen
from torch import Tensor
from toy_engine import EngineHarness, Toys, request

from headstock import SamplingParams
from headstock.execution import executor, row_tables, sampling_inputs
from headstock.nn.sampler import sample
from headstock.spi import AttentionStep, Batch, Sample, Sampling


@frozen(kw_only=True, eq=False)
class LaterBatch(Batch):
    """adapters: [tokens] int64"""

    adapters: Tensor


@frozen(kw_only=True, eq=False)
class LaterStep(AttentionStep):
    """shared_lens: [rows] int32"""

    shared_lens: Tensor


@frozen(kw_only=True, eq=False)
class LaterSampling(Sampling):
    """limit: a number for the step"""

    limit: int


@frozen(kw_only=True, eq=False)
class LaterSample(Sample):
    """doubled: [n] int64"""

    doubled: Tensor


def make_later_batch(**fields: Any) -> LaterBatch:
    """A batch whose new field follows from its rows."""
    return LaterBatch(**fields, adapters=fields["token_rows"] % 3)


def make_later_step(**fields: Any) -> LaterStep:
    """An attention step whose new field follows from its lengths."""
    return LaterStep(**fields, shared_lens=fields["context_lens"] * 2)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Gives core's records a field more, and counts whom it reached, where the values are right."""
    counts = Counter[str]()
    monkeypatch.setattr(row_tables, "Batch", make_later_batch)
    monkeypatch.setattr(row_tables, "AttentionStep", make_later_step)
    monkeypatch.setattr(
        sampling_inputs, "Sampling", lambda **fields: LaterSampling(**fields, limit=7)
    )
    embed, attention = toy_plugins.ToyOps.embed, toy_plugins.ToyAttention

    def embed_later(self: Any, batch: Any) -> Any:
        assert (batch.adapters == batch.token_rows % 3).all()
        counts["batch"] += 1
        return embed(self, batch)

    def sample_later(self: Any, logits: Tensor, sampling: Any) -> LaterSample:
        assert sampling.limit == 7
        counts["sampling"] += 1
        made = sample(logits, sampling)
        return LaterSample(tokens=made.tokens, healthy=made.healthy, doubled=made.tokens * 2)

    def watch(name: str) -> Any:
        method = getattr(attention, name)

        def watched(self: Any, *args: Any) -> Any:
            step = args[-1]
            assert (step.shared_lens == step.context_lens * 2).all()
            counts[name] += 1
            return method(self, *args)

        return watched

    class WatchedReadback(executor.Readback):
        """Readback of samples that have the new field."""

        @classmethod
        def of_sample(cls, sample: Any, device: Any) -> executor.Readback:
            assert (sample.doubled == sample.tokens * 2).all()
            assert len(sample.doubled) == len(sample.healthy)
            counts["sample"] += 1
            return super().of_sample(sample, device)

    monkeypatch.setattr(toy_plugins.ToyOps, "embed", embed_later)
    monkeypatch.setattr(toy_plugins.ToyOps, "sample", sample_later)
    monkeypatch.setattr(executor, "Readback", WatchedReadback)
    for name in ("plan", "graph_plan", "graph_update", "capture_plan"):
        monkeypatch.setattr(attention, name, watch(name))
    return counts


@pytest.mark.parametrize(
    ("runner", "attn", "calls"),
    [
        ("eager", "toy", {"plan"}),
        ("rerun", "toy", {"plan", "graph_plan", "graph_update", "capture_plan"}),
        ("rerun", "toy-planned", {"plan", "graph_plan", "graph_update"}),
    ],
)
def test_a_later_field_reaches_all_that_a_runner_calls(
    toys: Toys, seen: Counter[str], runner: str, attn: str, calls: set[str]
) -> None:
    # Some prompt steps are one graph, and some go in pieces.
    opt = ("rerun.whole_rows=2",) if runner == "rerun" else ()
    engine = toys.engine(runner=runner, attn=attn, max_batch_tokens=20, overlap=False, opt=opt)
    requests = [request(str(i), range(i, 9 + 7 * i), 6 + i) for i in range(5)]
    warm = SamplingParams(temperature=0.8, seed=3)
    requests += [request("warm", range(4), 5, params=warm)]
    EngineHarness(engine).run(requests)
    engine.close()

    assert seen.keys() == {"batch", "sampling", "sample"} | calls
