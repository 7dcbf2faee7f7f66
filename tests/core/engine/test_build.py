"""What an engine is built of, what it cannot be built of, and what is left when it is closed."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
from fp8_checkpoints import quantize_directory
from often import often

from headstock import registry
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import CannotRun, ModelError, UsageError

from .demo import SMALL, drain, request, tokens


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"page_size": 16, "attn": "sdpa,sdpa,sdpa"}, UsageError, "PREFILL,DECODE"),
        ({"attn": "nope"}, UsageError, "nope"),
        ({"runner": "cudagraf"}, UsageError, "cudagraph"),
        ({"kv_dtype": "bfloat16"}, CannotRun, "float32 with bfloat16 KV is not supported"),
        ({"tp": 2, "executor": "inline"}, UsageError, r"inline has one rank, and tp \(--tp\) is 2"),
        # Both start processes.
        *often(
            1,
            [
                (
                    {"tp": 2, "ep": True},
                    UsageError,
                    r"ep \(--ep\) on: \w+ has no experts to give to ranks",
                ),
                ({"tp": 3}, CannotRun, "expected a multiple of 3 shards"),
            ],
        ),
        ({"opt": ("nobody.x=1",)}, UsageError, "nobody"),
        ({"opt": ("mixed.x=1",)}, UsageError, "'mixed' has no options"),
        ({"opt": ("eager.x=1",), "runner": "eager"}, UsageError, "'eager' has no options"),
        ({"opt": ("inline.x=1",)}, UsageError, "no chosen plugin has that name"),
        (
            {"executor": "inlin"},
            UsageError,
            r"\(--executor\): .* inline, multiprocess, ray, got inlin; did you mean inline\?",
        ),
        ({"opt": ("torch.x=1",), "ops": "torch"}, UsageError, "'torch' has no options"),
        ({"opt": ("naive.x=1",), "cache_type": "naive"}, UsageError, "'naive' has no options"),
        ({"opt": ("radix.y=1",), "prefix_cache_n": 0}, UsageError, "y"),
        ({"model": "/no/such/place"}, ModelError, "no model directory"),
        ({"prefix_cache_n": 3, "cache_type": "naive"}, None, ""),
        ({"memory_ratio": 0.0001}, CannotRun, r"\(--memory-ratio\) 0.0001"),
    ],
)
def test_what_cannot_be_built_says_why(
    settings: dict[str, Any], error: type[Exception] | None, text: str
) -> None:
    if error is None:
        Engine(EngineConfig(**(SMALL | settings))).close()
        return
    sizes = {} if "memory_ratio" in settings else SMALL
    with pytest.raises(error, match=text):
        Engine(EngineConfig(**(sizes | settings)))


def test_the_summary_prints_what_was_agreed(engine: Engine) -> None:
    text = "\n".join(engine.summary.lines())

    assert all(
        word in text
        for word in (
            "attn",
            "sdpa",
            "radix",
            "page size",
            "256 pages of 16 = 4096 tokens",
            "memory",
        )
    )


def test_experts_that_one_rank_cannot_cut_are_noted() -> None:
    engine = Engine(EngineConfig(**(SMALL | {"ep": True})))

    assert any("ep (--ep) changes nothing" in line for line in engine.summary.lines())
    engine.close()


def test_a_pool_smaller_than_a_sequence_cuts_max_seq_len_and_says_so() -> None:
    engine = Engine(EngineConfig(num_pages=10, max_running_requests=2))

    assert engine.max_seq_len == 160 and any(
        "cut from 4096 to 160" in note for note in engine.summary.notes
    )
    engine.close()


def test_weights_that_do_not_fit_name_both_numbers(tmp_path: Path) -> None:
    hf = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 65536, "num_hidden_layers": 96,
        "head_dim": 128, "num_attention_heads": 512, "num_key_value_heads": 512,
        "intermediate_size": 262144, "vocab_size": 262144, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "hidden_act": "silu", "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(
        CannotRun,
        match=r"the weights need \d+\.\d+ GiB in float32, and \d+\.\d+ GiB are free on cpu",
    ):
        Engine(EngineConfig(model=str(tmp_path), load_format="dummy"))
    (tmp_path / "config.json").write_text(json.dumps(hf | {"max_position_embeddings": 10**10}))
    with pytest.raises(
        ModelError, match=r"max_position_embeddings: expected at most 16777216, got 10000000000"
    ):
        Engine(EngineConfig(model=str(tmp_path), load_format="dummy"))


@pytest.mark.parametrize("overlap", often(1, [True, False]))
def test_a_closed_engine_holds_neither_weights_nor_pool(overlap: bool) -> None:
    engine = Engine(EngineConfig(**(SMALL | {"overlap": overlap})))
    executor = getattr(engine.executor, "inner", engine.executor)
    references = [
        weakref.ref(executor.steps.buffers.pools[0]),
        weakref.ref(executor.runner.program.params["norm"].tensor),
    ]
    drain(engine, request("a", 12, 4))
    del executor
    assert all(reference() is not None for reference in references)
    engine.close()
    gc.collect()

    assert [reference() for reference in references] == [None, None]


@pytest.mark.feature("S12")
@pytest.mark.parametrize("attn", ["sdpa", "sdpa,sdpa"])
def test_one_name_serves_both_phases_with_one_instance(attn: str) -> None:
    engine = Engine(EngineConfig(**(SMALL | {"attn": attn, "overlap": False})))
    router = engine.executor.steps.router

    assert router.prefill is router.decode and len(router.backends) == 1
    engine.close()


def test_what_loading_makes_of_quantized_weights_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    demo, packed = tmp_path / "demo", tmp_path / "packed"
    shutil.copytree(registry.load_spec("checkpoint", "demo").directory, demo)
    quantize_directory(demo, packed, (128, 128))
    row = ("weights", "block FP8 (128 x 128), dequantized to float32 at load")
    caplog.set_level("INFO")

    for settings, said in (({}, [row]), ({"load_format": "dummy"}, [])):
        engine = Engine(EngineConfig(**(SMALL | settings | {"model": str(packed)})))
        assert [each[:2] for each in engine.summary.table if each[0] == "weights"] == said
        engine.close()

    assert caplog.text.count(row[1]) == 1

    # Random numbers are packed as a checkpoint would be, where the operations take them so.
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (packed / "config.json").write_text(json.dumps(config))
    engine = Engine(EngineConfig(**(SMALL | {"model": str(packed), "load_format": "dummy"})))
    text = "random, as FP8 where fbgemm multiplies by it as it is stored"
    assert [each[1] for each in engine.summary.table if each[0] == "weights"] == [text]
    engine.close()


def test_weights_that_are_to_be_quantized_are_said_and_refused_by_name(tmp_path: Path) -> None:
    engine = Engine(EngineConfig(**(SMALL | {"quant": "int8"})))
    plain = Engine(EngineConfig(**SMALL))
    assert [row[1] for row in engine.summary.table if row[0] == "weights"] == [
        "linear maps quantized to int8 at load"
    ]
    assert engine.summary.ops == "fbgemm"
    engine.close()
    plain.close()

    with pytest.raises(CannotRun, match=r"ops \(--ops\) torch multiplies by no weights in int4"):
        Engine(EngineConfig(**(SMALL | {"quant": "int4", "ops": "torch"})))

    demo, packed = tmp_path / "demo", tmp_path / "packed"
    shutil.copytree(registry.load_spec("checkpoint", "demo").directory, demo)
    quantize_directory(demo, packed, (128, 128))
    with pytest.raises(UsageError, match=r"int8: the weights in .* are fp8_e4m3 already"):
        Engine(EngineConfig(**(SMALL | {"quant": "int8", "model": str(packed)})))
    Engine(EngineConfig(**(SMALL | {"quant": "fp8", "model": str(packed)}))).close()


@pytest.mark.parametrize("quant", ["fp8", "int8", "int4"])
def test_products_of_quantized_maps_pass_the_checks_of_operations(quant: str) -> None:
    engine = Engine(EngineConfig(**(SMALL | {"quant": quant, "debug_ops": True})))
    assert len(tokens(drain(engine, request("a", max_tokens=4))["a"])) == 4
    engine.close()
