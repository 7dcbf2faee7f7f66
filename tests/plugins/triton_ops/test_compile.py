"""Triton's compiler takes every kernel, for the oldest GPUs that are claimed and for Hopper,
without a GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from near_processor import Near
from often import often
from sampling_cases import Lift
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, KernelParam, mangle_type

from headstock.nn.short_conv import ConvInputs
from headstock.spi import (
    Activation,
    ClampedGate,
    Collectives,
    DeltaRule,
    Experts,
    LogitsProcessor,
    PeerMemory,
    Processing,
    Sampling,
    Weight,
    WeightFormat,
    WeightKind,
)
from headstock_triton.activation import fused_silu_and_mul, quantize_silu_and_mul
from headstock_triton.conv import convolve_gated_, convolve_silu_
from headstock_triton.delta_rule import DeltaInputs, DeltaSteps, DeltaTiles, apply_delta_rule_
from headstock_triton.experts import fused_mix_experts, mix_chosen_experts, mix_experts
from headstock_triton.few_linear import multiply_few
from headstock_triton.fp8_parts import choose_rounded_tile, multiply_in_rounded_parts
from headstock_triton.fp8_rows import RowForm, make_rows
from headstock_triton.gated_linear import GatedTile, multiply_gated_tiles
from headstock_triton.heads import rope_and_store_kv
from headstock_triton.linear import small_linear
from headstock_triton.norm import add_norm, embed_norm, quantize_norm
from headstock_triton.packed import (
    multiply_packed,
    multiply_packed_gated,
    prepare_experts,
    prepare_map,
    prepare_packed,
)
from headstock_triton.ranks.push import PushCollectives, count_bytes
from headstock_triton.sampling.sampler import fused_sample
from headstock_triton.split_linear import (
    choose_gated_tile,
    choose_split_tile,
    multiply_gated,
    multiply_in_parts,
)
from headstock_triton.tiles import Tile, Tiles
from headstock_triton.word_maps import WordMap
from headstock_triton.word_registers import choose_warp_tile, multiply_few_words

OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


class Compiled(list[str]):
    """The names of kernels in the order of their launches, and the PTX, the binary and the bytes of
    shared memory of each.
    """

    texts: dict[str, str]
    binaries: dict[str, bytes]
    shared: dict[str, int]


@pytest.fixture(
    params=[90, pytest.param(80, marks=pytest.mark.full)],
    ids=lambda capability: f"sm_{capability}",
)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The kernels that were compiled in place of being launched."""
    names = Compiled()
    names.texts, names.binaries, names.shared = {}, {}, {}

    def launch(
        kernel: JITFunction[Any], *arguments: Any, grid: object, warmup: bool, **more: Any
    ) -> None:
        options = {name: more.pop(name) for name in OPTIONS if name in more}
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | more
        fixed = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        signature = {
            name: "constexpr" if name in fixed else mangle_type(each)
            for name, each in given.items()
        }
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
            kernel,
            {name: signature[name] for name in kernel.arg_names},
            fixed,
            {
                (index,): [["tt.divisibility", 16]]
                for index, param in enumerate(kernel.params)
                if is_aligned(given[param.name], param)
            },
        )
        made = triton.compile(source, target=GPUTarget("cuda", request.param, 32), options=options)
        names.append(kernel.__name__)
        names.texts[kernel.__name__] = made.asm["ptx"]
        names.binaries[kernel.__name__] = made.asm["cubin"]
        names.shared[kernel.__name__] = made.metadata.shared

    monkeypatch.setattr(JITFunction, "run", launch)
    # A kernel that is not launched writes no token, and some are read as indices.
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
    return names


def is_aligned(value: object, param: KernelParam) -> bool:
    """Whether a launch compiles the kernel for a multiple of 16."""
    if param.is_constexpr or param.do_not_specialize or param.do_not_specialize_on_alignment:
        return False
    return isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)


ROUTED = ["route_kernel", "gate_up_tiles_kernel", "down_tiles_kernel", "combine_kernel"]
HOPPER = Tiles(rows=64, gate_up=Tile(n=64, k=64, tma=True), down=Tile(n=64, k=64, swap=True))


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_norms_and_activation(compiled: Compiled) -> None:
    x, weight = tensor(3, 1024), tensor(1024)

    add_norm(x, None, weight, 1e-6)
    add_norm(x, x, weight, 1e-6)
    embed_norm(tensor(3, dtype=torch.int64), x, weight, 1e-6)
    fused_silu_and_mul(x)

    assert compiled == [
        "add_norm_kernel",
        "add_norm_kernel",
        "embed_norm_kernel",
        "silu_and_mul_kernel",
    ]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_products_of_weights_in_fp8(compiled: Compiled, tmp_path: Path) -> None:
    def weight(outs: int, width: int) -> Weight:
        numbers = torch.zeros(outs, width, dtype=torch.float8_e4m3fn)
        format = WeightFormat(kind=WeightKind.FP8_E4M3)
        stored = Weight(tensor=numbers, scales=torch.ones(()), format=format)
        return prepare_map(stored, torch.bfloat16)

    multiply_packed(tensor(1, 1024), weight(4096, 1024))
    multiply_packed_gated(tensor(1, 1024), weight(4096, 1024))
    small_linear(tensor(5, 1024), weight(2048, 1024), norm=tensor(1024), eps=1e-6, gated=True)
    multiply_packed(tensor(65, 1024), weight(4096, 1024))
    multiply_packed(tensor(33, 1024), weight(4096, 1024))

    x, gain = tensor(70, 4096), tensor(4096)
    quantize_norm(x, x, gain, 1e-6, RowForm.EXACT)
    quantize_silu_and_mul(tensor(70, 24_576), RowForm.EXACT)

    assert compiled == [
        *["rows_kernel"] * 2,
        "tokens_kernel",
        "unpack_kernel",
        "quantize_kernel",
        "fp8_kernel",
        "add_norm_kernel",
        "silu_and_mul_kernel",
    ]
    assert "wgmma" in compiled.texts["fp8_kernel"]
    assert_in_registers(compiled, "fp8_kernel", tmp_path)


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("tokens", [65, 200])
def test_products_of_rounded_tokens_in_parts(
    compiled: Compiled, tokens: int, tmp_path: Path
) -> None:
    rows = make_rows(tensor(tokens, 1), 4096, RowForm.BY_ROW)
    numbers = torch.zeros(4096, 4096, dtype=torch.float8_e4m3fn)
    weight = Weight(tensor=numbers, scales=torch.ones(4096))
    tile = choose_rounded_tile(tokens, 4096, 4096, processors=132)
    assert tile is not None
    multiply_in_rounded_parts(rows, weight, tile)

    text = compiled.texts["parts_kernel"]
    assert "wgmma" in text and "cp.async.bulk.tensor" in text
    assert_in_registers(compiled, "parts_kernel", tmp_path)


WORDS = (
    (WeightFormat(kind=WeightKind.INT4, group=(1, 128), has_zeros=True), 8, False),
    (WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32)), 64, True),
    (WeightFormat(kind=WeightKind.INT8, group=(1, 1024)), 64, False),
    (WeightFormat(kind=WeightKind.INT4, group=(1, 32)), 64, True),
    (WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32)), 8, False),
)


FEW_WORDS = (
    (WeightFormat(kind=WeightKind.INT4, group=(1, 128), has_zeros=True), 24_576, True),
    (WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32)), 24_576, True),
    (WeightFormat(kind=WeightKind.FP4_E2M1, group=(1, 32)), 4096, False),
    (WeightFormat(kind=WeightKind.INT4, group=(1, 32)), 4096, False),
)


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize(("format", "tokens", "gated"), often(1, WORDS), ids=str)
def test_products_of_words(
    compiled: Compiled, format: WeightFormat, tokens: int, gated: bool, tmp_path: Path
) -> None:
    assert format.group is not None
    share = 1 if format.kind is WeightKind.INT8 else 2
    groups = (4096, 1024 // format.group[1])
    stored = Weight(
        tensor=torch.zeros(4096, 1024 // share, dtype=torch.uint8 if share == 2 else torch.int8),
        scales=torch.ones(groups),
        zeros=torch.zeros(groups, dtype=torch.int8) if format.has_zeros else None,
        format=format,
    )
    weight = prepare_map(stored, torch.bfloat16)
    (multiply_packed_gated if gated else multiply_packed)(tensor(tokens, 1024), weight)
    multiply_packed(tensor(65, 1024), weight)

    assert compiled == ["words_kernel", "unpack_words_kernel"]
    text = compiled.texts["words_kernel"]
    # Few instructions for each number, of which the assembler code has all.
    assert "bf16x2" in text and "cvt.rn.bf16.s" not in text
    assert ("wgmma" in text) is (tokens > 16)
    assert_in_registers(compiled, "words_kernel", tmp_path)


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("outs", often(1, [16_384, 4096]))
def test_products_of_words_and_many_tokens(compiled: Compiled, outs: int, tmp_path: Path) -> None:
    format = WeightFormat(kind=WeightKind.INT4, group=(1, 128), has_zeros=True)
    stored = Weight(
        tensor=torch.zeros(outs, 512, dtype=torch.uint8),
        scales=torch.ones(outs, 8),
        zeros=torch.zeros(outs, 8, dtype=torch.int8),
        format=format,
    )
    weight = prepare_map(stored, torch.bfloat16, word_tokens=256)
    multiply_packed(tensor(200, 1024), weight)

    assert compiled == ["words_kernel"] and compiled.shared["words_kernel"] <= 227 * 1024
    assert "wgmma" in compiled.texts["words_kernel"]
    assert_in_registers(compiled, "words_kernel", tmp_path)


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize(("format", "outs", "gated"), often(1, FEW_WORDS), ids=str)
def test_products_of_words_by_warps(
    compiled: Compiled, format: WeightFormat, outs: int, gated: bool, tmp_path: Path
) -> None:
    assert format.group is not None
    groups = (outs, 4096 // format.group[1])
    stored = Weight(
        tensor=torch.zeros(outs, 2048, dtype=torch.uint8),
        scales=torch.ones(groups),
        zeros=torch.zeros(groups, dtype=torch.int8) if format.has_zeros else None,
        format=format,
        bias=tensor(outs),
    )
    weight = prepare_map(stored, torch.bfloat16)
    assert isinstance(weight, WordMap)
    multiply_few_words(tensor(5, 4096), weight, gated=gated)

    assert compiled == ["few_words_kernel"]
    text = compiled.texts["few_words_kernel"]
    # Factors come from global memory as instructions take them, 16 bytes at a time.
    wide, narrow = (len(re.findall(rf"ld\.global\S*{size}\.b32", text)) for size in (r"\.v4", ""))
    assert wide >= 24 and narrow - wide <= 68  # of these some are scales and a bias
    assert "cp.async" not in text and "mma.sync" in text and "wgmma" not in text
    assert_in_registers(compiled, "few_words_kernel", tmp_path)


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_products_of_words_with_a_norm_or_a_sum(compiled: Compiled, tmp_path: Path) -> None:
    format = WeightFormat(kind=WeightKind.INT4, group=(1, 128), has_zeros=True)
    large, small = (
        prepare_map(
            Weight(
                tensor=torch.zeros(outs, 2048, dtype=torch.uint8),
                scales=torch.ones(outs, 32),
                zeros=torch.zeros(outs, 32, dtype=torch.int8),
                format=format,
            ),
            torch.bfloat16,
        )
        for outs in (24_576, 4096)
    )
    assert isinstance(large, WordMap) and isinstance(small, WordMap)
    multiply_few_words(tensor(1, 4096), large, norm=tensor(4096), eps=1e-6, gated=True)
    text = compiled.texts["few_words_kernel"]
    # The normalized token comes from shared memory, 16 bytes at a time.
    assert len(re.findall(r"ld\.shared\.v4\.b32", text)) >= 8 and "rsqrt" in text
    assert_in_registers(compiled, "few_words_kernel", tmp_path)

    multiply_few_words(tensor(5, 4096), small, total=tensor(5, 4096))
    assert "rsqrt" not in compiled.texts["few_words_kernel"]
    assert compiled == ["few_words_kernel"] * 2
    assert_in_registers(compiled, "few_words_kernel", tmp_path)


@given(outs=st.integers(1, 200_000), units=st.integers(1, 256), least=st.sampled_from((1, 2, 4)))
def test_warps_divide_the_units_of_a_product(outs: int, units: int, least: int) -> None:
    tile = choose_warp_tile(outs, units * least, least)

    assert units * least % tile.warps == 0 and tile.warps >= least
    assert tile.rows % 16 == 0 and 64 % tile.rows == 0


def assert_in_registers(compiled: Compiled, name: str, folder: Path) -> None:
    """Assert that a kernel keeps nothing of its own in memory."""
    (folder / "cubin").write_bytes(compiled.binaries[name])
    tool = Path(triton.knobs.nvidia.ptxas.path).parent / "cuobjdump"
    command = [str(tool), "-res-usage", str(folder / "cubin")]
    usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "STACK:0 " in usage and "LOCAL:0 " in usage


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("dtype", often(1, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(
    "formats",
    often(
        1,
        [
            [(WeightKind.INT4, (1, 128), True)],
            [
                (WeightKind.FP8_E4M3, (128, 128), False),
                (WeightKind.INT4, (1, 128), False),
                (WeightKind.FP4_E2M1, (1, 32), False),
            ],
        ],
    ),
)
def test_products_of_packed_weights(
    compiled: Compiled, dtype: torch.dtype, formats: list[tuple[WeightKind, Any, bool]]
) -> None:
    def weight(
        outs: int, width: int, kind: WeightKind, group: tuple[int, int], zeros: bool
    ) -> Weight:
        groups = -(-outs // group[0]), -(-width // group[1])
        bits = {WeightKind.INT8: torch.int8, WeightKind.FP8_E4M3: torch.float8_e4m3fn}
        shape = (outs, width if kind in bits else width // 2)
        stored = Weight(
            tensor=torch.zeros(shape, dtype=bits.get(kind, torch.uint8)),
            scales=torch.ones(groups),
            zeros=torch.zeros(groups, dtype=torch.int8) if zeros else None,
            format=WeightFormat(kind=kind, group=group, has_zeros=zeros),
        )
        return prepare_packed(stored)

    for kind, group, zeros in formats:
        multiply_packed(tensor(1, 1024, dtype=dtype), weight(4096, 1024, kind, group, zeros))
        multiply_packed_gated(
            tensor(33, 1024, dtype=dtype), weight(18_432, 1024, kind, group, zeros)
        )
        multiply_packed(tensor(65, 1024, dtype=dtype), weight(64, 1024, kind, group, zeros))

    assert compiled == ["split_kernel", "split_kernel", "unpack_kernel"] * len(formats)
    assert "cvt.rn.f32.u" not in compiled.texts["split_kernel"], (
        "conversions take longer than loads"
    )


def convolve(rows: int, tokens: int, *, bias: bool = True, pdl: bool = False) -> None:
    """A gated convolution; every row has one token where there are as many."""
    pages = torch.ones(rows, dtype=torch.int64)
    is_first = torch.ones(rows, 1, 1, dtype=torch.bool)
    sources, kept = pages.new_zeros(3, tokens), pages.new_zeros(rows, 2)
    inputs = (
        ConvInputs(pages, is_first, None, None)
        if rows == tokens
        else ConvInputs(pages, is_first, sources, kept)
    )
    convolve_gated_(
        tensor(tokens, 3 * 2048),
        tensor(3, 2048),
        tensor(2048) if bias else None,
        tensor(9, 2, 2048),
        inputs,
        pdl=pdl,
    )


def test_convolutions(compiled: Compiled) -> None:
    convolve(4, 4)
    convolve(4, 4, bias=False)
    convolve(4, 9)

    assert compiled == ["step_kernel", "step_kernel", "convolve_kernel", "keep_kernel"]


def apply_delta(rows: int, tokens: int, *, pdl: bool = False) -> None:
    """A convolution and a gated delta rule; every row has one token where there are as many."""
    delta = DeltaRule(key_heads=2, value_heads=4, key_dim=128, value_dim=128, taps=4)
    is_decode, ints = rows == tokens, tensor(rows, dtype=torch.int64)
    chunks = tensor(0 if is_decode else tokens // 64, dtype=torch.int32)
    starts = tensor(rows + 1, dtype=torch.int32)
    conv = ConvInputs(ints, ints, *[None if is_decode else tensor(64, dtype=torch.int64)] * 2)
    inputs = DeltaInputs(
        mixed=convolve_silu_(
            tensor(tokens, delta.channels),
            tensor(4, delta.channels),
            None,
            tensor(9, 3, delta.channels),
            conv,
            pdl=pdl,
        ),
        gates=tensor(tokens, 8),
        outer_gate=tensor(tokens, delta.width),
        rates=torch.ones(4),
        biases=torch.ones(4),
        weight=tensor(128),
        eps=1e-6,
    )
    steps = DeltaSteps(ints, starts, chunks, chunks[:rows], is_decode)
    # Large tiles where kernels overlap, on Hopper.
    tiles = DeltaTiles(warps=4, block=64, stages=3) if pdl else None
    apply_delta_rule_(inputs, delta, torch.ones(3, 4, 128, 128), ints, steps, tiles=tiles, pdl=pdl)


DELTA_CHUNKS = ["prepare_chunks_kernel", "learn_chunks_kernel", "normalize_chunks_kernel"]


@pytest.mark.full
def test_delta_rules(compiled: Compiled, request: pytest.FixtureRequest) -> None:
    has_pdl = "sm_90" in request.node.name
    apply_delta(3, 3, pdl=has_pdl)
    apply_delta(3, 70, pdl=has_pdl)

    learn = "learn_tokens_kernel"
    assert compiled == [
        *["step_kernel", learn],
        *["convolve_kernel", "keep_kernel", learn, *DELTA_CHUNKS, learn],
    ]
    if has_pdl:
        check_waits(compiled)
    # Warps wait for one another at sums over a query and key, at the norm and its store; not for
    # what they learn, which the compiler would wait for in another layout of memories.
    assert compiled.texts[learn].count("bar.sync") <= 8


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_memories_of_delta_rules_stay_in_registers(compiled: Compiled, tmp_path: Path) -> None:
    apply_delta(3, 3, pdl=True)

    assert_in_registers(compiled, "learn_tokens_kernel", tmp_path)


def test_products_of_a_few_tokens(
    compiled: Compiled, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    overlaps = request.node.callspec.params["compiled"] >= 90
    for tokens in (1, 16):
        small_linear(tensor(tokens, 1024), Weight(tensor=tensor(4096, 1024), bias=tensor(4096)))
    few = Weight(tensor=tensor(4096, 4096), bias=tensor(4096))
    multiply_few(tensor(5, 4096), few, tensor(64, dtype=torch.int32), pdl=overlaps)

    assert compiled == ["rows_kernel", "tokens_kernel", "few_tokens_kernel"]
    text = compiled.texts["few_tokens_kernel"]
    assert (
        "mma.sync" in text and "cp.async" in text and text.count("griddepcontrol.wait") == overlaps
    )
    assert_in_registers(compiled, "few_tokens_kernel", tmp_path)


def test_products_of_tens_of_tokens(compiled: Compiled) -> None:
    for tokens in (32, 64, 128):
        tile = choose_split_tile(tokens, 2048, 1024)
        assert tile is not None and tile.parts > 1
        add_norm(
            tensor(tokens, 1024),
            multiply_in_parts(tensor(tokens, 2048), Weight(tensor=tensor(1024, 2048)), tile),
            tensor(1024),
            1e-6,
        )
    gated = choose_gated_tile(32, 1024, 3072)
    assert gated is not None
    multiply_gated(tensor(32, 1024), Weight(tensor=tensor(6144, 1024)), gated)

    assert compiled == ["split_kernel", "add_norm_kernel"] * 3 + ["split_kernel"]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_a_large_product_of_gate_and_up_is_loaded_and_stored_by_the_accelerator(
    compiled: Compiled,
) -> None:
    multiply_gated_tiles(tensor(2048, 1024), tensor(6144, 1024), GatedTile())

    text = compiled.texts["gated_kernel"]
    assert "wgmma" in text and "cp.async.bulk.tensor" in text and "st.global" not in text


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("tokens", [1, 8])
def test_weights_are_asked_for_before_the_wait_and_tokens_after_it(
    compiled: Compiled, tokens: int
) -> None:
    more = {"norm": tensor(1024), "eps": 1e-6, "pdl": True}
    small_linear(tensor(tokens, 1024), Weight(tensor=tensor(4096, 1024)), gated=True, **more)

    before, after = compiled.texts[compiled[0]].split("griddepcontrol.wait")
    begin, loads = before.split("griddepcontrol.launch_dependents")
    assert "ld.global" not in begin
    # Sixteen numbers of 8 bytes or more at a time: rows of gate and up, and the norm's weight.
    assert loads.count("ld.global") > after.count("ld.global") >= 1
    assert "st.global" in after and "st.global" not in before


def test_sums_and_joins_over_ranks(compiled: Compiled) -> None:
    rank, most = Collectives(), 1 << 16
    rank.count = 2
    memory = PeerMemory(
        own=tensor(count_bytes(2, most), dtype=torch.uint8),
        addresses=tensor(2, dtype=torch.int64),
        abandoned=tensor(1, dtype=torch.int32),
    )
    ranks = PushCollectives(rank, memory, most)
    for dtype in (torch.bfloat16, torch.float32):
        ranks.all_reduce(tensor(3, 100, dtype=dtype))
        ranks.all_gather(tensor(3, 100, dtype=dtype))
    ranks.all_gather(tensor(3, 100, dtype=torch.int32))
    x, weight = tensor(3, 1024), tensor(1024)
    ranks.add_norm(x, x, weight, 1e-6)
    ranks.add_norm(x, tensor(2, 3, 1024, dtype=torch.float32), weight, 1e-6)

    assert compiled == [
        *("sum_ranks_kernel", "join_ranks_kernel") * 2,
        "join_ranks_kernel",
        *["add_norm_ranks_kernel"] * 2,
    ]
    # What a peer writes is read anew until it is there.
    for name in set(compiled):
        assert "ld.volatile.global" in compiled.texts[name], name


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_every_kernel_of_a_step_waits_where_launches_overlap(compiled: Compiled) -> None:
    x, weight, whole = tensor(1, 1024), tensor(1024), tensor(1, dtype=torch.int64)
    embed_norm(whole, x, weight, 1e-6, pdl=True)
    add_norm(x, x, weight, 1e-6, pdl=True)
    fused_silu_and_mul(x, pdl=True)
    table, pool = tensor(40, 2, 64, dtype=torch.float32), tensor(9, 2, 64, 2, 128)
    more = {"heads": 4, "eps": 1e-6, "pdl": True}
    rope_and_store_kv(x, tensor(6, 128), table, whole, whole, pool, **more)
    warm_row = {"temperature": torch.ones(1), "seeds": whole, "positions": whole}
    rows = Processing(rows=whole[:1], parts=((Near(), {"reach": torch.ones(1)}),))
    fused_sample(tensor(1, 1000), Sampling(**warm_row, processing=rows), pdl=True)
    fused_sample(tensor(1, 1000), Sampling(**warm_row, top_p=torch.ones(1)), pdl=True)
    mix(1, None, pdl=True)
    convolve(4, 4, pdl=True)
    convolve(4, 9, pdl=True)

    assert len(compiled.texts) == 17
    check_waits(compiled)
    # What follows it reads tables that the kernels before it wrote.
    first = compiled.texts["embed_norm_kernel"]
    assert first.index("griddepcontrol.wait") < first.index("griddepcontrol.launch_dependents")


def check_waits(compiled: Compiled) -> None:
    """Assert that every kernel waits once, in each of its programs, before it writes."""
    for name, text in compiled.texts.items():
        assert text.count("griddepcontrol.wait") == 1, name
        assert text.count("griddepcontrol.launch_dependents") == 1, name
        assert "st.global" not in text.split("griddepcontrol.wait")[0], name


def test_kernels_without_overlap_do_not_wait(compiled: Compiled) -> None:
    add_norm(tensor(3, 1024), None, tensor(1024), 1e-6)

    assert "griddepcontrol" not in compiled.texts["add_norm_kernel"]


@pytest.mark.parametrize(
    ("tokens", "kernels"),
    often(
        1,
        [
            (1, ["route_kernel", "gate_up_rows_kernel", "down_rows_kernel"]),
            (600, ["route_kernel", "place_kernel", *ROUTED[1:]]),
            (16, ROUTED),
            (100, ROUTED),
        ],
    ),
)
def test_experts(compiled: Compiled, tokens: int, kernels: list[str]) -> None:
    mix(tokens, None)

    assert compiled == kernels


@pytest.mark.full
@pytest.mark.parametrize(
    ("tokens", "placed", "gate"),
    often(
        1,
        [
            (600, True, ClampedGate(limit=7.0, slope=1.702)),
            (1, False, ClampedGate(limit=7.0, slope=1.702)),
            (100, False, Activation.GELU_TANH),
        ],
    ),
)
def test_experts_that_were_chosen_before(
    compiled: Compiled, tokens: int, placed: bool, gate: Activation | ClampedGate
) -> None:
    mix_chosen_experts(
        tensor(tokens, 512),
        tensor(tokens, 2),
        tensor(tokens, 2, dtype=torch.int64),
        Weight(tensor=tensor(16, 384, 512), bias=tensor(16, 384)),
        Weight(tensor=tensor(16, 512, 192), bias=tensor(16, 512)),
        gate,
        slots=tensor(tokens, dtype=torch.int64),
        page_size=64,
    )

    assert compiled == ["arrange_kernel", *["place_kernel"] * placed, *ROUTED[1:]]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_experts_whose_weights_come_by_the_tensor_memory_accelerator(compiled: Compiled) -> None:
    mix(64, HOPPER)

    assert compiled == ROUTED


def make_fp8_experts(group: list[int]) -> list[Weight]:
    """Gate and up, and down, of 16 experts with the sizes of 30B-A3B."""
    weights = []
    for outs, width in ((1536, 2048), (2048, 768)):
        numbers = torch.zeros(16, outs, width, dtype=torch.float8_e4m3fn)
        rows, columns = min(group[0], outs), min(group[1], width)
        scales = torch.ones(16, outs // rows, width // columns)
        format = WeightFormat(kind=WeightKind.FP8_E4M3, group=(group[0], group[1]))
        weights.append(prepare_experts(Weight(tensor=numbers, scales=scales, format=format)))
    return weights


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("group", often(1, [[128, 128], [1, 2048]]))
def test_experts_in_8_bits(compiled: Compiled, group: list[int], tmp_path: Path) -> None:
    experts = Experts(count=16, per_token=8, intermediate=768, renormalize=True)
    weights = make_fp8_experts(group)
    gate_up, down = weights
    for tokens in (1, 64):
        mix_experts(
            tensor(tokens, 2048),
            tensor(tokens, 16),
            experts,
            gate_up,
            down,
            slots=tensor(tokens, dtype=torch.int64),
            page_size=64,
            tiles=None if tokens == 1 else HOPPER,
        )

    rows = ["gate_up_rows_kernel", "down_rows_kernel"]
    assert compiled == ["route_kernel", *rows, *ROUTED]
    for name in rows:
        assert re.search(r"ld\.global\S*\.v4\.b32", compiled.texts[name])
        assert_in_registers(compiled, name, tmp_path)


WORDS = ["arrange_kernel", "gate_up_words_kernel", "down_words_kernel", "combine_kernel"]


@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize("group", often(1, [[128, 128], [1, 2048]]))
def test_experts_in_8_bits_of_tokens_in_8_bits(
    compiled: Compiled, group: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock_triton.experts.can_multiply_rows", lambda device: True)
    experts = Experts(count=16, per_token=8, intermediate=768, renormalize=True)
    weights = make_fp8_experts(group)
    for tokens in (100, 600):
        mix_experts(tensor(tokens, 2048), tensor(tokens, 16), experts, *weights)
        texts = [compiled.texts[name] for name in ("gate_up_tiles_kernel", "down_tiles_kernel")]
        assert all(re.search(r"wgmma\S*e4m3\.e4m3", text) for text in texts)
        for name in ("gate_up_tiles_kernel", "down_tiles_kernel"):
            assert_in_registers(compiled, name, tmp_path)

    assert compiled.count("quantize_kernel") == 4


@pytest.mark.full
@pytest.mark.parametrize("compiled", [90], indirect=True)
@pytest.mark.parametrize(
    ("kind", "group"), often(1, [(WeightKind.FP4_E2M1, 32), (WeightKind.INT4, 128)])
)
def test_experts_in_4_bits(compiled: Compiled, kind: WeightKind, group: int) -> None:
    weights = []
    for outs, width in ((384, 320), (320, 192)):
        numbers = torch.zeros(16, outs, width // 2, dtype=torch.uint8)
        scales = torch.ones(16, outs, -(-width // group))
        format = WeightFormat(kind=kind, group=(1, group))
        packed = Weight(tensor=numbers, scales=scales, format=format, bias=tensor(16, outs))
        weights.append(prepare_experts(packed))
    for tokens in (1, 100):
        mix_chosen_experts(
            tensor(tokens, 320),
            tensor(tokens, 2),
            tensor(tokens, 2, dtype=torch.int64),
            *weights,
            ClampedGate(limit=7.0, slope=1.702),
        )

    assert compiled == WORDS * 2
    assert "mma.sync" in compiled.texts["gate_up_words_kernel"] or (
        "wgmma" in compiled.texts["gate_up_words_kernel"]
    )


def mix(tokens: int, tiles: Tiles | None, *, pdl: bool = False) -> None:
    """What the experts of a step make of so many tokens."""
    experts = Experts(count=16, per_token=2, intermediate=192, renormalize=True)
    x, scores, slots = tensor(tokens, 512), tensor(tokens, 16), tensor(tokens, dtype=torch.int64)
    fused_mix_experts(
        x,
        scores,
        experts,
        tensor(16, 384, 512),
        tensor(16, 512, 192),
        slots=slots,
        page_size=64,
        tiles=tiles,
        pdl=pdl,
    )


@pytest.mark.parametrize(("tokens", "rope_dim"), [(3, 128), (100, 64)])
def test_heads(compiled: Compiled, tokens: int, rope_dim: int) -> None:
    whole = tensor(tokens, dtype=torch.int64)
    table = tensor(40, 2, rope_dim // 2, dtype=torch.float32)

    rope_and_store_kv(
        tensor(tokens, 4096),
        tensor(24, 128),
        table,
        whole,
        whole,
        tensor(9, 2, 64, 8, 128),
        heads=16,
        eps=1e-6,
    )

    assert compiled == ["heads_kernel"]


ROWS = 9
SAMPLINGS: dict[str, Callable[[], Sampling]] = {
    "greedy": Sampling,
    "temperature": lambda: Sampling(**warm()),
    "cut": lambda: Sampling(
        **warm(),
        top_k=tensor(ROWS, dtype=torch.int64),
        top_p=torch.ones(ROWS),
        min_p=torch.ones(ROWS),
        top_logprobs=0,
    ),
    "masked": lambda: Sampling(**warm(), mask=tensor(ROWS, 4748, dtype=torch.int32)),
    "processed": lambda: Sampling(**warm(), processing=process(Near())),
    "processed, masked": lambda: Sampling(
        **warm(), processing=process(Lift()), mask=tensor(ROWS, 4748, dtype=torch.int32)
    ),
    "processed, cut": lambda: Sampling(
        **warm(), top_p=torch.ones(ROWS), processing=process(Near())
    ),
    "cut, masked": lambda: Sampling(
        **warm(), top_p=torch.ones(ROWS), mask=tensor(ROWS, 4748, dtype=torch.int32)
    ),
}
SAMPLED = ["part_kernel", "join_kernel"]
CUTTING = ["survey_kernel", "choose_kernel", "cut_kernel"]
KERNELS = {
    "cut": [*CUTTING, "part_kernel", "join_kernel"],
    "cut, masked": [*CUTTING, "part_kernel", "join_kernel"],
    "processed": ["take_kernel", "scale_kernel", *SAMPLED, *SAMPLED],
    "processed, masked": ["take_kernel", *SAMPLED, *SAMPLED],
    "processed, cut": [
        "take_kernel",
        "scale_kernel",
        *CUTTING,
        *SAMPLED,
        *CUTTING,
        *SAMPLED,
    ],
}
"""Where they are more than those of any sampling."""


def process(processor: LogitsProcessor) -> Processing:
    """The processing of two rows."""
    columns = {name: torch.ones(2) for name in processor.columns}
    return Processing(rows=torch.tensor([1, 5]), parts=((processor, columns),))


def warm() -> dict[str, torch.Tensor]:
    """What rows with a temperature need."""
    whole = tensor(ROWS, dtype=torch.int64)
    return {"temperature": torch.ones(ROWS), "seeds": whole, "positions": whole}


@pytest.mark.parametrize("asked", often(5, SAMPLINGS))
def test_sampling(compiled: Compiled, asked: str) -> None:
    fused_sample(tensor(ROWS, 151_936), SAMPLINGS[asked]())

    assert compiled == KERNELS.get(asked, SAMPLED)


@pytest.mark.parametrize("vocab", often(0, [1000, 37, 4099, 262_144]))
def test_truncation_of_any_vocabulary(compiled: Compiled, vocab: int) -> None:
    fused_sample(tensor(ROWS, vocab), SAMPLINGS["cut"]())

    assert compiled == KERNELS["cut"]
