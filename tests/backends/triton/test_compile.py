"""Triton's compiler takes the kernels without a GPU, and they fit on one as computed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from attrs import frozen
from often import often
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from headstock.spi import LayerInfo, Phase
from headstock_conformance import attention as cases
from headstock_triton_attn import backend as module
from headstock_triton_attn.backend import TritonBackend

KIB = 1024
SHARED = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
"""Shared memory of a program by compute capability, from NVIDIA's tuning guides."""
LAYER = LayerInfo(index=0, group=0, scale=0.25, window=100, softcap=30.0)
Compile = Callable[..., dict[str, "Kernel"]]


@frozen
class Kernel:
    """A compiled kernel: its text, and bytes of shared memory and of the stack, for spills."""

    text: str
    shared: int
    stack: int


@pytest.fixture
def compile_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compile:
    """Compile what a step of a row with so many queries would launch, by name."""
    kernels: dict[str, Kernel] = {}
    target = [90]

    def launch(
        kernel: JITFunction[Any], *arguments: Any, grid: object, warmup: bool, **more: Any
    ) -> None:
        options = {name: more.pop(name) for name in ("num_warps",) if name in more}
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | more
        fixed = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        # As at a launch: what is a multiple of 16 can be loaded by 16 bytes.
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, p in enumerate(kernel.params)
            if not p.is_constexpr
            and not p.do_not_specialize
            and not p.do_not_specialize_on_alignment
            and not isinstance(given[p.name], float)
            and (isinstance(given[p.name], torch.Tensor) or given[p.name] % 16 == 0)
        }
        signature = {
            name: "constexpr" if name in fixed else mangle_type(given[name])
            for name in kernel.arg_names
        }
        made = triton.compile(
            ASTSource(kernel, signature, fixed, aligned),
            target=GPUTarget("cuda", target[0], 32),
            options=options,
        )
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        dump = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run(
            [dump, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        (stack,) = re.findall(r"STACK:(\d+)", usage)
        kernels[kernel.__name__] = Kernel(made.asm["ptx"], made.metadata.shared, int(stack))

    def compile_step(
        queries: int, capability: int, *, sinks: bool = True, **shape: Any
    ) -> dict[str, Kernel]:
        target[0] = capability
        kernels.clear()
        monkeypatch.setattr(module, "find_shared_memory", lambda device: SHARED[capability])
        phase = Phase.DECODE if queries == 1 else Phase.EXTEND
        shape = {"heads": 16, "kv_heads": 2, "dtype": torch.bfloat16, "page_size": 64} | shape
        case = cases.make(phase, [(queries, 70)], **shape)
        layer = cases.add_sinks(LAYER, shape["heads"], "cpu") if sinks else LAYER
        backend = TritonBackend(cases.context_of(case, None))
        backend.forward(case.q, layer, backend.plan(case.step), torch.zeros_like(case.q))
        return dict(kernels)

    monkeypatch.setattr(JITFunction, "run", launch)
    monkeypatch.setattr(module, "count_processors", lambda device: 132)
    return compile_step


def test_prompts_of_heads_of_512_fit_on_hopper_and_use_its_tensor_cores(
    compile_step: Compile,
) -> None:
    kernels = compile_step(40, 90, head_dim=512)
    assert list(kernels) == ["attend_kernel"]
    kernel = kernels["attend_kernel"]
    # 64 queries, and two blocks of 32 keys and of as many values, of 1 KiB each.
    assert (64 + 2 * 2 * 32) * KIB <= kernel.shared <= SHARED[90]
    assert kernel.stack < 64
    assert "wgmma.mma_async" in kernel.text and "cp.async" in kernel.text


def test_decode_of_heads_of_512_leaves_room_for_two_programs(compile_step: Compile) -> None:
    kernels = compile_step(1, 90, head_dim=512)
    assert list(kernels) == ["attend_kernel", "merge_kernel"]
    kernel = kernels["attend_kernel"]
    assert 2 * (kernel.shared + KIB) <= SHARED[90] and kernel.stack == 0
    assert "mma.sync" in kernel.text and "cp.async" in kernel.text
    # Parts are merged in an order that no timing changes.
    assert not any(re.search(r"\b(atom|red)\.global", each.text) for each in kernels.values())


@pytest.mark.parametrize("queries", [1, 5, 40])
@pytest.mark.parametrize(
    ("capability", "shape"),
    often(
        1,
        [
            (80, {"head_dim": 80, "page_size": 16}),
            (90, {"head_dim": 512, "dtype": torch.float32}),
            *(
                (capability, {"head_dim": head_dim, "dtype": dtype, "page_size": page_size})
                for capability in SHARED
                for head_dim in (64, 128, 192, 256, 512)
                for dtype in (torch.bfloat16, torch.float32)
                for page_size in (16, 64)
            ),
            *(
                (90, {"head_dim": head_dim, "heads": heads, "kv_heads": 1})
                for head_dim in (64, 512)
                for heads in (1, 32, 71)
            ),
        ],
    ),
)
def test_every_shape_fits_everywhere(
    compile_step: Compile, capability: int, shape: dict[str, Any], queries: int
) -> None:
    kernels = compile_step(queries, capability, **shape)
    assert len(kernels) == (1 if queries == 40 else 2)
    for kernel in kernels.values():
        assert kernel.shared <= SHARED[capability]
        assert kernel.stack <= 128
