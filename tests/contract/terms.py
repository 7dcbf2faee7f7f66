"""What parts claim, and what a model needs of them: each claim changes a refusal or a term."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import torch

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import CannotRun
from headstock.execution.kv_pools import page_shape
from headstock.nn.decoder_config import decoder_config
from headstock.registry.contract_checks import explain_mismatch
from headstock.selection.capabilities import explain_device_mismatch, find_rejections
from headstock.selection.model_needs import AttentionNeeds
from headstock.selection.negotiate import negotiate_terms
from headstock.selection.select import check_layouts
from headstock.spi import (
    AttentionCapabilities,
    AttentionQuery,
    CacheCapabilities,
    DeviceEnv,
    DeviceRange,
    Feature,
    FullKV,
    GraphSupport,
    GroupQuery,
    IntSet,
    KVGroup,
    LatentKV,
    LayoutKind,
    ModelConfig,
    Phase,
    Planning,
    Require,
    SpiRange,
    StateKV,
    StateTensor,
)
from headstock.startup.kv_groups import find_group_fault
from headstock.startup.memory_plan import estimate_memory_use, plan_memory
from headstock_conformance.attention import query

from .vary import Case, vary

CPU = DeviceEnv(device="cpu", name="a CPU")
FLOAT = ("float32", "float32", "float32")
CLAIMS = AttentionCapabilities(
    phases=frozenset(Phase),
    devices=(DeviceRange("cpu"),),
    dtypes=frozenset({FLOAT}),
    layouts=frozenset({LayoutKind.FULL}),
    head_dims=IntSet.all(),
    gqa_ratios=IntSet.all(),
    page_sizes=IntSet.all(),
    mixed_groups=True,
    paged=True,
    contiguous=False,
    graph=GraphSupport.NEVER,
    planning=Planning.NONE,
    features=frozenset({Feature.SLIDING_WINDOW}),
)
GROUP = GroupQuery(
    layout=FullKV(kv_heads=2, k_dim=8, v_dim=8),
    heads=4,
    q_dtype="float32",
    kv_dtype="float32",
    window=5,
    features=frozenset({Feature.SLIDING_WINDOW}),
)
QUERY = attrs.evolve(
    query(page_size=16), groups=(GROUP, attrs.evolve(GROUP, window=None)), contiguous=False
)
HF = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 16, "vocab_size": 50, "max_position_embeddings": 99,
}  # fmt: skip


def model() -> ModelConfig:
    """A decoder whose last layer sees seven tokens."""
    return decoder_config(HF, "LlamaForCausalLM", windows=(None, None, 7))


NEEDS = AttentionNeeds(
    model=model(),
    dtype="float32",
    kv_dtype="float32",
    page_size=16,
    contiguous=False,
    max_rows=1,
    max_seq_len=9,
)


def refusals(claims: AttentionCapabilities) -> list[str]:
    """What these claims cannot serve, of pages and of regions."""
    asked = [QUERY, attrs.evolve(QUERY, contiguous=True)]
    return [str(each) for one in asked for each in find_rejections(claims, one, CPU)]


def refusals_of_query(asked: AttentionQuery) -> list[str]:
    """Why a backend of narrow claims refuses the query."""
    narrow = attrs.evolve(
        CLAIMS,
        phases=frozenset(Phase) - {Phase.PREFILL},
        head_dims=IntSet.of(8),
        gqa_ratios=IntSet.of(2),
        page_sizes=IntSet.of(16),
        mixed_groups=False,
        contiguous=False,
    )
    return [str(each) for each in find_rejections(narrow, asked, CPU)]


def refusals_of_group(group: GroupQuery) -> list[str]:
    """Why the backend refuses a query of this group beside another."""
    return refusals_of_query(attrs.evolve(QUERY, groups=(GROUP, group)))


def refusals_of_mixed_groups(claims: AttentionCapabilities) -> list[str]:
    """What these claims cannot serve of groups with unlike layouts."""
    other = attrs.evolve(GROUP, layout=FullKV(kv_heads=1, k_dim=8, v_dim=8))
    asked = attrs.evolve(QUERY, groups=(GROUP, other))
    return [str(each) for each in find_rejections(claims, asked, CPU)]


def graphs_of(claims: AttentionCapabilities) -> object:
    """The common terms of a backend with these claims."""
    return terms_of(RADIX, claims)


def plan_of_group(group: KVGroup) -> list[object]:
    """What a model with this as its last group is refused for, and the pages that it gets."""
    last = None if isinstance(group.layout, StateKV) else 7
    full, _ = model().kv_groups
    config = decoder_config(HF, "LlamaForCausalLM", windows=(None, None, 7))
    layers = (*config.layers[:2], attrs.evolve(config.layers[2], window=last))
    config = attrs.evolve(config, layers=layers, kv_groups=(full, group))
    return [
        find_group_fault(config),
        plan_memory(
            EngineConfig(kv_memory_mb=1),
            model=config,
            page_size=16,
            kv_dtype=torch.float32,
            dtype=torch.float32,
            weights=0,
            other_use=estimate_memory_use(config, 64, 8, 4),
            free=2**30,
            max_len=99,
        ).lines(),
    ]


def plan_of_layout(layout: Any) -> list[object]:
    """The same of a group with this layout, and the shape of its pages."""
    group = KVGroup(layers=(2,), layout=layout)
    sizes = [getattr(each, "shape", ()) for each in getattr(layout, "tensors", ())]
    return [
        *plan_of_group(group),
        sizes if isinstance(layout, StateKV) else page_shape(layout, 16),
    ]


def plan_of_state(tensor: StateTensor) -> list[object]:
    """The same of a state of this tensor and another."""
    return plan_of_layout(StateKV(tensors=(tensor, StateTensor("other", (3,)))))


def terms_of(
    cache: CacheCapabilities,
    claims: AttentionCapabilities = CLAIMS,
    last_window: int | None = None,
    state: StateKV | None = None,
) -> object:
    """The common terms of a backend and a cache policy with these claims.

    state: what another layer of the model keeps
    """
    one = SimpleNamespace(spec=SDPA, phases=frozenset(Phase), capabilities=claims)
    policy = SimpleNamespace(name="mine", capabilities=cache)
    parts: Any = SimpleNamespace(attention=(one,), cache=policy)
    config = decoder_config(HF, "LlamaForCausalLM", windows=(None, None, last_window))
    if state is not None:
        other = KVGroup(layers=(3,), layout=state)
        config = attrs.evolve(config, kv_groups=(*config.kv_groups, other))
    return negotiate_terms(EngineConfig(page_size=16), parts, config, "float32", CPU)


def offered(spec: Any) -> list[object]:
    """Where a part with this spec runs, and which layouts it serves."""
    text = explain_device_mismatch(spec, CPU)
    try:
        check_layouts(NEEDS, spec.capabilities.layouts, "--x y serves", "--x z")
    except CannotRun as error:
        text += str(error)
    return [text]


def offer(spec: Any, changes: dict[str, Any]) -> dict[str, Case]:
    """The cases of a part's capabilities."""
    return vary(
        spec.capabilities,
        lambda claims: offered(attrs.evolve(spec, capabilities=claims)),
        changes,
    )


def served_by(devices: DeviceRange) -> list[bool]:
    """Which of some devices are in the range."""
    made = [(8, 0), (9, 0), (10, 0)]
    envs = [DeviceEnv(device="cuda", capability=each) for each in made]
    return [env in devices for env in (*envs, CPU)]


def needs_met(need: Require) -> list[str]:
    """What a spec with this need lacks."""
    spec = attrs.evolve(NAIVE, requires=(need,))
    return [f"{each.message} {each.hint}" for each in registry.find_missing(spec)]


def refused_version(declared: SpiRange) -> str | None:
    """Why a plugin for that version is refused."""
    (plugin, *_) = registry.list_installed("cache")
    return explain_mismatch(plugin, declared, {"cache": (0, 2, 1)})


FULL = FullKV(kv_heads=2, k_dim=8, v_dim=8)
SDPA, NAIVE = registry.load_spec("attention", "sdpa"), registry.load_spec("cache", "naive")
RADIX = registry.load_spec("cache", "radix").capabilities
NEED = Require(import_name="attrs", distribution="attrs", version=">=1")
CUDA = (DeviceRange("cuda"),)
FEW = IntSet.of(64)

CASES: dict[str, Case] = {
    **vary(
        CLAIMS,
        refusals,
        {
            "phases": frozenset({Phase.DECODE}),
            "devices": CUDA,
            "dtypes": frozenset({("float32", "float32", "bfloat16")}),
            "layouts": frozenset({LayoutKind.LATENT}),
            "head_dims": FEW,
            "gqa_ratios": IntSet.of(1),
            "page_sizes": FEW,
            "paged": False,
            "contiguous": True,
            "features": frozenset(),
        },
    ),
    **vary(CLAIMS, refusals_of_mixed_groups, {"mixed_groups": False}),
    **vary(CLAIMS, graphs_of, {"graph": GraphSupport.ALWAYS}),
    **vary(
        QUERY,
        refusals_of_query,
        {
            "phases": frozenset({Phase.DECODE}),
            "groups": (attrs.evolve(GROUP, heads=2),),
            "page_size": 32,
            "contiguous": True,
        },
    ),
    **vary(
        GROUP,
        refusals_of_group,
        {
            "layout": FullKV(kv_heads=2, k_dim=16, v_dim=16),
            "heads": 8,
            "q_dtype": "bfloat16",
            "kv_dtype": "float8_e4m3fn",
            "features": frozenset({Feature.SOFTCAP}),
        },
    ),
    **vary(
        model().kv_groups[1],
        plan_of_group,
        {"layers": (1,), "layout": LatentKV(dim=9, rope_dim=2), "window": 5, "dtype": "float16"},
    ),
    **vary(FULL, plan_of_layout, {"kv_heads": 1, "k_dim": 4, "v_dim": 4}),
    **vary(LatentKV(dim=24, rope_dim=8), plan_of_layout, {"dim": 32, "rope_dim": 24}),
    **vary(
        StateKV(tensors=(StateTensor("a", (2,)),)),
        plan_of_layout,
        {"tensors": (StateTensor("a", (9,)),)},
    ),
    **vary(
        StateKV(tensors=(StateTensor("a", (2,)),)),
        lambda layout: terms_of(RADIX, state=layout),
        {"alignment": 8},
    ),
    **vary(
        StateTensor("a", (64,)),
        plan_of_state,
        {"name": "other", "shape": (32,), "dtype": "float64"},
    ),
    **vary(
        RADIX,
        terms_of,
        {"page_sizes": FEW, "layouts": frozenset({LayoutKind.LATENT}), "reuse": False},
    ),
    **vary(RADIX, lambda cache: terms_of(cache, last_window=7), {"windows": False}),
    **offer(
        registry.load_spec("ops", "torch"),
        {"devices": CUDA, "layouts": frozenset({LayoutKind.STATE})},
    ),
    **offer(
        registry.load_spec("runner", "eager"),
        {"devices": CUDA, "layouts": frozenset({LayoutKind.STATE})},
    ),
    **vary(
        DeviceRange("cuda", (9, 0), (9, 0)),
        served_by,
        {"device": "cpu", "lowest": (8, 0), "highest": (10, 0)},
    ),
    **vary(
        DeviceEnv(device="cuda", capability=(9, 0)),
        lambda env: (env in DeviceRange("cuda", (9, 0)), str(env)),
        {"device": "cpu", "capability": (8, 0)},
    ),
    **vary(
        IntSet(values=(), step=16, most=64),
        lambda numbers: [number in numbers for number in (8, 16, 24, 64, 128)],
        {"values": (24,), "step": 8, "most": 128},
    ),
    **vary(
        NEED,
        needs_met,
        {
            "import_name": "no_such_module",
            "distribution": "no-such-distribution",
            "version": ">=9999",
            "any_of": (Require(import_name="no_such_module", distribution="none"),),
        },
    ),
    **vary(attrs.evolve(NEED, version=">=9999"), needs_met, {"hint": "pip install it"}),
    **vary(SpiRange(0, 3), refused_version, {"major": 1, "edition": 2, "revision": 1}),
}
