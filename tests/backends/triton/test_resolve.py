"""What `triton` serves on machines of several kinds, and when `auto` takes it."""

from __future__ import annotations

import pytest
from attrs import evolve

from headstock import registry
from headstock.errors import CannotRun
from headstock.nn.decoder_config import decoder_config
from headstock.registry import requirements
from headstock.selection.attention_choice import join_capabilities, select_attention
from headstock.selection.capabilities import resolve_capabilities as resolved
from headstock.selection.model_needs import AttentionNeeds
from headstock.spi import (
    DeviceEnv,
    Feature,
    FullKV,
    GraphSupport,
    KVGroup,
    LayerSizes,
    Phase,
)
from headstock_conformance.attention import QUERY, query
from headstock_triton_attn.plugin import CAPABILITIES, EIGHT_BIT_KV, resolve, spec

H200 = DeviceEnv(device="cuda", capability=(9, 0), distributions={"vllm": "0.24.0"})


@pytest.mark.parametrize(
    ("capability", "eight_bit"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_8_bit_kv_needs_a_gpu_that_converts_it(
    capability: tuple[int, int], eight_bit: bool
) -> None:
    env = DeviceEnv(device="cuda", capability=capability)
    assert (EIGHT_BIT_KV in resolve(QUERY, env).dtypes) is eight_bit
    narrow = query(kv_dtype="float8_e4m3fn")
    if eight_bit:
        assert resolved(spec(), narrow, env) == CAPABILITIES
        return
    with pytest.raises(CannotRun, match="bfloat16 with float8_e4m3fn KV is not supported"):
        resolved(spec(), narrow, env)


@pytest.mark.parametrize(
    ("head_dim", "text"), [(520, "head_dim 520"), (100, "head_dim 100"), (1024, "head_dim 1024")]
)
def test_other_head_sizes_are_refused_with_those_that_are_served(head_dim: int, text: str) -> None:
    with pytest.raises(
        CannotRun, match=f"{text} is not supported; supported: multiples of 8 up to"
    ):
        resolved(spec(), query(head_dim=head_dim), H200)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 192, 256, 512])
def test_sinks_windows_caps_and_graphs_are_served_at_every_head_size(head_dim: int) -> None:
    features = frozenset({Feature.SINKS, Feature.SLIDING_WINDOW, Feature.SOFTCAP, Feature.LSE})
    answer = resolved(spec(), query(head_dim=head_dim, features=features), H200)
    assert answer.graph is GraphSupport.ALWAYS


def ask_gemma() -> AttentionNeeds:
    """What a decoder asks whose second layer has heads of 512, as in Gemma-4, and others of 256."""
    hf = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 16, "vocab_size": 50,
        "max_position_embeddings": 99,
    }  # fmt: skip
    model = decoder_config(hf, "LlamaForCausalLM")
    first, second = model.layers
    sizes = LayerSizes(heads=8, kv_heads=1, head_dim=512, intermediate=16)
    groups = (
        evolve(model.kv_groups[0], layers=(0,)),
        KVGroup(layers=(1,), layout=FullKV(kv_heads=1, k_dim=512, v_dim=512)),
    )
    layers = (first, evolve(second, group=1, sizes=sizes))
    return AttentionNeeds(
        model=evolve(model, layers=layers, kv_groups=groups),
        dtype="bfloat16",
        kv_dtype="bfloat16",
        page_size=64,
        contiguous=False,
        max_rows=8,
        max_seq_len=64,
    )


def test_auto_takes_it_only_for_the_heads_that_no_library_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requirements, "find_missing", lambda spec: ())
    needs = ask_gemma()
    for value, names in (
        ("auto", [("fa", (0,)), ("triton", (1,))]),
        ("triton", [("triton", (0, 1))]),
    ):
        chosen = select_attention(value, H200, needs)
        assert [(each.spec.name, each.groups) for each in chosen] == names
        assert join_capabilities(chosen, Phase.DECODE).graph is GraphSupport.ALWAYS


def test_it_is_missing_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    (need,) = spec().requires
    monkeypatch.setattr(requirements, "find_version", lambda *words: None)
    (missing,) = registry.find_missing(
        evolve(spec(), requires=(evolve(need, import_name="no_such"),))
    )
    assert "pip install 'triton>=3.6,<4'" in missing.hint
