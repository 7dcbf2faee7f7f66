"""Compile the modules that Hopper needs and put them where FlashInfer finds them.

    python -m headstock_trtllm.build --head-dim 128 --page-size 64 --ratio 2
        --q-dtype bfloat16 --kv-dtype bfloat16 --phase prefill extend decode

Needs nvcc. MAX_JOBS sets how many files are compiled in parallel, FLASHINFER_CUDA_ARCH_LIST the
GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from headstock.spi import Phase
from headstock_trtllm import modules
from headstock_trtllm.modules import HEAD_DIMS, MADE_WITH, SHORT, KernelNeed
from headstock_trtllm.plugin import CLAIMED_HEAD_DIMS

LAUNCHER = re.compile(
    r"^void (run_fmha_v2_\w+)\((Params_v2 &params, const Launch_params &launch_params, .*?)\);",
    re.M,
)

STUB = """void {name}(Params_v2 &, const Launch_params &, cudaStream_t) {{
  throw std::runtime_error("this build of FMHA v2 lacks {name}; "
                           "python -m headstock_trtllm.build adds head sizes, "
                           "and without {folder} FlashInfer compiles all of it");
}}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile those of the requested modules that are missing.   returns: the exit code"""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, nargs="+", required=True)
    parser.add_argument("--page-size", type=int, nargs="+", default=[64])
    parser.add_argument("--ratio", type=int, nargs="+", default=[1], help="query heads a KV head")
    parser.add_argument("--q-dtype", choices=sorted(SHORT), default="bfloat16")
    parser.add_argument("--kv-dtype", choices=[*sorted(SHORT), "float8_e4m3fn"], default="bfloat16")
    parser.add_argument(
        "--phase",
        nargs="+",
        choices=[phase.value for phase in Phase],
        default=["prefill", "decode"],
    )
    options = parser.parse_args(arguments)
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # read when flashinfer is imported
    need = KernelNeed(
        head_dims=tuple(options.head_dim),
        page_sizes=tuple(options.page_size),
        ratios=tuple(options.ratio),
        q_dtype=options.q_dtype,
        kv_dtype=options.kv_dtype,
        phases=frozenset(map(Phase, options.phase)),
    )
    try:
        build(need)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(
            f"cannot compile TensorRT-LLM's kernels: {type(error).__name__}: {error}\n"
        )
        return 1
    return 0


def build(need: KernelNeed) -> None:
    """Compile the missing modules and keep them.

    raises: OSError when FlashInfer's folder cannot be written; RuntimeError with the compiler's
        words
    """
    jit: Any = import_module("flashinfer.jit")
    env = jit.env
    env.FLASHINFER_AOT_DIR.mkdir(parents=True, exist_ok=True)
    env.FLASHINFER_JIT_DIR.mkdir(parents=True, exist_ok=True)
    with (env.FLASHINFER_JIT_DIR / "headstock-trtllm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Checked again under the lock: another process may have compiled them meanwhile.
        names = modules.missing_modules(need)
        specs = [module for module in modules.decode_specs(need) if module.name in names]
        head_dims = need.head_dims
        if modules.prefill_name(need.q_dtype) in names:
            head_dims = _merge_head_dims(
                env.FLASHINFER_AOT_DIR / modules.prefill_name(need.q_dtype) / HEAD_DIMS, head_dims
            )
            specs.insert(0, _prefill_spec(need.q_dtype, head_dims))
        for module in specs:
            _print_line(f"compiling {module.name} ({len(module.sources)} files)")
        began = time.monotonic()
        # There may be a prebuilt module with other head sizes; it is rebuilt with both.
        jit.build_jit_specs(specs, skip_prebuilt=False)
        for module in specs:
            _install_module(module, head_dims)
        _print_line(
            f"{len(specs)} modules after {time.monotonic() - began:.1f} s in "
            f"{env.FLASHINFER_AOT_DIR}"
        )


def _print_line(line: str) -> None:
    """Write a line at once, even to a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _merge_head_dims(listed: Path, head_dims: tuple[int, ...]) -> tuple[int, ...]:
    """These head sizes, those that the backend claims, and those of the existing module."""
    before = map(int, listed.read_text().split()) if listed.exists() else ()
    # All claimed sizes, even if not requested: a process never loads a second module of the same
    # name, so it could not use sizes compiled later.
    return tuple(sorted({*before, *CLAIMED_HEAD_DIMS, *head_dims}))


def _prefill_spec(dtype: str, head_dims: tuple[int, ...]) -> Any:
    """FlashInfer's module of FMHA v2 with only the kernels that this backend calls.

    These are causal, without soft-cap, ALiBi or softmax statistics, for these head sizes. The other
    launchers, which the module's table names, raise.

    writes: missing_kernels.cu beside FlashInfer's generated sources
    raises: ValueError when the library's sources have other names
    """
    jit: Any = import_module("flashinfer.jit")
    spec: Any = jit.gen_fmha_v2_module("Q_PAGED_KV_NHD", getattr(torch, dtype))
    endings = tuple(
        f"_S_q_paged_kv_{size}_output_{SHORT[dtype]}_tma_ws_sm90.cu" for size in head_dims
    )
    # One kernel per head size out of 132. One head size and a module of XQA took 50 s on one core
    # (decision 0014); with more cores, kernels are compiled in parallel.
    kernels = [path for path in spec.sources if path.name.endswith(endings)]
    if len(kernels) != len(head_dims):
        raise ValueError(
            f"FlashInfer: expected one kernel for each head_dim of {head_dims}, got {len(kernels)}"
        )
    others = [path for path in spec.sources if not path.name.startswith("fmha_v2_flash_attention")]
    folder = others[0].parent
    stubs = folder / "missing_kernels.cu"
    stubs.write_text(
        missing_kernels((folder / "fmha_v2_api.h").read_text(), kernels, spec.aot_path.parent)
    )
    return replace(spec, sources=[*kernels, *others, stubs])


def missing_kernels(api: str, kernels: Sequence[Path], folder: Path) -> str:
    """CUDA source in which each launcher without a definition raises an error."""
    present = {f"run_{path.stem}" for path in kernels}
    declared = [match.group(1) for match in LAUNCHER.finditer(api)]
    # The module's table names every launcher, so all of them must exist to link.
    stubs = [STUB.format(name=name, folder=folder) for name in declared if name not in present]
    return "\n".join(['#include <stdexcept>\n#include "fmha_v2_api.h"', *stubs])


def _install_module(spec: Any, head_dims: tuple[int, ...]) -> None:
    """Copy a compiled module to where FlashInfer loads it without a compiler.

    writes: AOT/NAME/
    """
    folder = spec.aot_path.parent
    folder.mkdir(parents=True, exist_ok=True)
    spec.aot_path.unlink(missing_ok=True)  # never an old module with a new list of head sizes
    if spec.name.startswith("trtllm_fmha_v2"):
        (folder / HEAD_DIMS).write_text(" ".join(map(str, head_dims)) + "\n")
    (folder / MADE_WITH).write_text(import_module("flashinfer").__version__)
    fresh = folder / f"{spec.name}.so.new"
    # Copied and then renamed, so that no other process ever loads half a library.
    shutil.copyfile(spec.jit_library_path, fresh)
    fresh.replace(spec.aot_path)


if __name__ == "__main__":
    sys.exit(main())
