"""Compiling ahead: FlashInfer's build functions replaced by ones that write what they were asked to
compile.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from headstock.spi import Phase
from headstock_trtllm import build, modules
from headstock_trtllm.modules import (
    HEAD_DIMS,
    MADE_WITH,
    KernelNeed,
    ensure_compiled,
    has_prefill,
    missing_modules,
    prefill_name,
)

NEED = KernelNeed(
    head_dims=(128,),
    page_sizes=(64,),
    ratios=(2,),
    q_dtype="bfloat16",
    kv_dtype="bfloat16",
    phases=frozenset(Phase),
)
NAME = prefill_name("bfloat16")
VARIANTS = ("_softcapping", "_alibi", "", "_skipSoftmax")
SIZES = (64, 80, 128, 256)
NAMED = {
    size: f"fmha_v2_flash_attention_bf16_64_128_S_q_paged_kv_{size}_output_bf16_tma_ws_sm90"
    for size in (64, 128, 256)
}


@dataclass
class Spec:
    """As FlashInfer describes a module."""

    name: str
    sources: list[Path]
    root: Path

    @property
    def aot_path(self) -> Path:
        return self.root / "aot" / self.name / f"{self.name}.so"

    @property
    def jit_library_path(self) -> Path:
        return self.root / "jit" / self.name / f"{self.name}.so"


class Toolchain:
    """FlashInfer's `jit`: `compiled` lists modules in the order in which they were compiled."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.compiled: list[str] = []
        self.env = SimpleNamespace(FLASHINFER_AOT_DIR=root / "aot", FLASHINFER_JIT_DIR=root / "jit")

    def gen_fmha_v2_module(
        self, input_layout: str, input_dtype: Any, output_dtype: Any = None
    ) -> Spec:
        assert (
            input_layout == "Q_PAGED_KV_NHD"
            and str(input_dtype) == "torch.bfloat16"
            and output_dtype is None
        )
        stems = [
            f"fmha_v2_flash_attention_bf16_64_128_S_q_paged_kv_{size}{variant}_output_bf16_tma_ws_sm90"
            for size in SIZES
            for variant in VARIANTS
        ]
        folder = self.root / "generated"
        folder.mkdir(exist_ok=True)
        tail = "(Params_v2 &params, const Launch_params &launch_params, cudaStream_t stream);\n"
        (folder / "fmha_v2_api.h").write_text("".join(f"void run_{stem}{tail}" for stem in stems))
        files = [*(f"{stem}.cu" for stem in stems), "fmha_v2_run.cu", "fmha_v2_jit_binding.cu"]
        return Spec(NAME, [folder / name for name in files], self.root)

    def gen_xqa_module(
        self, q: Any, kv: Any, page_size: int, head_dim: int, ratio: int, window: bool, out: Any
    ) -> Spec:
        assert not window and out is q
        return Spec(f"xqa_{kv}_{page_size}_{head_dim}_{ratio}", [Path("mha.cu")], self.root)

    def build_jit_specs(
        self, specs: list[Spec], verbose: bool = False, skip_prebuilt: bool = True
    ) -> None:
        assert not skip_prebuilt
        for spec in specs:
            self.compiled.append(spec.name)
            spec.jit_library_path.parent.mkdir(parents=True, exist_ok=True)
            spec.jit_library_path.write_text("\n".join(path.name for path in spec.sources))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    tools = Toolchain(tmp_path)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(jit=tools, __version__="0.6.18"))
    monkeypatch.setitem(sys.modules, "flashinfer.jit", tools)
    monkeypatch.setitem(
        sys.modules, "flashinfer.jit.xqa", SimpleNamespace(gen_xqa_module=tools.gen_xqa_module)
    )
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    return tools


def test_only_the_kernels_that_are_called_are_compiled_and_the_others_raise(
    tools: Toolchain,
) -> None:
    build.build(NEED)
    folder = tools.root / "aot" / NAME
    assert (folder / f"{NAME}.so").read_text().split() == [
        *(f"{name}.cu" for name in NAMED.values()),
        "fmha_v2_run.cu",
        "fmha_v2_jit_binding.cu",
        "missing_kernels.cu",
    ]
    # All that are claimed, for a process that needs another one later: it never loads this again.
    assert (folder / HEAD_DIMS).read_text() == "64 128 256\n"
    stubs = (tools.root / "generated" / "missing_kernels.cu").read_text()
    declared = re.findall(r"run_\w+", (tools.root / "generated" / "fmha_v2_api.h").read_text())
    defined = re.findall(r"^void (run_\w+)", stubs, re.MULTILINE)
    assert sorted(declared) == sorted([*defined, *(f"run_{name}" for name in NAMED.values())])
    assert stubs.count("throw std::runtime_error") == len(defined) == len(SIZES) * len(VARIANTS) - 3
    assert "headstock_trtllm.build" in stubs and str(folder) in stubs


def test_what_is_there_is_not_compiled_again_and_head_sizes_add_up(tools: Toolchain) -> None:
    build.build(NEED)
    build.build(NEED)
    xqa = "xqa_torch.bfloat16_64_128_2"
    assert tools.compiled == [NAME, xqa] and missing_modules(NEED) == []
    prompts = frozenset({Phase.EXTEND})
    assert missing_modules(evolve(NEED, head_dims=(64, 256), phases=prompts)) == []
    wider = evolve(NEED, head_dims=(80,), page_sizes=(16, 64), ratios=(1, 2), phases=prompts)
    assert missing_modules(wider) == [NAME]
    build.build(wider)
    folder = tools.root / "aot" / NAME
    assert (folder / HEAD_DIMS).read_text() == "64 80 128 256\n"
    assert tools.compiled == [NAME, xqa, NAME]
    assert "_kv_80_output" in (folder / f"{NAME}.so").read_text()
    decode = evolve(wider, phases=frozenset({Phase.DECODE}))
    assert len(missing_modules(decode)) == 4
    build.build(decode)
    assert len(tools.compiled) == 7 and missing_modules(decode) == []


def test_what_another_version_of_the_library_made_is_compiled_again(
    tools: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.build(NEED)
    assert missing_modules(NEED) == []
    monkeypatch.setattr(sys.modules["flashinfer"], "__version__", "0.7.2")
    assert missing_modules(NEED) == tools.compiled
    build.build(NEED)
    assert missing_modules(NEED) == [] and len(tools.compiled) == 4
    for mark in tools.root.glob(f"aot/*/{MADE_WITH}"):
        mark.unlink()  # as the library's own modules come
    assert missing_modules(NEED) == []


def test_a_module_without_a_list_is_the_library_s_own_and_has_all_head_sizes(
    tmp_path: Path,
) -> None:
    assert not has_prefill(tmp_path, NAME, (128,))
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / HEAD_DIMS).write_text("64 128\n")
    assert not has_prefill(tmp_path, NAME, (128,))
    (tmp_path / NAME / f"{NAME}.so").touch()
    assert has_prefill(tmp_path, NAME, (128,)) and not has_prefill(tmp_path, NAME, (128, 256))
    (tmp_path / NAME / HEAD_DIMS).unlink()
    assert has_prefill(tmp_path, NAME, (128, 256))


def test_a_library_that_names_its_kernels_otherwise_is_found_out(
    tools: Toolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["--head-dim", "72", "--phase", "prefill"]) == 1
    assert (
        "FlashInfer: expected one kernel for each head_dim of (64, 72, 128, 256), got 3"
        in capsys.readouterr().err
    )
    assert tools.compiled == []


def test_the_command_says_what_it_compiles(
    tools: Toolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        build.main(["--head-dim", "64", "128", "--page-size", "16", "--phase", "prefill", "decode"])
        == 0
    )
    said = capsys.readouterr().out
    assert (
        f"compiling {NAME} (6 files)" in said
        and "compiling xqa_torch.bfloat16_16_64_1 (1 files)" in said
    )
    assert "3 modules after" in said and str(tools.root / "aot") in said


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(
    tools: Toolchain, capsys: pytest.CaptureFixture[str]
) -> None:
    (tools.root / "aot").write_text("in the way")
    assert build.main(["--head-dim", "128"]) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("cannot compile TensorRT-LLM's kernels: FileExistsError")
        and said.count("\n") == 1
    )


def test_the_process_is_asked_for_what_the_shape_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[KernelNeed] = []
    monkeypatch.setattr(build, "build", asked.append)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    need = evolve(
        NEED, page_sizes=(16, 64), kv_dtype="float8_e4m3fn", phases=frozenset({Phase.DECODE})
    )
    for each in (NEED, need):
        assert build.main(each.arguments) == 0
    assert asked == [NEED, need]


def test_a_start_compiles_in_another_process_says_so_and_passes_its_words_on(
    tools: Toolchain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commands: list[list[str]] = []
    code = 0

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code, "", "nvcc: not found")

    monkeypatch.setattr(modules.subprocess, "run", run)
    with caplog.at_level("WARNING"):
        ensure_compiled(NEED)
    assert commands == [[sys.executable, "-m", "headstock_trtllm.build", *NEED.arguments]]
    assert f"compiling {NAME}, xqa_torch.bfloat16_64_128_2, once" in caplog.text
    code = 1
    with pytest.raises(
        ValueError,
        match=r"nvcc: not found; to see all of it: python -m headstock_trtllm.build --head",
    ):
        ensure_compiled(NEED)
    build.build(NEED)
    commands.clear()
    ensure_compiled(NEED)
    assert commands == []


def test_what_was_loaded_before_other_head_sizes_were_compiled_says_so(
    tools: Toolchain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = evolve(NEED, head_dims=(64,))
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="", stderr="")
    )
    ensure_compiled(other)  # nothing is loaded

    maps = tmp_path / "maps"
    library = tools.root / "aot" / NAME / f"{NAME}.so"
    maps.write_text(f"7f00-7f01 r-xp 00000000 00:00 5 {library} (deleted)\n")
    assert modules.is_loaded(library, maps) and not modules.is_loaded(tmp_path / "x.so", maps)
    assert not modules.is_loaded(library) and not modules.is_loaded(library, tmp_path / "none")
    monkeypatch.setattr(modules, "is_loaded", lambda library: NAME in library.name)
    with pytest.raises(ValueError, match=r"heads of 64 were compiled just now, .* start it again"):
        ensure_compiled(other)


def test_the_gpu_is_named_before_the_library_is_imported(
    tools: Toolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    assert build.main(["--head-dim", "128"]) == 0
    assert os.environ.pop("FLASHINFER_CUDA_ARCH_LIST") == "9.0a"
