"""`headstock bench --profile`: classes of kernels and operations, and times a step."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.bench.test_bench_cli import run

from headstock_bench.profile import (
    OWN_KERNELS,
    TimeShare,
    classify_operation,
    divide_busy_time,
    make_profile,
)

__all__ = ["run"]

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flash::FlashAttnFwdSm90<...>", "attention"),
        ("decode_kernel", "attention"),
        ("aten::sparse_sampled_addmm", "attention"),
        ("nvjet_tst_128x256_64x4_h_bz_TNT", "products"),
        ("aten::mm", "products"),
        ("aten::fbgemm_linear_fp16_weight_fp32_activation", "products"),
        ("few_tokens_kernel", "products"),
        ("gated_kernel", "products"),
        ("combine_kernel", "experts"),
        ("part_kernel", "sampling"),
        ("sample_kernel", "sampling"),
        ("add_norm_kernel", "norm, rope, activation"),
        ("aten::index_put_", "copies and indexes"),
        ("void at::native::elementwise_kernel<...>", "copies and indexes"),
        ("cudaLaunchKernelExC", "launches and waits"),
        ("cudaStreamSynchronize", "launches and waits"),
        ("aten::softmax", "sampling"),
        ("what nobody knows", "other"),
    ],
)
def test_names_have_classes(name: str, expected: str) -> None:
    assert classify_operation(name) == expected


def test_each_kernel_of_this_project_has_a_class() -> None:
    files = [*ROOT.glob("plugins/triton-ops/src/**/*.py"), *ROOT.glob("backends/*/src/**/*.py")]
    functions = [
        name
        for file in files
        for name in re.findall(r"@triton\.jit(?s:.*?)\ndef (\w+)\(", file.read_text("utf-8"))
    ]
    assert {name for name in functions if name.endswith("_kernel")} == set(OWN_KERNELS)


@pytest.mark.feature("V9")
def test_times_are_summed_by_class_and_divided_by_steps() -> None:
    kernels = [
        ("nvjet_a", 0.0, 150.0),
        ("flash_c", 150.0, 400.0),
        ("gemv_b", 400.0, 500.0),
        ("nvjet_a", 1000.0, 1150.0),
        ("flash_c", 1150.0, 1400.0),
    ]
    host = [("aten::mm", 50.0, 4), ("cudaGraphLaunch", 150.0, 2)]
    operations = [("aten::mm", 0.0, 50.0), ("cudaGraphLaunch", 1000.0, 1150.0)]
    found = make_profile("w", 2, 0.002, kernels, host, operations, on_gpu=True)
    assert (found.wall_us, found.idle_us, found.python_us) == (1000.0, 550.0, 900.0)
    assert found.device == (
        TimeShare(name="attention", us=250.0, calls=1.0),
        TimeShare(name="products", us=200.0, calls=1.5),
    )
    assert [share.name for share in found.host] == ["launches and waits", "products"]
    assert [share.name for share in found.largest[:2]] == ["flash_c", "nvjet_a"]


@pytest.mark.feature("V9")
def test_work_that_overlaps_hides_no_gap() -> None:
    # Kernels of 1,200 us lie in 800 of 1,000; calls of two threads last 800, and lie in 500.
    kernels = [("nvjet_a", 0.0, 500.0), ("flash_b", 100.0, 600.0), ("gemv_c", 800.0, 1000.0)]
    operations = [("aten::mm", 0.0, 400.0), ("aten::cat", 100.0, 500.0)]
    host = [("aten::mm", 400.0, 1), ("aten::cat", 400.0, 1)]
    found = make_profile("w", 1, 0.001, kernels, host, operations, on_gpu=True)
    assert (found.idle_us, found.python_us) == (200.0, 500.0)
    assert sum(share.us for share in found.device) == 800.0


def test_a_cpu_has_no_idle_device() -> None:
    assert make_profile("w", 1, 0.001, [], [], [], on_gpu=False).idle_us is None


def test_a_kernel_that_waits_for_another_takes_no_time_until_that_ends() -> None:
    spans = [("b", 1.0, 9.0), ("a", 0.0, 5.0), ("c", 2.0, 4.0), ("d", 12.0, 13.0)]
    assert divide_busy_time(spans) == [("a", 5.0), ("b", 4.0), ("c", 0.0), ("d", 1.0)]


@pytest.mark.feature("V9")
def test_a_profile_is_shown_and_kept(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "profile.jsonl"
    code, out, err = run("small", "--runs", "1", "--profile", str(file))
    assert code == 0, err
    (found,) = map(json.loads, file.read_text().splitlines())
    assert found["workload"] == "small" and found["steps"] >= 6
    # A profile by itself says what it is of, as a figure does.
    assert (found["shape"], found["attn"], found["gpu"]) == ("demo", "sdpa", None)
    assert found["commit"] and found["date"] and found["torch"] == torch.__version__
    names = {share["name"] for share in found["host"]}
    assert {"products", "attention"} <= names and found["device"] == []
    # The engine's thread does the work: without it there would be no product of a weight.
    products = next(share for share in found["host"] if share["name"] == "products")
    assert products["calls"] > 5 and 0 < products["us"] < found["wall_us"]
    assert f"profile of small: {found['steps']} steps" in out and "outside operations" in out


@pytest.mark.feature("V9")
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_steps_of_streams_are_those_that_had_work(
    run: Callable[..., Any], tmp_path: Path, overlap: str
) -> None:
    file = tmp_path / "profile.jsonl"
    words = ("first-token:20:3", "--runs", "1", "--overlap", overlap, "--profile", str(file))
    code, _, err = run(*words)
    assert code == 0, err
    # A prompt and a second token, three times; an engine that becomes idle plans further steps.
    assert json.loads(file.read_text())["steps"] == 6


def test_a_file_that_cannot_be_written_is_refused_first(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, err = run("small", "--profile", str(tmp_path / "no" / "file"))
    assert code != 0 and not out and "--profile" in err and "cannot be written" in err
