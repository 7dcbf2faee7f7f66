"""Whether a backend can serve: by what it declares, and by what its own resolve says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import attrs
import pytest
from core.startup.test_memory_plan import model

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import CannotRun, PluginBroken, UnknownPlugin
from headstock.registry import loading
from headstock.selection.attention_choice import select_backends
from headstock.selection.capabilities import (
    check_narrower,
    find_rejections,
    resolve_capabilities,
)
from headstock.selection.model_needs import AttentionNeeds, resolve_kv_dtype
from headstock.selection.negotiate import agree_page_size, negotiate_terms
from headstock.spi import (
    AttentionCapabilities,
    AttentionSpec,
    DeviceEnv,
    DeviceRange,
    Feature,
    GraphSupport,
    IntSet,
    LayoutKind,
    Phase,
    Planning,
    Rejection,
    Runner,
    SpiRange,
)
from headstock.startup.assemble import make_attention_backend

CPU = DeviceEnv(device="cpu")
H200 = DeviceEnv(device="cuda", capability=(9, 0))
ALL = frozenset(Phase)


def capabilities(**changes: Any) -> AttentionCapabilities:
    """A backend for everything on a CPU."""
    base: dict[str, Any] = {
        "phases": ALL, "devices": (DeviceRange("cpu"),), "dtypes": frozenset({("float32",
        "float32", "float32")}), "layouts": frozenset({LayoutKind.FULL}), "mixed_groups": False,
        "head_dims": IntSet.all(), "gqa_ratios": IntSet.all(),
        "page_sizes": IntSet.of(16, 32), "paged": True, "contiguous": False,
        "graph": GraphSupport.NEVER, "planning": Planning.NONE, "features": frozenset(),
    }  # fmt: skip
    return AttentionCapabilities(**(base | changes))


def spec(**changes: Any) -> AttentionSpec:
    """Its spec."""
    return AttentionSpec(
        name="x",
        spi=SpiRange(0, 3),
        summary="",
        implementation="a:b",
        capabilities=capabilities(**changes),
    )


def question(**changes: Any) -> AttentionNeeds:
    """What a 7B decoder asks in float32 with pages of 16."""
    base = AttentionNeeds(
        model=model(),
        dtype="float32",
        kv_dtype="float32",
        page_size=16,
        contiguous=False,
        max_rows=8,
        max_seq_len=64,
    )
    return attrs.evolve(base, **changes)


REFUSED = [
    ({"phases": frozenset({Phase.DECODE})}, {}, "phase"),
    ({"devices": (DeviceRange("cuda", (9, 0)),)}, {}, "device"),
    ({"head_dims": IntSet.of(64)}, {}, "head_dim"),
    ({"gqa_ratios": IntSet.of(2)}, {}, "gqa_ratio"),
    ({}, {"page_size": 8}, "page_size"),
    ({}, {"kv_dtype": "float8_e4m3fn"}, "dtype"),
    ({}, {"dtype": "bfloat16", "kv_dtype": "bfloat16"}, "dtype"),
    # what comes out is of the query's type
    ({"dtypes": frozenset({("float32", "float32", "bfloat16")})}, {}, "dtype"),
    ({"layouts": frozenset({LayoutKind.LATENT})}, {}, "layout"),
    ({}, {"contiguous": True}, "contiguous"),
    ({"paged": False, "contiguous": True}, {}, "paged"),
]


@pytest.mark.parametrize(("claims", "requested", "code"), REFUSED)
def test_each_claim_that_is_not_met_is_a_reason(
    claims: dict[str, Any], requested: dict[str, Any], code: str
) -> None:
    query = question(**requested).make_query(ALL)

    (reason,) = find_rejections(capabilities(**claims), query, CPU)
    assert reason.code == code and reason.hint
    with pytest.raises(
        CannotRun, match=r"attn \(--attn\) x cannot serve decode/extend/prefill here"
    ):
        resolve_capabilities(spec(**claims), query, CPU)


@pytest.mark.feature("T8", "T9", "P1")
def test_paged_and_contiguous_are_capabilities_and_the_other_is_an_error() -> None:
    paged, region = spec(), spec(paged=False, contiguous=True)

    assert resolve_capabilities(paged, question().make_query(ALL), CPU)
    assert resolve_capabilities(region, question(contiguous=True).make_query(ALL), CPU)
    with pytest.raises(CannotRun, match=r"supported: pages\..*--paged-attn\) to on"):
        resolve_capabilities(paged, question(contiguous=True).make_query(ALL), CPU)
    with pytest.raises(CannotRun, match=r"supported: contiguous regions\..*--paged-attn\) to off"):
        resolve_capabilities(region, question().make_query(ALL), CPU)


@pytest.mark.feature("P6", "S3", "S4")
def test_a_page_size_that_is_not_served_lists_those_that_are() -> None:
    with pytest.raises(CannotRun, match="page size 8 is not supported; supported: 16, 32"):
        resolve_capabilities(spec(), question(page_size=8).make_query(ALL), CPU)


CLAIMS = {"attn (--attn) x": IntSet.of(16, 32), "cache_type (--cache-type) y": IntSet.all()}


@pytest.mark.feature("P6", "S3", "S4")
@pytest.mark.parametrize("requested", [8, 64, 256])
def test_a_page_size_asked_for_is_never_replaced_by_another(requested: int) -> None:
    with pytest.raises(CannotRun, match=rf"--page-size\) {requested}: attn .* x serves 16, 32"):
        agree_page_size(EngineConfig(page_size=requested), CLAIMS, CPU)


@pytest.mark.feature("S4")
@pytest.mark.parametrize(
    ("requested", "who"), [("auto", "attn (--attn) x"), (32, "page_size (--page-size) 32")]
)
def test_the_summary_says_who_decided_the_page_size(requested: Any, who: str) -> None:
    attention = (SimpleNamespace(spec=spec(), phases=ALL, capabilities=capabilities()),)
    parts: Any = SimpleNamespace(attention=attention, cache=registry.load_spec("cache", "naive"))
    agreed = negotiate_terms(EngineConfig(page_size=requested), parts, model(), "float32", CPU)
    assert ("page size", str(agreed.page_size), who) in agreed.table


@pytest.mark.feature("S4")
def test_page_sizes_that_are_left_open_are_those_that_everyone_serves() -> None:
    def agreed(
        size: int | str, claims: dict[str, IntSet], env: DeviceEnv = H200, or_less: bool = False
    ) -> int:
        return agree_page_size(EngineConfig(page_size=size, page_size_or_less=or_less), claims, env)

    assert [agreed(requested, CLAIMS, or_less=True) for requested in (256, 32, 31)] == [32, 32, 16]
    anything, halves = {"attn x": IntSet.all()}, {"attn x": IntSet.multiples(256)}
    assert [agreed("auto", anything, env) for env in (H200, CPU)] == [64, 16]
    assert agreed("auto", CLAIMS) == 32 and agreed("auto", halves) == 256
    with pytest.raises(
        CannotRun,
        match=r"attn .* x serves 16, 32; cache_type .* y serves 64",
    ):
        agreed("auto", CLAIMS | {"cache_type (--cache-type) y": IntSet.of(64)})


@pytest.mark.feature("S13")
def test_the_first_name_serves_prompts_and_the_second_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "load_spec", lambda kind, name: attrs.evolve(spec(), name=name))
    selected = [
        (item.spec.name, set(item.phases)) for item in select_backends("a,b", CPU, question())
    ]
    assert selected == [("a", {Phase.PREFILL, Phase.EXTEND}), ("b", {Phase.DECODE})]


@pytest.mark.feature("S15")
def test_a_pair_says_of_both_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = (DeviceRange("cuda"),)
    original_load = registry.load_spec
    specs_by_name = {name: attrs.evolve(spec(devices=gpu), name=name) for name in "ab"}
    monkeypatch.setattr(
        registry,
        "load_spec",
        lambda kind, name: specs_by_name.get(name) or original_load(kind, name),
    )
    with pytest.raises(
        CannotRun, match=r"attn \(--attn\) a cannot serve .*; attn \(--attn\) b cannot serve"
    ) as caught:
        select_backends("a,b", CPU, question())
    hint = (
        "Set attn (--attn) to sdpa. Where there is a GPU, 'headstock doctor' says why torch does "
        "not find it."
    )
    assert str(caught.value).endswith(f"this is cpu. {hint}") and str(caught.value).count(hint) == 1


def test_a_device_that_is_not_served_is_answered_with_a_backend_that_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (reason,) = find_rejections(
        capabilities(devices=(DeviceRange("cuda"),)), question().make_query(ALL), CPU
    )
    assert reason.hint.startswith("Set attn (--attn) to sdpa. Where")

    others = tuple(item for item in registry.list_installed("attention") if item.name != "sdpa")
    monkeypatch.setattr(registry, "list_installed", lambda kind: others)
    monkeypatch.setattr(registry, "load_spec", Mock(side_effect=UnknownPlugin("not here")))
    (reason,) = find_rejections(
        capabilities(devices=(DeviceRange("cuda"),)), question().make_query(ALL), CPU
    )
    assert reason.hint.startswith(
        "Install another one: pip install ./backends/sdpa (in a checkout of headstock). Where"
    )


def test_a_feature_that_is_not_named_cannot_be_done() -> None:
    windowed = attrs.evolve(model(), layers=(attrs.evolve(model().layers[0], window=5),))

    query = question(model=windowed).make_query(ALL)

    assert [group.features for group in query.groups] == [{Feature.SLIDING_WINDOW}]
    assert [reason.code for reason in find_rejections(capabilities(), query, CPU)] == ["feature"]


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(CannotRun) as caught:
        resolve_capabilities(
            spec(head_dims=IntSet.of(64), gqa_ratios=IntSet.of(2)),
            question(page_size=8).make_query(ALL),
            CPU,
        )

    assert all(
        word in str(caught.value) for word in ("head_dim 128", "1 query heads", "page size 8")
    )


@pytest.mark.parametrize(
    "wider",
    [{"phases": ALL}, {"contiguous": True}, {"graph": GraphSupport.ALWAYS},
    {"features": frozenset({Feature.LSE})},
    {"layouts": frozenset(LayoutKind)}, {"mixed_groups": True},
     {"page_sizes": IntSet.of(64)}, {"head_dims": IntSet.all()}, {"gqa_ratios": IntSet.multiples(3,
     most=9)}],
)  # fmt: skip
def test_resolve_may_only_narrow(wider: dict[str, Any]) -> None:
    served = {
        "page_sizes": IntSet.multiples(128),
        "head_dims": IntSet.of(64, 128),
        "gqa_ratios": IntSet.of(1, 2, 4),
    }
    declared = spec(phases=frozenset({Phase.DECODE}), **served)
    narrower = {"phases": frozenset(), "page_sizes": IntSet.of(256), "head_dims": IntSet.of(64)}

    check_narrower(declared, capabilities(**served | narrower))
    with pytest.raises(PluginBroken, match="claims more"):
        check_narrower(declared, capabilities(**served | narrower | wider))


@pytest.mark.parametrize(
    "answer", [None, True, (), "no", ("no",), Rejection(code="x", message="y")]
)
def test_a_resolve_that_answers_with_something_else_is_broken(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "import_object", lambda spec, path: lambda query, env: answer)
    with pytest.raises(PluginBroken, match=r"attention backend 'x': resolve: expected .* got "):
        resolve_capabilities(attrs.evolve(spec(), resolve="a:b"), question().make_query(ALL), CPU)


WRONG: list[dict[str, Any]] = [
    {"devices": DeviceRange("cpu")}, {"devices": "cpu"}, {"dtypes": frozenset({("float32",
    "float32")})},
    {"page_sizes": 16}, {"head_dims": (64, 128)}, {"phases": list(ALL)}, {"features": []},
    {"graph": False}, {"layouts": {"full"}}, {"mixed_groups": 1},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(*wrong))
def test_a_claim_of_another_type_cannot_be_made(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=str(*wrong)):
        capabilities(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"spi": (0, 2)},
        {"name": 5},
        {"summary": None},
        {"options": 5},
        {"resolve": 5},
        {"capabilities": None},
    ],
    ids=lambda wrong: str(*wrong),
)
def test_a_field_of_a_spec_that_is_of_another_type_cannot_be_given(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{str(*wrong)}|expected a dotted path"):
        attrs.evolve(spec(), **wrong)
    for kind, name in (("cache", "naive"), ("ops", "torch"), ("runner", "eager")):
        with pytest.raises(TypeError, match="capabilities"):
            attrs.evolve(registry.load_spec(kind, name), capabilities=None)


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (
            TypeError("Mine" * 15 + " without an implementation for abstract method 'forward'"),
            PluginBroken,
            "'forward'",
        ),
        (ValueError("buy another"), CannotRun, r"\(--attn\) x: buy another"),
        (
            ImportError("undefined symbol: y"),
            CannotRun,
            r"\(--attn\) x: its kernels cannot be loaded: .*: y; install",
        ),
        (OSError("libcudart.so.12: no such file"), CannotRun, "cannot be loaded: OSError"),
        (
            RuntimeError("boom"),
            PluginBroken,
            "attention backend 'x': it could not be made: RuntimeError: boom",
        ),
        (SystemExit(3), PluginBroken, "SystemExit: 3"),
        (None, PluginBroken, "expected AttentionBackend, got"),
    ],
)
def test_a_backend_that_cannot_be_made_is_named(
    error: BaseException | None, expected: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(context: Any) -> object:
        if error is not None:
            raise error
        return object()

    monkeypatch.setattr(loading, "import_implementation", lambda spec: make)
    with pytest.raises(expected, match=text):
        make_attention_backend(spec(), Mock())


def test_a_runner_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = registry.load_spec("runner", "eager")
    monkeypatch.setattr(
        loading, "import_implementation", lambda spec: lambda **parts: parts["missing"]
    )
    with pytest.raises(
        PluginBroken, match=rf"{broken.name}.* \(headstock .*\): it could not be made: KeyError"
    ):
        registry.make_part(broken, Runner)


@pytest.mark.feature("P7")
def test_fp8_halves_bytes_per_token() -> None:
    import torch

    from headstock.execution.kv_pools import count_page_bytes

    half, full = (
        getattr(torch, resolve_kv_dtype(name, "bfloat16")) for name in ("fp8_e4m3", "auto")
    )

    (group,) = model().kv_groups
    assert 2 * count_page_bytes(group, 16, half, full) == count_page_bytes(group, 16, full, full)
