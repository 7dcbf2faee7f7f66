"""States on the device: a convolution inside a graph, and a hybrid model under other kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, fields_dict
from torch import Tensor

from headstock import LLM, SamplingParams
from headstock.nn.short_conv import ConvInputs, convolve_
from headstock.spi import Batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

WIDTH, TAPS = 384, 4
HF = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    "conv_L_cache": TAPS,
    "max_position_embeddings": 1024,
}
PROMPTS = [[(7 * at + 3 * row) % 512 for at in range(1 + 23 * row)] for row in range(12)]
NEAR = 0.01
"""A margin between the two best tokens, in log-probability, within which 16 bits may differ."""


def make_batch(spans: Sequence[tuple[int, int]], size: int) -> Batch:
    """A step of rows at these intervals of positions, padded to so many tokens."""
    counts = [stop - start for start, stop in spans]
    positions = [at for span in spans for at in range(*span)]
    padding = size - len(positions)
    return Batch(
        tokens=torch.zeros(size, dtype=torch.int64),
        positions=torch.tensor([*positions, *[0] * padding]),
        token_rows=torch.zeros(size, dtype=torch.int64),
        row_ids=torch.arange(len(spans)),
        starts=torch.tensor([start for start, _ in spans]),
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int(),
        max_query_len=size,
        slots=(),
        pools=(),
        logit_indices=None,
        state_pages=(torch.arange(1, 1 + len(spans)),),
    )


def on_device(batch: Batch) -> Batch:
    """The batch with its tensors on the GPU."""
    moved = {
        name: value.cuda()
        for name in fields_dict(Batch)
        if isinstance(value := getattr(batch, name), Tensor)
    }
    pages = tuple(each.cuda() for each in batch.state_pages if each is not None)
    return evolve(batch, **moved, state_pages=pages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_the_fused_convolution_is_that_of_torch(dtype: torch.dtype, taps: int) -> None:
    conv = pytest.importorskip("headstock_triton.conv")
    width, tolerance = 1000, {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    weight, bias = torch.randn(taps, width, device="cuda"), torch.randn(width, device="cuda")
    weight, bias = weight.to(dtype), bias.to(dtype)
    state = torch.full((8, taps - 1, width), torch.nan, device="cuda", dtype=dtype)
    expected = state.clone()
    steps = [
        ([(0, 700), (0, 1), (0, 9)], 710),
        ([(700, 701), (1, 2), (9, 10)], 3),
        ([(701, 701), (2, 4), (10, 300)], 300),
        ([(701, 702), (0, 1), (300, 301)], 3),
    ]
    for spans, size in steps:
        batch = on_device(evolve(make_batch(spans, size), max_query_len=1 if size == 3 else size))
        inputs = ConvInputs.of(batch, 0, taps)
        assert (inputs.sources is None) == (size == 3)
        projected = torch.randn(size, 3 * width, device="cuda").to(dtype)
        before, after, inner = projected.chunk(3, -1)
        found = conv.convolve_gated_(projected, weight, bias, state, inputs)
        wanted = convolve_(before * inner, weight, bias, expected, inputs) * after
        rows = int(batch.query_start[-1])
        torch.testing.assert_close(found[:rows], wanted[:rows], atol=tolerance, rtol=tolerance)
        assert torch.equal(state[1:4], expected[1:4]), "states are copies of inputs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_of_a_convolution_follows_the_rows_that_it_is_replayed_with(
    dtype: torch.dtype,
) -> None:
    steps = [
        [(0, 5), (0, 1), (0, 9)],
        [(5, 6), (1, 2), (9, 10)],
        [(6, 9), (0, 0), (10, 17)],
        [(0, 1), (2, 3), (17, 18)],
    ]
    size = 16
    weight, bias = torch.randn(TAPS, WIDTH), torch.randn(WIDTH)
    weight, bias = weight.to(dtype), bias.to(dtype)
    static = on_device(make_batch(steps[0], size))
    x = torch.zeros(size, WIDTH, dtype=dtype, device="cuda")
    state = torch.randn(8, TAPS - 1, WIDTH).to(dtype)
    there = weight.cuda(), bias.cuda(), state.cuda()

    def work() -> Tensor:
        return convolve_(x, *there, ConvInputs.of(static, 0, TAPS))

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    there[2].copy_(state)  # what ran before moved it on
    for spans in steps:
        batch = make_batch(spans, size)
        rows = torch.randn(size, WIDTH).to(dtype)
        x.copy_(rows)
        for name in ("positions", "starts", "query_start"):
            getattr(static, name).copy_(getattr(batch, name))
        graph.replay()

        expected = convolve_(rows, weight, bias, state, ConvInputs.of(batch, 0, TAPS))
        torch.testing.assert_close(out.cpu(), expected)
        assert torch.equal(there[2].cpu(), state), "states are copies of inputs"


def test_delta_rules_in_graphs_are_near_float32_whatever_the_rows() -> None:
    pytest.importorskip("headstock_triton.delta_rule")
    from gpu.delta_checks import check_steps

    assert set(check_steps()) == {"out", "state"}


def test_neither_neighbours_nor_cuts_at_chunks_change_a_bit_of_delta_rules() -> None:
    pytest.importorskip("headstock_triton.delta_rule")
    from gpu.delta_checks import check_bits

    assert check_bits() == {"cuts and neighbours": True, "decode": True, "drafts": True}


def generate(folder: Path, **settings: Any) -> list[Any]:
    """The greedy outputs of all prompts at once."""
    sizes: dict[str, Any] = {
        "device": "cuda",
        "load_format": "dummy",
        "num_pages": 512,
        "max_seq_len": 512,
        "max_running_requests": 8,
    }
    with LLM(str(folder), **(sizes | settings)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    return [output.outputs[0] for output in outputs]


def margin(table: dict[int, Any]) -> float:
    """How far the best token is ahead of the second."""
    best, second = sorted((entry.logprob for entry in table.values()), reverse=True)[:2]
    return float(best - second)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid model without weights."""
    made = tmp_path_factory.mktemp("lfm2")
    (made / "config.json").write_text(json.dumps(HF), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> list[Any]:
    """In float32, operation by operation."""
    return generate(folder, dtype="float32", attn="sdpa", ops="torch", runner="eager")


@pytest.mark.parametrize(
    "settings",
    [
        {"attn": "fa", "runner": "cudagraph", "ops": "triton"},
        {"attn": "fa", "runner": "cudagraph", "ops": "triton", "opt": ("triton.pdl=off",)},
        {"attn": "fa", "runner": "cudagraph", "ops": "torch", "max_batch_tokens": 37},
        {"attn": "fi", "runner": "cudagraph", "ops": "triton", "max_batch_tokens": 64},
        {"attn": "fa,fi", "runner": "eager", "ops": "triton", "num_pages": 40, "page_size": 16},
    ],
    ids=str,
)
def test_a_hybrid_model_says_the_same_under_any_kernels(
    settings: dict[str, Any], folder: Path, reference: list[Any]
) -> None:
    compared = 0
    for ours, theirs in zip(
        generate(folder, dtype="float16", debug_canary=True, **settings), reference, strict=True
    ):
        for at, token in enumerate(theirs.token_ids):
            if ours.token_ids[at] != token:
                assert margin(theirs.logprobs[at]) < NEAR
                break
            compared += 1

    assert compared > 40 * len(PROMPTS) / 2
