"""`headstock bench` over the real engine and the bundled model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from often import often

import headstock_bench.command as bench
from headstock import LLM
from headstock.cli.main import main
from headstock_bench.benchmark import Benchmark
from headstock_bench.latency_workloads import NAME_FORMS, LatencyWorkload
from headstock_bench.workloads import WORKLOADS, Workload, draw_lengths, draw_tokens

FORMAT = (
    "engine version commit date gpu torch shape workload attn cache runner page_size kv_dtype "
    "runs_s median_s in_tok_s out_tok_s"
).split()
"""What every recorded figure has (docs/benchmarks)."""


def make_workload(count: int, shared: int, own: int, out: int, name: str = "small") -> Workload:
    """Requests with a shared prefix and ids of the demo model."""
    rng = Random(0)
    prefix = draw_tokens(rng, shared)
    prompts = tuple(
        prefix + draw_tokens(rng, length) for length in draw_lengths(rng, count, own, own + 8)
    )
    return Workload(name=name, prompts=prompts, outputs=(out,) * count, temperature=0.0).fit_vocab(
        768
    )


SMALL: Mapping[str, Callable[[], Workload]] = {"small": lambda: make_workload(3, 0, 20, 6)}


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `headstock bench` in this process with one small workload; exit code, output, errors."""
    monkeypatch.setattr(bench, "WORKLOADS", SMALL)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["bench", "--num-pages", "256", *arguments])
        return code, *capsys.readouterr()

    return call


def test_the_start_up_summary_is_folded_to_a_terminals_width(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    code, _, err = run("small", "--runs", "1")
    lines = err.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("plugins "))
    summary = lines[
        start : next(at for at, line in enumerate(lines) if at > start and line[:1].isalpha())
    ]
    assert code == 0 and len(summary) > 1
    assert all(len(line) <= 40 and line.startswith(" " * 10) for line in summary[1:])


@pytest.mark.feature("T20", "G14")
def test_a_figure_has_everything_that_it_depends_on(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "figures.jsonl"
    code, out, err = run(
        "small", "--json", "--runs", "2", "--output", str(file), "--page-size", "8"
    )
    assert code == 0, err
    (record,) = [json.loads(line) for line in out.splitlines()]
    assert [json.loads(line) for line in file.read_text().splitlines()] == [record]
    assert [key for key in FORMAT if key not in record] == []
    assert (record["engine"], record["shape"], record["workload"]) == ("headstock", "demo", "small")
    assert (record["attn"], record["cache"], record["runner"], record["page_size"]) == (
        "sdpa",
        "radix",
        "eager",
        8,
    )
    assert (record["requests"], record["tokens_out"], record["batch"], record["seed"]) == (
        3,
        18,
        256,
        0,
    )
    assert len(record["runs_s"]) == 2 and min(record["runs_s"]) <= record["median_s"] <= max(
        record["runs_s"]
    )
    assert record["out_tok_s"] == pytest.approx(18 / record["median_s"], rel=0.01)
    assert record["threads"] >= 1 and record["peak_kv_pages"] >= 3 and record["cached_tokens"] == 0
    assert (record["options"], record["settings"], record["batch_tokens"]) == (
        [],
        {"num_pages": 256},
        8192,
    )


@pytest.mark.feature("T20", "G14")
def test_a_figure_names_the_options_and_settings_that_were_given(run: Callable[..., Any]) -> None:
    option, more = "sdpa.shared_prefix=on", ("--max-itl-ms", "50", "--max-batch-tokens", "512")
    code, out, err = run("small", "--json", "--runs", "1", "--opt", option, *more)
    assert code == 0, err
    record = json.loads(out)
    assert (record["options"], record["settings"]) == (
        [option],
        {"num_pages": 256, "max_itl_ms": 50.0},
    )
    assert (record["batch_tokens"], record["overlap"]) == (512, False)

    code, out, err = run("small", "--runs", "1", "--opt", option, "--overlap", *more)
    assert code == 0, err
    assert "steps up to 512 tokens, overlap on" in out
    assert (
        f"options   {option}" in out and "settings  {'num_pages': 256, 'max_itl_ms': 50.0}" in out
    )


@pytest.mark.feature("T20", "G14")
def test_people_read_the_same_facts(run: Callable[..., Any]) -> None:
    code, out, _ = run("small", "--runs", "1")
    assert code == 0
    for fact in (
        "small: ",
        "3 requests",
        "demo",
        "batch up to 256",
        "attn sdpa",
        "pages of 16",
        "torch 2",
        "seed 0",
    ):
        assert fact in out


@pytest.mark.full
@pytest.mark.feature("T6")
def test_figures_count_preemptions(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench, "WORKLOADS", {"long": lambda: make_workload(6, 0, 20, 60, "long"), **SMALL}
    )
    code, out, err = run(
        "long",
        "small",
        "--json",
        "--runs",
        "1",
        "--quiet",
        "--num-pages",
        "20",
        "--max-seq-len",
        "128",
    )
    assert code == 0, err
    long, short = [json.loads(line)["preemptions"] for line in out.splitlines()]
    assert long > 0 and short == 0
    out = run("long", "--runs", "1", "--quiet", "--num-pages", "20", "--max-seq-len", "128")[1]
    assert re.search(r"\d cached tokens?, [1-9]\d* preemptions?$", out, re.MULTILINE)


@pytest.mark.feature("T20", "G14")
def test_two_benches_do_the_same_work() -> None:
    tokens = []
    for _ in range(2):
        with LLM("demo", num_pages=256) as llm:
            work = make_workload(3, 0, 20, 6)
            tokens.append(measure_workload(llm, work).timing.tokens)
    assert tokens[0] == tokens[1]


@pytest.mark.feature("T20")
@pytest.mark.parametrize(
    ("name", "seed", "out"), often(1, [("first-token:16:3", 0, 6), ("online:50:1", 1, 239)])
)
def test_latencies_are_measured_where_a_caller_hears_of_tokens(
    run: Callable[..., Any], name: str, seed: int, out: int
) -> None:
    code, text, err = run(name, "--json", "--runs", "2", "--quiet")
    assert code == 0, err
    record = json.loads(text)
    assert [key for key in FORMAT if key not in record] == []
    assert (record["workload"], record["seed"], record["tokens_out"]) == (name, seed, out)
    assert record["finished"] == record["requests"] and record["cached_tokens"] == 0
    for kind in ("ttft", "itl"):
        assert (
            0 < record[f"{kind}_p50_ms"] <= record[f"{kind}_p99_ms"] < 1000 * max(record["runs_s"])
        )
        assert len(record[f"runs_{kind}_p50_ms"]) == 2
    assert record["out_tok_s"] == pytest.approx(out / record["median_s"], rel=0.01)


def test_a_bench_in_which_requests_failed_ends_with_1_and_says_why(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two prompts of 50 pages each are due at once, and the first alone is over the threshold.
    work = LatencyWorkload(
        name="online:9:2",
        prompts=((5,) * 800, (6,) * 800),
        outputs=(4, 4),
        temperature=0.0,
        arrivals=(0.0, 0.0),
    )
    monkeypatch.setattr(bench, "draw_latency_workload", lambda name: work)
    flags = ("--on-pressure", "reject", "--memory-threshold", "0.1", "--runs", "1", "--quiet")
    code, out, err = run("online:9:2", *flags)
    assert (code, err) == (1, "")
    assert "requests  1 of 2 finished" in out
    assert (
        "failed    20% of the KV pool is in use and memory_threshold (--memory-threshold) is 0.1"
        in out
    )


@pytest.mark.full
def test_transformers_does_the_same_work_and_finds_the_same_tokens(run: Callable[..., Any]) -> None:
    code, out, err = run("small", "--json", "--runs", "1", "--compare", "transformers", "--quiet")
    assert code == 0, err
    record = json.loads(out)
    assert [(peer["mode"], peer["error"]) for peer in record["peers"]] == [
        ("generate", None),
        ("continuous", None),
    ]
    for peer in record["peers"]:
        assert peer["difference"] == {"requests": 0, "first": None}
        assert record[f"ratio_{peer['mode']}"] == pytest.approx(
            peer["median_s"] / record["median_s"], rel=0.01
        )


def test_a_shape_is_measured_with_random_weights(run: Callable[..., Any]) -> None:
    code, out, err = run("small", "--shape", "demo", "--json", "--runs", "1", "--quiet")
    assert (code, err) == (0, "")
    assert (json.loads(out)["shape"], json.loads(out)["weights"]) == ("demo", "dummy")


def test_the_help_has_every_workload_and_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    words = re.split(r"[\s,]+", capsys.readouterr().out.split("\nworkloads:\n")[1])
    assert [name for name in (*WORKLOADS, *NAME_FORMS.values()) if name not in words] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["smal"], 2, "did you mean small?"),
        (["onlin:16:200"], 2, "known are small, online:RATE:COUNT, first-token:LENGTH[:COUNT]"),
        (
            ["small", "online:16"],
            2,
            "online:16 is not of the form online:RATE:COUNT, as in online:16:200",
        ),
        (["first-token:9000:1"], 2, "first-token:9000:1 has requests of 9002 tokens"),
        (["online:16:2", "--compare", "transformers"], 2, "--compare takes greedy workloads"),
        (["small", "--runs", "0"], 2, "--runs: expected 1 or more"),
        (["small", "--shape", "qwen3-0.6"], 2, "did you mean qwen3-0.6b?"),
        (["small", "--shape", "demo", "--model", "demo"], 2, "name two models"),
        (["small", "--compare", "vllm"], 2, "known are transformers"),
        (["small", "--output", "/no/such/folder/file"], 6, "cannot be written"),
        (["small", "--max-seq-len", "30"], 2, "small has requests of "),
    ],
)
def test_each_error_is_one_clear_line(
    run: Callable[..., Any], arguments: list[str], code: int, message: str
) -> None:
    exit_code, out, err = run(*arguments, "--quiet")
    assert (exit_code, out) == (code, "")
    assert message in err and len(err.splitlines()) == 1


def measure_workload(llm: LLM, work: Workload) -> Any:
    """The result of one run."""
    return Benchmark(llm, version="0", shape="demo", runs=1).measure(work)


@pytest.mark.feature("T3")
@pytest.mark.full
def test_more_at_once_is_more_throughput_and_more_pages() -> None:
    work = make_workload(32, 0, 16, 4)
    results = {}
    for cap in (1, 64):
        with LLM("demo", num_pages=1024, max_running_requests=cap) as llm:
            results[cap] = measure_workload(llm, work)
    assert results[64].timing.tokens == results[1].timing.tokens
    assert results[64].out_tok_s > 2 * results[1].out_tok_s
    assert results[64].peak_kv_pages > 16 * results[1].peak_kv_pages


@pytest.mark.full
@pytest.mark.feature("S16", "S17")
def test_radix_reuses_a_shared_prefix_and_naive_never_does() -> None:
    work = make_workload(24, 96, 8, 8)
    results = {}
    for cache in ("radix", "naive"):
        with LLM("demo", num_pages=512, cache_type=cache, max_batch_tokens=256) as llm:
            results[cache] = measure_workload(llm, work)
    assert results["naive"].cached_tokens == 0
    # Two prompts fill a step, and a page is in the index once its step is known to be done: later
    # ones find the prefix.
    assert results["radix"].cached_tokens >= 18 * 96
    assert results["radix"].timing.tokens == results["naive"].timing.tokens
    assert results["radix"].peak_kv_pages < results["naive"].peak_kv_pages
