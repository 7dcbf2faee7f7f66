"""The compiled modules for Hopper, and where FlashInfer finds them without a compiler.

A library at AOT/NAME/NAME.so is loaded directly. FlashInfer's own module of FMHA v2 has 132
kernels, of which this backend calls one per head size. `build` makes that module from those only,
and a file next to it lists its head sizes.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from headstock.spi import AttentionQuery, FullKV, Phase

LOG = logging.getLogger("headstock.trtllm")

SHORT = {"bfloat16": "bf16", "float16": "fp16"}
"""Type names in module names."""
HEAD_DIMS = "head_dims"
"""The file next to a module of FMHA v2."""
MADE_WITH = "made_with"
"""The file next to a module made by `build`: FlashInfer's version.

An upgrade of FlashInfer leaves both in place.
"""


@frozen(kw_only=True)
class KernelNeed:
    """The shapes to compile for: FMHA v2 with all head sizes, XQA for each combination."""

    head_dims: tuple[int, ...]
    page_sizes: tuple[int, ...]
    ratios: tuple[int, ...]
    q_dtype: str
    kv_dtype: str
    phases: frozenset[Phase]

    @classmethod
    def of(cls, query: AttentionQuery, page_size: int) -> KernelNeed:
        """The shapes that a query needs."""
        group = query.groups[0]  # one shape for all: no mixed groups are claimed
        assert isinstance(group.layout, FullKV), group.layout
        return cls(
            head_dims=(group.layout.k_dim,),
            page_sizes=(page_size,),
            ratios=(group.heads // group.layout.kv_heads,),
            q_dtype=group.q_dtype,
            kv_dtype=group.kv_dtype,
            phases=query.phases,
        )

    @property
    def arguments(self) -> list[str]:
        """The arguments of `python -m headstock_trtllm.build`."""
        options: dict[str, tuple[object, ...]] = {
            "--head-dim": self.head_dims,
            "--page-size": self.page_sizes,
            "--ratio": self.ratios,
            "--q-dtype": (self.q_dtype,),
            "--kv-dtype": (self.kv_dtype,),
            "--phase": tuple(sorted(phase.value for phase in self.phases)),
        }
        return [word for name, values in options.items() for word in (name, *map(str, values))]

    @property
    def prompts(self) -> bool:
        """Whether FMHA v2 is needed."""
        return bool(self.phases - {Phase.DECODE})


def prefill_name(dtype: str) -> str:
    """FlashInfer's name for the module of FMHA v2 with queries, KV and output of one type."""
    return f"trtllm_fmha_v2_q_paged_kv_nhd_{SHORT[dtype]}_{SHORT[dtype]}"


def _is_fresh(module: Path) -> bool:
    """Whether the module exists, and was not made with another version of FlashInfer."""
    mark = module.parent / MADE_WITH
    # A module without the mark came with FlashInfer, and is replaced by upgrades.
    return module.exists() and (
        not mark.exists() or mark.read_text() == import_module("flashinfer").__version__
    )


def has_prefill(folder: Path, name: str, head_dims: tuple[int, ...]) -> bool:
    """Whether the folder has the module with these head sizes.

    A module without the file is FlashInfer's own and has all sizes.
    """
    listed = folder / name / HEAD_DIMS
    if not _is_fresh(folder / name / f"{name}.so"):
        return False
    return not listed.exists() or set(head_dims) <= set(map(int, listed.read_text().split()))


def decode_specs(need: KernelNeed) -> list[Any]:
    """FlashInfer's descriptions of the modules of XQA."""
    gen_xqa_module: Any = import_module("flashinfer.jit.xqa").gen_xqa_module
    q, kv = getattr(torch, need.q_dtype), getattr(torch, need.kv_dtype)
    return [
        gen_xqa_module(q, kv, page_size, head_dim, ratio, False, q)
        for head_dim in need.head_dims
        for page_size in need.page_sizes
        for ratio in need.ratios
    ]


def missing_modules(need: KernelNeed) -> list[str]:
    """The names of modules that are not compiled yet."""
    folder: Path = import_module("flashinfer.jit").env.FLASHINFER_AOT_DIR
    names = []
    if need.prompts and not has_prefill(folder, prefill_name(need.q_dtype), need.head_dims):
        names.append(prefill_name(need.q_dtype))
    if Phase.DECODE in need.phases:
        names += [module.name for module in decode_specs(need) if not _is_fresh(module.aot_path)]
    return names


def ensure_compiled(need: KernelNeed) -> None:
    """Compile the missing modules in a separate process, and log it.

    raises: ValueError when that fails, or this process cannot load the result
    """
    names = missing_modules(need)
    if not names:
        return
    folder: Path = import_module("flashinfer.jit").env.FLASHINFER_AOT_DIR
    loaded = [name for name in names if is_loaded(folder / name / f"{name}.so")]
    command = [sys.executable, "-m", "headstock_trtllm.build", *need.arguments]
    LOG.warning("compiling %s, once: they are kept next to flashinfer", ", ".join(names))
    began = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        output = " ".join((result.stderr or result.stdout).split())[-600:]
        raise ValueError(f"{output}; to see all of it: {' '.join(['python', *command[1:]])}")
    LOG.warning("compiled after %.1f s", time.monotonic() - began)
    if loaded:
        raise ValueError(
            f"heads of {', '.join(map(str, need.head_dims))} were compiled just now, after this "
            "process had loaded the kernels without them; start it again"
        )


def is_loaded(library: Path, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether this process has loaded the library: it never loads another of that name."""
    return maps.exists() and str(library) in maps.read_text()
