"""Batches and attention steps out of the tables: captured steps read what others read."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import attrs
import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headstock.execution.attention_router import PhaseRouter
from headstock.execution.buffers import Buffers
from headstock.execution.pooling import PoolingTable
from headstock.execution.row_tables import DeviceTables
from headstock.execution.sampling_inputs import SamplingTable
from headstock.execution.step import PlannedStep, StepMaker
from headstock.scheduler import Plan
from headstock.spi import (
    MAX_PREFIX_GROUPS,
    AttentionStep,
    FullKV,
    KVGroup,
    PrefixGroups,
    Sample,
    Sampling,
    StepInputs,
)

LAYOUT = FullKV(kv_heads=1, k_dim=2, v_dim=2)
ROWS, MAX_LEN, PAGE_SIZE, VOCAB = 9, 40, 4, 50


def tables_of(seed: int) -> tuple[Buffers, SamplingTable, DeviceTables]:
    """Tables with random tokens, and pages in random order in each of two groups."""
    rng = np.random.default_rng(seed)
    columns = MAX_LEN // PAGE_SIZE
    pages = [1 + rng.permutation((ROWS + 1) * columns).reshape(ROWS + 1, columns) for _ in range(2)]
    for table in pages:
        table[ROWS] = 0
    buffers = Buffers(
        device=torch.device("cpu"),
        page_size=PAGE_SIZE,
        groups=tuple(KVGroup(layers=(layer,), layout=LAYOUT) for layer in range(2)),
        pools=(torch.zeros(1), torch.zeros(1)),
        page_tables=tuple(torch.from_numpy(table.astype(np.int32)) for table in pages),
        tokens=torch.from_numpy(rng.integers(0, VOCAB, (ROWS + 1, MAX_LEN + 1))),
    )
    sampling = SamplingTable(ROWS + 1, VOCAB)
    return buffers, sampling, DeviceTables(buffers, sampling)


def plan_of(rows: list[int], starts: list[int], counts: list[int], num_decode: int) -> Plan:
    """A plan of these rows, each scored at its last token."""
    first, many = np.array(starts, np.int32), np.array(counts, np.int32)
    return Plan(
        number=1,
        num_decode=num_decode,
        rows=np.array(rows, np.int32),
        admission_ids=np.array(rows, np.int32),
        starts=first,
        stops=first + many,
        num_logits=np.ones_like(first),
        samples=np.ones_like(first),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Rows that decode, then at least one that computes some tokens, or its first."""
    rows = draw(st.permutations(range(ROWS)))[: draw(st.integers(1, ROWS))]
    num_decode = draw(st.integers(0, len(rows) - 1))
    starts = [draw(st.integers(1 if i < num_decode else 0, MAX_LEN - 5)) for i in range(len(rows))]
    counts = [1 if i < num_decode else draw(st.integers(1, 5)) for i in range(len(rows))]
    return plan_of(rows, starts, counts, num_decode)


def make_step(
    plan: Plan, buffers: Buffers, sampling: SamplingTable, groups: PrefixGroups | None = None
) -> PlannedStep:
    """The plan as a runner is given it, with groups of its rows."""
    pooling = PoolingTable(ROWS + 1, 2, buffers.device)
    router = PhaseRouter(Mock(), Mock(), {})
    maker = StepMaker(buffers=buffers, sampling=sampling, pooling=pooling, router=router)
    return attrs.evolve(maker.make_step(plan), groups=groups)


def same(one: object, other: object) -> bool:
    """Whether two fields of records are equal, types of tensors and arrays included."""
    match one, other:
        case Tensor(), Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case np.ndarray(), np.ndarray():
            return one.dtype == other.dtype and np.array_equal(one, other)
        case tuple(), tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case Sampling(), Sampling():
            return differences(one, other) == []
    return one == other


def differences(one: Any, other: Any) -> list[str]:
    """The fields in which two records of one type differ."""
    assert type(one) is type(other)
    names = attrs.fields_dict(type(one))
    return [name for name in names if not same(getattr(one, name), getattr(other, name))]


@given(st.integers(0, 99), st.data(), st.integers(1, 4))
def test_captured_functions_make_what_steps_of_equally_long_rows_have_without_them(
    seed: int, data: st.DataObject, query_len: int
) -> None:
    buffers, sampling, tables = tables_of(seed)
    rows = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))]
    starts = [data.draw(st.integers(1, MAX_LEN - query_len)) for _ in rows]
    num_decode = len(rows) if query_len == 1 else 0
    plan = plan_of(rows, starts, [query_len] * len(rows), num_decode)
    plan = attrs.evolve(plan, num_logits=plan.num_logits * query_len)
    step = make_step(plan, buffers, sampling)
    inputs = StepInputs.of_rows(torch.tensor(rows), torch.tensor(starts), query_len)

    assert differences(tables.batch(inputs), step.batch()) == []
    captured = tables.attention_step(inputs, plan.stops)
    decode, extend = step.make_attention_steps()
    assert differences(captured, decode or extend) == []


@given(st.integers(0, 99), st.data(), st.integers(0, 3))
def test_captured_steps_are_cut_at_shared_prefixes_as_others_are(
    seed: int, data: st.DataObject, more_rows: int
) -> None:
    buffers, sampling, tables = tables_of(seed)
    inputs = tables.prefix_inputs(ROWS + more_rows)
    for _ in range(2):  # the second step finds what the first one left
        counts = data.draw(st.lists(st.integers(2, 4), max_size=2))
        pages = [data.draw(st.integers(1, 5)) for _ in counts]
        grouped = sum(counts)
        rows = data.draw(st.permutations(range(ROWS)))[
            : max(1, grouped + data.draw(st.integers(0, 1)))
        ]
        lens = np.repeat(pages, counts) * PAGE_SIZE
        least = [*lens.tolist(), *[1] * (len(rows) - grouped)]
        starts = [data.draw(st.integers(int(low), MAX_LEN - 1)) for low in least]
        plan = plan_of(rows, starts, [1] * len(rows), len(rows))
        groups = PrefixGroups(
            counts=np.array(counts, np.int32), lens=np.array(pages, np.int32) * PAGE_SIZE
        )
        grouped_step = make_step(plan, buffers, sampling, groups)
        step = grouped_step.make_attention_steps()[0]
        tables.write(inputs, grouped_step)
        size = len(rows) + more_rows
        padding = [ROWS] * more_rows, [0] * more_rows
        padded = StepInputs.of_rows(
            torch.tensor([*rows, *padding[0]]), torch.tensor([*starts, *padding[1]]), 1
        )
        longest = np.full(size, MAX_LEN, np.int32)
        captured = tables.attention_step(padded, longest, inputs.first_rows(size)).shared
        assert step is not None and step.shared is not None and captured is not None
        wanted, count = step.shared, len(counts)

        assert same(captured.shared_lens[: len(rows)], wanted.shared_lens)
        assert not captured.shared_lens[len(rows) :].any()
        ours, theirs = captured.prefixes, wanted.prefixes
        assert ours.num_rows == MAX_PREFIX_GROUPS
        assert same(ours.query_start[: count + 1], theirs.query_start)
        assert (ours.query_start[count:] == grouped).all()
        assert same(ours.context_lens[:count], theirs.context_lens)
        for some, all_of_them in ((ours, theirs), (captured.rest, wanted.rest)):
            for row, length in enumerate(all_of_them.context_lens.tolist()):
                used = -(-length // PAGE_SIZE)
                for one, other in zip(some.page_tables, all_of_them.page_tables, strict=True):
                    assert same(one[row, :used], other[row, :used])
        assert same(captured.rest.context_lens[: len(rows)], wanted.rest.context_lens)
        assert same(wanted.rest.context_lens, step.context_lens - wanted.shared_lens)
        assert (captured.rest.context_lens[len(rows) :] == 1).all()
        assert (wanted.rest.host_context_lens == wanted.rest.context_lens.numpy()).all()


@given(st.integers(0, 99), plans(), st.integers(0, 6), st.data())
def test_captured_prompts_are_cut_where_the_decode_rows_before_them_share_pages(
    seed: int, plan: Plan, more_rows: int, data: st.DataObject
) -> None:
    buffers, sampling, tables = tables_of(seed)
    split, rows = plan.num_decode, len(plan.rows)
    counts = [data.draw(st.integers(2, split))] if split > 1 else []
    most = int(plan.starts[: sum(counts)].min(initial=0)) // PAGE_SIZE
    counts = counts[:most]
    lens = [PAGE_SIZE * data.draw(st.integers(1, most)) for _ in counts]
    groups = PrefixGroups(counts=np.array(counts, np.int32), lens=np.array(lens, np.int32))
    inputs, prefixes = tables.step_inputs(ROWS + 6, 64), tables.prefix_inputs(ROWS + 6)
    step = make_step(plan, buffers, sampling, groups)
    tables.write(inputs, step)
    tables.write(prefixes, step)
    inputs, prefixes = inputs.first_rows(rows + more_rows), prefixes.first_rows(rows + more_rows)
    longest = np.full(rows + more_rows, MAX_LEN, np.int32)
    captured = tables.attention_step(inputs, longest, prefixes)
    whole = tables.attention_step(inputs, longest)
    assert differences(attrs.evolve(captured, shared=None), whole) == []

    # A step of rows that decode, but with the lengths of these, is cut in the same way.
    alone = tables.attention_step(
        StepInputs.of_rows(inputs.row_ids, whole.context_lens.long() - 1, 1), longest, prefixes
    )
    ours, theirs = captured.shared, alone.shared
    assert ours is not None and theirs is not None
    assert differences(ours.prefixes, theirs.prefixes) == []
    assert same(ours.shared_lens, theirs.shared_lens)
    assert sorted(differences(ours.rest, theirs.rest)) in (
        [],
        ["host_query_lens", "phase"],
        ["host_query_lens", "phase", "query_start"],
    )
    assert ours.rest.phase is whole.phase and same(ours.rest.query_start, whole.query_start)
    assert same(ours.rest.context_lens[split:], whole.context_lens[split:])


@given(st.integers(0, 99), plans(), st.integers(0, 6), st.integers(0, 20))
def test_prompt_inputs_are_the_step_and_padding(
    seed: int, plan: Plan, more_rows: int, more_tokens: int
) -> None:
    buffers, sampling, tables = tables_of(seed)
    rows, tokens = len(plan.rows), plan.num_tokens
    inputs = tables.step_inputs(rows + more_rows, tokens + more_tokens)
    tables.write(inputs, make_step(plan, buffers, sampling))
    batch, wanted = tables.batch(inputs), make_step(plan, buffers, sampling).batch()

    for name in ("tokens", "positions", "token_rows"):
        assert same(getattr(batch, name)[:tokens], getattr(wanted, name)), name
    for name in ("row_ids", "starts"):
        assert same(getattr(batch, name)[:rows], getattr(wanted, name)), name
    assert same(batch.query_start[: rows + 1], wanted.query_start)
    for slots, wanted_slots in zip(batch.slots, wanted.slots, strict=True):
        assert same(slots[:tokens], wanted_slots) and (slots[tokens:] == 0).all()
    assert batch.max_query_len >= wanted.max_query_len and batch.pools is wanted.pools
    assert (batch.token_rows[tokens:] == ROWS).all() and (batch.row_ids[rows:] == ROWS).all()
    assert not batch.positions[tokens:].any() and not batch.starts[rows:].any()
    assert (batch.query_start[rows:] == tokens).all()


@given(st.integers(0, 99), plans(), st.integers(0, 6))
def test_the_attention_of_a_captured_prompt_sees_the_rows_of_the_step(
    seed: int, plan: Plan, more_rows: int
) -> None:
    buffers, sampling, tables = tables_of(seed)
    inputs = tables.step_inputs(ROWS + more_rows, 64)
    tables.write(inputs, make_step(plan, buffers, sampling))
    rows = len(plan.rows)
    longest = np.full(ROWS, MAX_LEN, np.int32)
    captured = tables.attention_step(inputs.first_rows(ROWS), longest)
    # All rows as one part, as a captured step has them.
    whole = attrs.evolve(plan, num_decode=0)
    wanted = make_step(whole, buffers, sampling).make_attention_steps()[1]
    assert wanted is not None and captured.num_rows == ROWS

    assert same(captured.query_start[: rows + 1], wanted.query_start)
    assert same(captured.context_lens[:rows], wanted.context_lens)
    assert (captured.query_start[rows:].diff() == 0).all()
    assert (captured.context_lens[rows:] == 1).all()
    for table, wanted_table in zip(captured.page_tables, wanted.page_tables, strict=True):
        assert same(table[:rows, : wanted_table.shape[1]], wanted_table)
        assert not table[rows:].any()
    for bound, lens in (
        (captured.host_query_lens, wanted.host_query_lens),
        (captured.host_context_lens, wanted.host_context_lens),
    ):
        assert (bound[:rows] >= lens).all()


def test_inputs_keep_their_addresses_and_begin_where_kernels_like_it() -> None:
    buffers, sampling, tables = tables_of(0)
    inputs = tables.step_inputs(5, 21)
    tensors = attrs.asdict(inputs, filter=lambda field, _: field.type == "Tensor | None")
    tensors |= {"row_ids": inputs.row_ids, "starts": inputs.starts}
    memory = tensors.pop("memory")
    assert tensors.pop("saved") is None, "no group keeps a state"
    before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert len(before) == 6
    assert (tensors["token_rows"] == ROWS).all()
    assert tensors["query_start"].tolist() == [0] + [1] * 5
    tables.write(inputs, make_step(plan_of([2, 4], [3, 0], [1, 7], 1), buffers, sampling))

    assert {name: getattr(inputs, name).data_ptr() for name in tensors} == before
    assert all((place - memory.data_ptr()) % 16 == 0 for place in before.values())
    assert inputs.first_rows(1).row_ids.tolist() == [2]
    first = inputs.first_rows(1).query_start
    assert first is not None and first.tolist() == [0, 1]


def test_inputs_over_tensors_of_the_runner_are_not_written() -> None:
    buffers, sampling, tables = tables_of(0)
    rows = torch.zeros(2, dtype=torch.int64)
    step = make_step(plan_of([2, 4], [3, 0], [1, 7], 1), buffers, sampling)
    with pytest.raises(TypeError, match="of the runner's"):
        tables.write(StepInputs.of_rows(rows, rows, 1), step)


@given(st.integers(0, 99), plans())
def test_every_part_of_a_plan_has_its_attention_step(seed: int, plan: Plan) -> None:
    buffers, sampling, _ = tables_of(seed)
    split = plan.num_decode
    parts = make_step(plan, buffers, sampling).make_attention_steps()
    assert (parts[0] is None) == (split == 0)
    for part, attention in zip((slice(0, split), slice(split, None)), parts, strict=True):
        if attention is None:
            continue
        check_attention_step(attention, plan, part, buffers)


def check_attention_step(
    attention: AttentionStep, plan: Plan, part: slice, buffers: Buffers
) -> None:
    """Compare with what a loop over the rows finds."""
    rows, starts, stops = (array[part].tolist() for array in (plan.rows, plan.starts, plan.stops))
    lens = [stop - start for start, stop in zip(starts, stops, strict=True)]
    assert attention.query_start.tolist() == [sum(lens[:i]) for i in range(len(lens) + 1)]
    assert attention.context_lens.tolist() == attention.host_context_lens.tolist() == stops
    assert attention.host_query_lens.tolist() == lens
    columns = -(-max(stops) // PAGE_SIZE)
    for table, whole in zip(attention.page_tables, buffers.page_tables, strict=True):
        assert table.tolist() == [whole[row, :columns].tolist() for row in rows]


@frozen(kw_only=True, eq=False)
class LaterSample(Sample):
    """A sample with a field of a later revision."""

    entropy: Tensor


@frozen(kw_only=True, eq=False)
class LaterSampling(Sampling):
    """Settings with a field of a later revision."""

    mask: Tensor


def test_parts_of_records_have_parts_of_every_tensor_later_ones_included() -> None:
    five, healthy = torch.arange(5), torch.ones(5, dtype=torch.bool)
    sample = LaterSample(tokens=five, healthy=healthy, entropy=five * 2).first(3)
    assert isinstance(sample, LaterSample) and sample.logprobs is None
    assert [len(sample.healthy), sample.tokens.tolist(), sample.entropy.tolist()] == [
        3,
        [0, 1, 2],
        [0, 2, 4],
    ]
    settings = LaterSampling(temperature=five, mask=torch.eye(5), top_logprobs=4).part(1, 3)
    assert isinstance(settings, LaterSampling) and settings.mask.shape == (2, 5)
    assert settings.temperature is not None and settings.temperature.tolist() == [1, 2]
    assert (settings.seeds, settings.top_logprobs) == (None, 4)


@pytest.mark.parametrize("kind", [(), ("temperature",), ("min_p", "temperature", "top_k", "top_p")])
def test_settings_are_the_columns_that_a_kind_names(kind: tuple[str, ...]) -> None:
    _, sampling, tables = tables_of(0)
    sampling.columns.floats.copy_(torch.arange(3 * (ROWS + 1)).view(3, -1))
    sampling.columns.integers.copy_(torch.arange(2 * (ROWS + 1)).view(2, -1) + 100)
    rows, positions = torch.tensor([3, ROWS, 0]), torch.tensor([7, 0, 2])
    wanted = {
        "temperature": [3.0, 9.0, 0.0],
        "top_p": [13.0, 19.0, 10.0],
        "min_p": [23.0, 29.0, 20.0],
        "top_k": [103, 109, 100],
    }
    made = tables.sampling(rows, positions, frozenset(kind))
    found = {name: value for name in wanted if (value := getattr(made, name)) is not None}

    assert {name: value.tolist() for name, value in found.items()} == {
        name: wanted[name] for name in kind
    }
    if kind:
        assert made.seeds is not None and made.seeds.tolist() == [113, 119, 110]
        assert made.positions is positions
    else:
        assert made.seeds is None and made.positions is None
