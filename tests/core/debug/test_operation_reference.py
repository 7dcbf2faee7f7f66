"""What `--debug-ops` allows: the rounding of a type, and streams whose last term is in parts."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from headstock.debug.kv_writes import KVWrites
from headstock.debug.operation_reference import OperationReference
from headstock.errors import PluginBroken
from headstock.nn import sampler
from headstock.spi import Processing, Sampling, Stream
from headstock_conformance.ops import cases
from headstock_conformance.ops.cases import Shape
from headstock_conformance.ops.sampling import LiftSome, logits_of

SHAPE = Shape(hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, vocab=40, layers=1)


def test_stored_keys_and_values_may_be_off_by_the_rounding_of_their_type() -> None:
    config = cases.config_of(SHAPE)
    batch = cases.batch_of(config, 5, torch.bfloat16, "cpu")
    for pool in batch.pools:
        pool.copy_(cases.noise(*pool.shape, dtype=torch.bfloat16, device="cpu"))
    reference, writes = OperationReference({}, cases.config_of(SHAPE), "it"), KVWrites(batch, "it")
    layer = config.layers[0]
    parts = list(writes.pair(layer, writes.read(layer)))

    assert [name for name, *_ in parts] == ["keys", "values"]
    for name, found, wanted in parts:
        reference.compare(found, wanted * (1 + 2**-7), name)
        with pytest.raises(PluginBroken, match=f"it is off by .* in {name}, at token"):
            reference.compare(found, wanted * 1.25, name)


def test_a_last_term_in_parts_is_summed_and_the_stream_left_as_it_is() -> None:
    config = cases.config_of(SHAPE)
    params = cases.params_of(config, torch.bfloat16, "cpu")
    batch = cases.batch_of(config, 5, torch.bfloat16, "cpu")
    total = cases.noise(5, 32, dtype=torch.bfloat16, device="cpu")
    parts = cases.noise(3, 5, 32, dtype=torch.float32, device="cpu", seed=1)
    stream = Stream(total.clone(), parts)

    found = OperationReference(params, config, "it").final_norm(stream, batch)

    whole = Stream(total + parts.sum(0).bfloat16())
    assert torch.equal(found, OperationReference(params, config, "it").final_norm(whole, batch))
    assert torch.equal(stream.copy_total(), whole.total)
    assert torch.equal(stream.total, total) and stream.pending is parts


def test_sampling_is_compared_with_its_processors_and_log_probabilities() -> None:
    logits = logits_of(4, 50, torch.float32, "cpu")
    which = torch.tensor([1, 3])
    processing = Processing(rows=which, parts=((LiftSome(), {"lift": torch.full((2,), 9.0)}),))
    asked = Sampling(positions=torch.arange(4), processing=processing, top_logprobs=2)
    reference, right = (
        OperationReference({}, cases.config_of(SHAPE), "it"),
        sampler.sample(logits.clone(), asked),
    )
    assert right.logprobs is not None and right.top_ids is not None
    plain = sampler.sample(logits.clone(), evolve(asked, processing=None))

    assert reference.find_sampling_fault(right, logits, asked) == ""
    for wrong, said in (
        (plain, "sampled the token"),
        (evolve(right, logprobs=right.logprobs - 1), "is off by 1 in a token's log-probability"),
        (evolve(right, top_ids=right.top_ids.flip(1)), "in the ids of alternatives"),
        (evolve(right, logprobs=None), "gave no log-probabilities"),
    ):
        assert said in reference.find_sampling_fault(wrong, logits, asked)
