"""What a family may say of its KV groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy_plugins
from attrs import evolve
from toy_text import write_tokenizer

from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.errors import CannotRun
from headstock.nn.decoder_config import decoder_config
from headstock.selection.capabilities import find_rejections
from headstock.selection.model_needs import AttentionNeeds
from headstock.selection.negotiate import negotiate_terms
from headstock.selection.select import check_layouts, select_plugins
from headstock.spi import (
    AttentionSpec,
    DeviceEnv,
    FullKV,
    IntSet,
    KVGroup,
    LatentAttention,
    LatentKV,
    LayerSizes,
    LayoutKind,
    ModelConfig,
    Phase,
    QkNorm,
    Rope,
    ShortConv,
    StateKV,
    StateTensor,
)
from headstock.startup.kv_groups import find_group_fault

FULL = FullKV(kv_heads=2, k_dim=8, v_dim=8)
CONV = ShortConv(taps=3, width=8)
STATE = StateKV(tensors=(StateTensor("conv", (16, 2)),))
LATENT = LatentKV(dim=24, rope_dim=8)


def model(windows: tuple[int | None, ...] = (None, None, 7, 5)) -> ModelConfig:
    """A decoder of some layers; each window has a group, full attention first."""
    hf = {
        "hidden_size": 32, "num_hidden_layers": len(windows), "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16, "vocab_size": 50,
        "max_position_embeddings": 99,
    }  # fmt: skip
    return decoder_config(hf, "LlamaForCausalLM", windows=windows)


def group(*layers: int, **changes: Any) -> KVGroup:
    """A full group of these layers."""
    return KVGroup(layers=layers, **{"layout": FULL, **changes})


def with_groups(*groups: KVGroup, windows: tuple[int | None, ...] = (None,) * 3) -> ModelConfig:
    """The decoder with these groups; each layer names the first that lists it, else the first."""
    of = {layer: at for at, one in reversed(list(enumerate(groups))) for layer in one.layers}
    one = model(windows)
    layers = tuple(evolve(layer, group=of.get(layer.index, 0)) for layer in one.layers)
    return evolve(one, kv_groups=groups, layers=layers)


def with_conv(conv: ShortConv, *groups: KVGroup) -> ModelConfig:
    """The decoder with these groups, its second layer a convolution."""
    one = with_groups(*groups)
    first, second, *others = one.layers
    return evolve(one, layers=(first, evolve(second, conv=conv), *others))


def latent_model(layout: Any = LATENT, **changes: Any) -> ModelConfig:
    """The decoder with latent attention in its one layer, and changes to the whole."""
    attention = LatentAttention(
        q_rank=None, kv_rank=16, nope_dim=8, rope_dim=8, v_dim=8, norm_eps=1e-6
    )
    one = with_groups(group(0, layout=layout), windows=(None,))
    layer = evolve(one.layers[0], latent=attention)
    return evolve(one, **{"layers": (layer,), "kv_heads": 1, "head_dim": 24, **changes})


NEEDS = AttentionNeeds(
    model=model(), dtype="float32", kv_dtype="float32", page_size=16, contiguous=False,
    max_rows=1, max_seq_len=9,
)  # fmt: skip
GOOD = [
    model(),
    with_groups(group(0, 2), group(1)),
    with_groups(group(0), group(1, layout=LATENT), group(2, layout=STATE)),
    with_conv(CONV, group(0, 2), group(1, layout=CONV.layout)),
    latent_model(),
    # tokens that stay though the layer does not look back at them
    with_groups(group(0, 1, 2), windows=(4, None, 6)),
    with_groups(group(0, 1, 2, window=6), windows=(4, 6, 6)),
]
WIDE = LayerSizes(heads=4, kv_heads=1, head_dim=16, intermediate=16)


def with_sizes(*groups: KVGroup, **changes: Any) -> ModelConfig:
    """Three layers of which the last has fewer and wider heads of keys and values."""
    first, second, third = with_groups(*groups).layers
    return evolve(
        with_groups(*groups), layers=(first, second, evolve(third, sizes=evolve(WIDE, **changes)))
    )


WIDE_FULL = FullKV(kv_heads=1, k_dim=16, v_dim=16)
GOOD += [
    with_sizes(group(0, 1), group(2, layout=WIDE_FULL)),
    with_sizes(group(0, 1, 2), kv_heads=2, head_dim=8, intermediate=99),
]
BAD = [
    (with_sizes(group(0, 1, 2)), "layout: expected .*kv_heads=1, k_dim=16.* got .*k_dim=8"),
    (with_sizes(group(0, 1), group(2)), "layout: expected .*kv_heads=1, k_dim=16.* got .*k_dim=8"),
    (
        with_sizes(group(0, 1, 2), heads=2, kv_heads=2, head_dim=8),
        "heads of its layers: expected one number, got 2 and 4",
    ),
    (with_groups(group(0, 1)), "groups of layer 2: expected exactly one, got 0"),
    (with_groups(group(0, 1), group(1, 2)), "groups of layer 1: expected exactly one, got 2"),
    (with_groups(group(0, 1, 2, 3)), "a group lists layer 3, and there are 3 layers"),
    (with_groups(group(0, 1, 2), group()), "group 1 has no layer"),
    (with_groups(group(0, 1, 2, window=6), windows=(4, 7, 6)), "layer 1 .* sees 7 .* keeps 6"),
    (with_groups(group(0, 1, 2, window=6), windows=(4, None, 6)), "sees all .* keeps 6"),
    (
        with_groups(group(0, 1, 2, window=0), windows=(0, 0, 0)),
        "window: expected 1 or more, got 0",
    ),
    (with_groups(group(0, 1, 2, layout=STATE), windows=(4, None, None)), "keeps a state"),
    (with_groups(group(0, 1, 2, layout=STATE, window=3)), "keeps a state"),
    (with_groups(group(0, 1, 2, layout=StateKV(tensors=()))), "state: .* got \\[\\]"),
    (
        with_groups(group(0, 1, 2, layout=evolve(STATE, tensors=STATE.tensors * 2))),
        "state: expected .* different names, got",
    ),
    (
        with_groups(group(0, 1, 2, layout=evolve(STATE, tensors=(StateTensor("x", (3, 0)),)))),
        "'x' without elements",
    ),
    (
        with_groups(group(0, 1, 2, layout=evolve(LATENT, rope_dim=24))),
        "rope_dim: expected .* got 24",
    ),
    (
        with_groups(group(0, 1, 2, layout=evolve(FULL, kv_heads=4))),
        "layout: expected FullKV.* got .*kv_heads=4",
    ),
    (
        with_groups(group(0, 1, 2, layout=evolve(FULL, v_dim=16))),
        "layout: expected FullKV.* got .*v_dim=16",
    ),
    (with_groups(group(0, 1, 2, dtype="half-way")), "dtype: expected a float type .* got half-way"),
    (
        with_groups(
            group(0, 1, 2, layout=evolve(STATE, tensors=(StateTensor("x", (3,), "int8"),)))
        ),
        "state: expected a float type .* got int8",
    ),
    (
        with_conv(ShortConv(taps=3, width=8), group(0), group(1, 2)),
        "layer 1 keeps StateKV.* its group keeps FullKV",
    ),
    (
        with_conv(ShortConv(taps=4, width=8), group(0), group(1, 2, layout=CONV.layout)),
        "layer 1 keeps .*\\(3, 8\\).* keeps .*\\(2, 8\\)",
    ),
    (latent_model(evolve(LATENT, dim=25)), r"over LatentKV\(dim=24, .* and keeps LatentKV\(dim=25"),
    (latent_model(FULL), "has latent attention over .*, and keeps FullKV"),
    (latent_model(kv_heads=2), r"\(kv_heads, head_dim\): expected \(1, 24\), got \(2, 24\)"),
    (latent_model(head_dim=8), r"\(kv_heads, head_dim\): expected \(1, 24\), got \(1, 8\)"),
    (latent_model(qk_norm=QkNorm.HEAD), "qk_norm: expected none, got head"),
    (latent_model(ropes=(Rope(theta=9.0, dim=4),)), "no rope for the 8 elements"),
    (with_groups(group(0, 1, 2, layout="full")), "layout: expected FullKV, .* got str"),
    (evolve(model(), layers=model().layers[1:]), "layers: expected 0, 1, 2, .* got 1, 2, 3"),
    (
        evolve(model(), layers=(evolve(model().layers[0], group=3), *model().layers[1:])),
        "layer 0 names group 3, and there are 3",
    ),
    (
        evolve(model(), layers=(evolve(model().layers[0], group=1), *model().layers[1:])),
        "layer 0 names group 1, which does not list it",
    ),
    (evolve(model(), layers=(), kv_groups=()), "group that keeps tokens, got none"),
]


@pytest.mark.parametrize("good", GOOD)
def test_groups_that_cover_each_layer_once_are_served(good: ModelConfig) -> None:
    assert find_group_fault(good) == ""


@pytest.mark.parametrize(("bad", "fault"), BAD, ids=[fault for _, fault in BAD])
def test_each_contradiction_is_named(bad: ModelConfig, fault: str) -> None:
    assert re.search(fault, find_group_fault(bad)), find_group_fault(bad)


def look_too_far(config: ModelConfig) -> ModelConfig:
    """The toy model, whose second layer sees more than its group keeps."""
    full, seen = config.layers
    return evolve(config, layers=(full, evolve(seen, window=10)))


def leave_out_a_group(config: ModelConfig) -> ModelConfig:
    """The toy model, whose second layer is in no group."""
    return evolve(config, kv_groups=config.kv_groups[:1])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (look_too_far, "layer 1 of group 1 sees 10 tokens, and the group keeps 9"),
        (leave_out_a_group, "groups of layer 1: expected exactly one, got 0"),
    ],
)
def test_a_family_with_wrong_groups_is_refused_in_one_line_before_weights_load(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[ModelConfig], ModelConfig],
    fault: str,
) -> None:
    checkpoint = toy_plugins.install(tmp_path, window=9)
    write_tokenizer(checkpoint)
    monkeypatch.syspath_prepend(str(tmp_path))
    served = toy_plugins.config

    def change_served(hf: dict[str, Any]) -> ModelConfig:
        return change(served(hf))

    monkeypatch.setattr(toy_plugins, "TOY", evolve(toy_plugins.TOY, config=change_served))
    # The checkpoint has no weights, so what refuses it comes before they are read.
    code = main(["run", "--model", str(checkpoint), "--prompt", "x"])
    out, err = capsys.readouterr()
    assert (code, out) == (3, "")
    (line,) = err.strip().splitlines()
    assert "'ToyForCausalLM'" in line and fault in line


def test_each_part_must_serve_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same model, once more parts can read and write its pages."""
    checkpoint = toy_plugins.install(tmp_path)
    write_tokenizer(checkpoint)
    monkeypatch.syspath_prepend(str(tmp_path))
    served, attention = toy_plugins.config, toy_plugins.attention

    def keeps_vectors(hf: dict[str, Any]) -> ModelConfig:
        return evolve(served(hf), kv_groups=(KVGroup(layers=(0,), layout=LATENT),))

    def reads_all() -> AttentionSpec:
        return evolve(attention(), capabilities=evolve(attention().capabilities, layouts=EVERY))

    monkeypatch.setattr(toy_plugins, "TOY", evolve(toy_plugins.TOY, config=keeps_vectors))
    command = ["run", "--model", str(checkpoint), "--attn", "toy", "--ops", "toy"]

    def refuse() -> str:
        code = main([*command, "--runner", "eager", "--prompt", "x"])
        out, err = capsys.readouterr()
        assert (code, out) == (5, "")
        (line,) = err.strip().splitlines()
        return line

    assert "attn (--attn) toy cannot serve" in (line := refuse())
    assert "latent KV is not supported; supported: full" in line
    monkeypatch.setattr(toy_plugins, "attention", reads_all)
    assert (
        "ops (--ops) toy writes full and state KV alone, and the model keeps latent KV" in refuse()
    )


EVERY = frozenset(LayoutKind)


@pytest.mark.parametrize("layout", [LATENT, STATE])
def test_a_runner_must_serve_the_layout(layout: Any) -> None:
    needs: Any = SimpleNamespace(layouts=frozenset({layout.kind}))
    check_layouts(needs, EVERY, "runner x runs", "it to eager")
    with pytest.raises(
        CannotRun, match=f"runs full KV alone, .* keeps {layout.kind.value} KV; set it to eager"
    ):
        check_layouts(
            needs,
            EVERY - {layout.kind} - {LayoutKind.STATE, LayoutKind.LATENT},
            "runner x runs",
            "it to eager",
        )


def test_groups_of_different_types_need_a_backend_for_both() -> None:
    two = with_groups(group(0, 1), group(2, dtype="float16"))
    needs = AttentionNeeds(
        model=two, dtype="float32", kv_dtype="float32", page_size=16, contiguous=False,
        max_rows=1, max_seq_len=9,
    )  # fmt: skip
    asked = needs.make_query(frozenset(Phase))

    assert [one.kv_dtype for one in asked.groups] == ["float32", "float16"]
    types = frozenset({("float32", "float32", "float32"), ("float32", "float16", "float32")})
    served = evolve(
        toy_plugins.attention().capabilities,
        dtypes=types,
        head_dims=IntSet.all(),
        gqa_ratios=IntSet.all(),
    )
    env = DeviceEnv(device="cpu")
    assert find_rejections(served, asked, env) == []
    (reason,) = find_rejections(evolve(served, mixed_groups=False), asked, env)
    assert reason.code == "mixed_groups"


KEEPS = "KV group 0 keeps a state:"
OFF = f"{KEEPS} paged_attn (--paged-attn) off"
REUSE = [
    (group(0, 1, 2), "radix", "on", "takes over"),
    (group(0, 1, 2, layout=LATENT), "radix", "on", "takes over"),
    (group(0, 1, 2), "naive", "cache_type (--cache-type) naive", "cache_type (--cache-type) naive"),
    (group(0, 1, 2, window=6), "radix", "on", "takes over"),
    (group(0, 1, 2, layout=STATE), "radix", f"{KEEPS} its family names no alignment", OFF),
    (group(0, 1, 2, layout=evolve(STATE, alignment=4)), "radix", "on", OFF),
    (
        group(0, 1, 2, layout=evolve(STATE, alignment=8000)),
        "radix",
        f"{KEEPS} max_batch_tokens (--max-batch-tokens) 8192 has no room for 8000 tokens beside "
        "those of max_running_requests (--max-running-requests) 256",
        OFF,
    ),
]


@pytest.mark.parametrize(("kept", "cache", "paged", "regions"), REUSE)
def test_what_is_reused_follows_from_layouts_and_policy(
    kept: KVGroup, cache: str, paged: str, regions: str
) -> None:
    config = EngineConfig(cache_type=cache)
    parts = select_plugins(config, DeviceEnv(device="cpu"), NEEDS)
    model = with_groups(kept, windows=(6, 6, 6) if kept.window else (None,) * 3)
    for asked, said in ((config, paged), (evolve(config, paged_attn="off"), regions)):
        terms = negotiate_terms(asked, parts, model, "float32", DeviceEnv(device="cpu"))
        ((value, who),) = [entry[1:] for entry in terms.table if entry[0] == "prefix reuse"]
        assert terms.reuse == (said == "on") and terms.take_over == (said == "takes over")
        assert (value == "off") == (said not in ("on", "takes over"))
        assert value != "off" or who == said
