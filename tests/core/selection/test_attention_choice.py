"""Which attention backends serve which KV groups of a model whose layers have different sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import CannotRun, UsageError
from headstock.nn.decoder_config import decoder_config
from headstock.selection import attention_choice, auto_choices
from headstock.selection.attention_choice import (
    SelectedBackend,
    join_capabilities,
    name_backends,
    select_attention,
)
from headstock.selection.capabilities import find_obstacles
from headstock.selection.model_needs import AttentionNeeds
from headstock.spi import (
    DeviceRange,
    Feature,
    FullKV,
    GraphSupport,
    IntSet,
    KVGroup,
    LayerSizes,
    Phase,
    Planning,
)

from .test_capabilities import CPU, question, spec

WIDE = LayerSizes(heads=4, kv_heads=1, head_dim=512, intermediate=16)
WIDE_FULL = FullKV(kv_heads=1, k_dim=512, v_dim=512)
CLAIMS: Mapping[str, Mapping[str, Any]] = {
    "narrow": {"head_dims": IntSet.of(8), "graph": GraphSupport.ALWAYS},
    "wide": {"head_dims": IntSet.of(512), "graph": GraphSupport.DECODE},
    "single": {},
    "any": {"mixed_groups": True, "features": frozenset({Feature.SHARED_PREFIX})},
    "host": {"planning": Planning.PER_STEP, "graph": GraphSupport.DECODE},
}


def ask() -> AttentionNeeds:
    """What a decoder asks whose second layer has one KV head of 512 elements."""
    hf = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16, "vocab_size": 50,
        "max_position_embeddings": 99,
    }  # fmt: skip
    model = decoder_config(hf, "LlamaForCausalLM")
    first, second, third = model.layers
    groups = (
        attrs.evolve(model.kv_groups[0], layers=(0, 2)),
        KVGroup(layers=(1,), layout=WIDE_FULL),
    )
    layers = (first, attrs.evolve(second, group=1, sizes=WIDE), third)
    return question(model=attrs.evolve(model, layers=layers, kv_groups=groups))


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CLAIMS` as installed backends, all of which `auto` tries in their order."""

    def load(kind: str, name: str) -> Any:
        return attrs.evolve(spec(**CLAIMS[name]), name=name)

    monkeypatch.setattr(registry, "load_spec", load)
    monkeypatch.setattr(auto_choices, "ATTENTION", ((DeviceRange("cpu"), tuple(CLAIMS)),))


def choose(value: str, fastest: str | None = None) -> list[tuple[str, tuple[int, ...]]]:
    """The names of the backends, each with the numbers of its groups."""
    chosen = select_attention(value, CPU, ask(), fastest)
    return [(each.spec.name, each.groups) for each in chosen]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", [("narrow", (0,)), ("wide", (1,))]),
        ("wide+narrow", [("wide", (1,)), ("narrow", (0,))]),
        ("narrow+any", [("narrow", (0,)), ("any", (1,))]),
        ("any+narrow", [("any", (0, 1))]),
        # What cannot mix groups has an instance for each of them.
        ("single", [("single", (0,)), ("single", (1,))]),
        ("narrow,single+any", [("narrow", (0,)), ("single", (0,)), ("any", (1,))]),
    ],
)
def test_groups_of_a_shape_get_the_first_backend_that_serves_them(
    value: str, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert choose(value) == expected


@pytest.mark.parametrize("value", ["auto", "wide+narrow", "any", "single", "narrow,single+any"])
def test_the_name_of_a_choice_chooses_the_same(value: str) -> None:
    chosen = select_attention(value, CPU, ask())

    assert select_attention(name_backends(chosen), CPU, ask()) == chosen


def test_the_fastest_comes_first_in_each_of_its_groups() -> None:
    assert choose("auto", "any") == [("any", (0, 1))]
    assert choose("auto", "single+wide") == [("single", (0,)), ("single", (1,))]
    assert choose("auto", "wide+any") == [("wide", (1,)), ("any", (0,))]
    assert choose("auto", "gone") == choose("auto")


def test_a_group_that_is_not_served_is_refused_by_number_with_what_serves_it() -> None:
    with pytest.raises(CannotRun) as caught:
        choose("narrow")
    assert str(caught.value) == (
        "KV groups 1: attn (--attn) narrow cannot serve decode/extend/prefill here: head_dim 512 "
        "is not supported; supported: 8. 'headstock doctor' with the same flags says what can "
        "serve. Set attn (--attn) to narrow+wide."
    )


def test_a_group_that_nothing_serves_has_the_reason_of_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto_choices, "ATTENTION", ((DeviceRange("cpu"), ("narrow",)),))
    with pytest.raises(CannotRun, match=r"^KV groups 1: .*auto: .*head_dim 512") as caught:
        choose("auto")
    assert "Set attn" not in str(caught.value)
    with pytest.raises(CannotRun, match=r"narrow\+narrow,narrow: nothing can run here: "):
        choose("narrow+narrow,narrow")


@pytest.mark.parametrize("value", ["a+", "+a", "a+b,c,d", "a,+b", "a++b"])
def test_what_is_no_list_of_backends_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="one name, or two as PREFILL,DECODE, and more after"):
        EngineConfig(attn=value)


def test_a_step_can_do_what_all_of_its_backends_can() -> None:
    def join(*names: str) -> attention_choice.JoinedCapabilities:
        every, chosen = (
            frozenset(Phase),
            [attrs.evolve(spec(**CLAIMS[name]), name=name) for name in names],
        )
        return join_capabilities(
            [
                SelectedBackend(
                    spec=each, phases=every, groups=(number,), capabilities=each.capabilities
                )
                for number, each in enumerate(chosen)
            ],
            Phase.DECODE,
        )

    assert join("narrow").graph is GraphSupport.ALWAYS
    assert join("narrow", "wide").graph is GraphSupport.DECODE
    assert join("any", "any").features == {Feature.SHARED_PREFIX}
    assert join("any", "wide").features == frozenset()
    assert join("wide", "host").names == "wide+host"
    # One plans inside the graph and one before it.
    assert join("wide", "host").graph is GraphSupport.NEVER
    assert join("wide", "host").planning is Planning.PER_STEP


def test_a_backend_that_serves_a_part_of_the_groups_is_no_obstacle() -> None:
    load: Callable[[str, str], Any] = registry.load_spec
    assert find_obstacles(load("attention", "narrow"), CPU, ask()) == ()
    none = attrs.evolve(spec(head_dims=IntSet.of(24)), name="none")
    assert [reason.code for reason in find_obstacles(none, CPU, ask())] == ["head_dim"]


def test_the_slowest_for_some_groups_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto_choices, "ATTENTION", ((DeviceRange("cpu"), ("narrow", "any")),))
    with caplog.at_level(logging.WARNING, "headstock"):
        choose("auto", "narrow+any")
        assert caplog.records == []
        choose("auto")
    assert ["chosen=any" in record.getMessage() for record in caplog.records] == [True]
