"""How long a process takes to its first token, and what its parts take.

    PYTHONPATH=tests:tests/support python -m gpu.start [--out FILE] [--shape qwen3-0.6b] [--attn fa]
    PYTHONPATH=tests:tests/support python -m gpu.start --shape qwen3-8b --tp 2
    PYTHONPATH=tests:tests/support python -m gpu.start --device cpu --attn auto --model demo --tp 2

Each start is `headstock run` in a bare process, timed from outside: from its launch to the first
byte of its answer. Weights are random. Kernels and memory profiles are kept in a temporary folder,
so the first start is that of a machine that has compiled nothing ("cold"). Then come `--turns`
further ones ("warm"), and some of each variant. On a GPU Triton counts the kernels that each loads
and compiles. What importing torch takes, and the first use of the device, is measured beside that
by processes of their own ("probe").

With `--tp N` the same starts on one rank come between those on several ("one rank"), and "ratio" is
that of the times to the first byte. "ranks" has the parts of the other ranks' starts: "waiting" is
for rank 0's choices, "ranks" for devices to be connected once weights are loaded. "end_s" less
"first_token_s" has the end of the process.

On a GPU graphs that are captured late are checked too ("late"): every replay of decode steps
against the same step computed at once, bit by bit; the tokens of single requests against those of
an engine that captured all before the first; and what one capture takes, which is what a request
waits at most.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu import graphs

from headstock import LLM, SamplingParams
from headstock.llm import get_session
from headstock.startup.graph_captures import count_settled_bytes
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory

RUN = "import sys; from headstock.cli.main import main; sys.exit(main())"
KERNELS = """
import atexit, json, sys
seen = {"from disk": 0, "compiled": 0, "from disk, s": 0.0, "compiled, s": 0.0}
compiled = []
atexit.register(lambda: print("kernels", json.dumps(seen), file=sys.stderr, flush=True))
atexit.register(lambda: print("compiled", json.dumps(compiled), file=sys.stderr, flush=True))
from triton import knobs

def describe(src):
    types = "".join(f" {name}:{type}" for name, type in src.signature.items())
    constants = " ".join(str(value)[:20] for _, value in sorted(src.constants.items()))
    aligned = ",".join(str(place[0]) for place in sorted(src.attrs))
    return f"{src.name}{types} | {constants} | {aligned}"[:500]

def note(*, src, cache_hit, times, **more):
    name = "from disk" if cache_hit else "compiled"
    if not cache_hit:
        compiled.append(describe(src))
    seen[name] += 1
    seen[f"{name}, s"] += times.total / 1e6

knobs.compilation.listener = note
"""
"""Has Triton say how many kernels it loads and compiles, for how long, and which it compiles: types
of arguments, constants, places of what 16 divides.
"""
NOTED = ("graph", "memory", " ms")
"""What lines of the summary have that are kept."""
WANTED_SECONDS = 8.0
START_SECONDS = 300
LATE_SECONDS = 120
VARIANTS = {
    "all captured at the start": ("--defer-graphs", "off"),
    "memory measured at each start": ("--memory-profiles", "off"),
    "both, as before": ("--defer-graphs", "off", "--memory-profiles", "off"),
}
LENGTHS = (5, 17, 40, 70, 130, 300, 700, 1500, 3000)
PROBE = """
import json, time
began = time.perf_counter()
parts = {}

def note(name):
    global began
    now = time.perf_counter()
    parts[name], began = round(now - began, 3), now

import numpy
note("numpy")
import torch
note("torch")
if DEVICE == "cuda":
    torch.cuda.is_available(); note("torch.cuda.is_available")
    torch.cuda.get_device_properties(0); note("device properties")
    torch.cuda.mem_get_info(); note("context")
    torch.zeros(1, device="cuda"); torch.cuda.synchronize(); note("first kernel")
    import triton; note("triton")
    torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
    torch.cuda.synchronize(); note("first product")
import tokenizers; note("tokenizers")
import transformers; note("transformers")
print(json.dumps(parts))
"""


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """The findings, as `run.py` wants them.

    `GPU_START` in the environment has further words, as after `python -m gpu.start`.
    """
    for build in builds:
        build.wait()
    return measure(parse_words(shlex.split(os.environ.get("GPU_START", ""))))


def parse_words(words: list[str]) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--attn", default="fa")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="ranks")
    parser.add_argument("--model", help="in place of the shape with random weights")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--variant-turns", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the findings go, as JSON")
    return parser.parse_args(words)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Starts and, on a GPU, checks of late captures."""
    with tempfile.TemporaryDirectory(prefix="headstock-start-") as folder:
        model = asked.model
        if model is None:
            model = str(Path(folder, "model"))
            Path(model).mkdir()
            write_model_directory(MODEL_SHAPES[asked.shape], Path(model))
        found = measure_starts(asked, model, Path(folder))
        write_findings(asked, found)  # what comes takes minutes, and may be cut off
        if asked.device == "cuda" and asked.tp == 1:
            found["late"] = check_late_captures(asked, model)
            found["ok"] = found["ok"] and found["late"]["ok"]
    return found


def write_findings(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write what was found so far to the file that was asked for, if any."""
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1))


def measure_starts(asked: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """Starts of each kind, the first of them with nothing compiled."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton")}
    words = [
        *("run", "-v", "--model", model, "--device", asked.device, "--attn", asked.attn),
        *("--prompt", "Once upon a time", "--max-tokens", "8", "--ignore-eos"),
        *("--memory-profiles", str(folder / "memory")),
    ]
    if asked.model is None:
        words += ["--load-format", "dummy"]
    alone, words = words, [*words, "--tp", str(asked.tp)]
    found: dict[str, Any] = {"cold": start(words, environment), "warm": []}
    if asked.tp > 1:
        start(alone, environment)  # its own memory profile
        found["one rank"] = []
    for _ in range(asked.turns):
        found["warm"].append(start(words, environment))
        if asked.tp > 1:
            found["one rank"].append(start(alone, environment))
    has_variants = asked.device == "cuda" and asked.tp == 1
    for name, flags in VARIANTS.items() if has_variants else ():
        # A variant has a memory profile of its own, so its first start is left out.
        turns = [start([*words, *flags], environment) for _ in range(asked.variant_turns + 1)]
        found[name] = turns[1:]
    probe = [sys.executable, "-c", f"DEVICE = {asked.device!r}\n{PROBE}"]
    found["probe"] = [run_probe(probe) for _ in range(2)]
    found["first_token_s"] = find_median(found["warm"], "first_token_s")
    if asked.tp > 1:
        one = find_median(found["one rank"], "first_token_s")
        found["ratio"] = round(found["first_token_s"] / one, 2)
    starts = [found["cold"], *found["warm"], *found.get("one rank", ())]
    found["ok"] = all(each["code"] == 0 for each in starts)
    found["is_fast_enough"] = found["first_token_s"] <= WANTED_SECONDS
    return found


def find_median(starts: list[dict[str, Any]], name: str) -> float:
    """The median of the starts' values of that name; of those that gave one."""
    values = [each[name] for each in starts if each[name] is not None]
    return statistics.median(values) if values else float("nan")


def start(words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """One start: seconds to the first byte of the answer, to the end, and what it said of parts."""
    code = KERNELS + RUN if "cuda" in words else RUN
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = os.read(process.stdout.fileno(), 1)
        first_token = time.monotonic() - began
        # The summary is short: it fits into the pipe while the answer is read.
        process.stdout.read()
        said = process.stderr.read().decode()
        exit_code = process.wait(START_SECONDS)
    lines = said.splitlines()
    seconds = next((read_parts(line) for line in lines if line.startswith("start ")), {})
    compiled = next((line for line in lines if line.startswith("compiled ")), "compiled []")
    result = {
        "code": exit_code,
        "first_token_s": round(first_token, 2) if first else None,
        "end_s": round(time.monotonic() - began, 2),
        # Of what the start-up lines do not have: the first step with its captures, and the text.
        "after_start_s": round(first_token - sum(seconds.values()), 2),
        "parts": seconds,
        "ranks": [read_parts(line) for line in lines if re.match(r"rank \d+ ", line)],
        "notes": [
            line
            for line in lines
            if not line.startswith("compiled ")
            and (line.startswith("kernels ") or any(word in line for word in NOTED))
        ],
        "compiled": json.loads(compiled.removeprefix("compiled ")),
    }
    sys.stderr.write(f"{' '.join(words[-6:])}: {result}\n")
    if exit_code:
        result["said"] = said[-3000:]
    return result


def read_parts(line: str) -> dict[str, float]:
    """The seconds of a start's parts, of a line of the summary."""
    found = re.findall(r"([a-z][a-z ]*) (\d+\.\d+)", line[10:].partition("=")[0])
    return {name: float(value) for name, value in found}


def run_probe(command: list[str]) -> dict[str, float]:
    """Seconds of imports and first uses in a bare process."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        return {}
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(f"probe: {seconds}\n")
    return seconds


def check_late_captures(asked: argparse.Namespace, model: str) -> dict[str, Any]:
    """Tokens, bits, times and memory of graphs that are captured while the engine serves."""
    settings: dict[str, Any] = {"device": "cuda", "attn": asked.attn, "max_seq_len": 4096}
    if asked.model is None:
        settings["load_format"] = "dummy"
    with LLM(model, defer_graphs=False, **settings) as llm:
        expected = answer_each(llm)
    with LLM(model, **settings) as llm:
        engine: Any = get_session(llm).engine
        captures: list[float] = []
        prepare_next = engine.prepare_next

        def timed_capture() -> None:
            began = time.perf_counter()
            prepare_next()
            captures.append(1e3 * (time.perf_counter() - began))

        engine.prepare_next = timed_capture
        at_first_use = answer_each(llm)
        began = time.monotonic()
        # Some requests arrive while graphs are captured: the loop waits a quarter of a second.
        waits = []
        while not engine.late_captures.is_done:
            if time.monotonic() - began > LATE_SECONDS:
                break
            time.sleep(0.4)
            waits.append(time_first_token(llm))
        is_done = engine.late_captures.is_done
        afterwards = answer_each(llm)
        idle = [time_first_token(llm) for _ in range(15)]
        taken = summarize_memory(llm)
    found = {
        "tokens_at_first_use_differ": [n for n in LENGTHS if at_first_use[n] != expected[n]],
        "tokens_afterwards_differ": [n for n in LENGTHS if afterwards[n] != expected[n]],
        "all_captured": is_done,
        "captures": len(captures),
        "capture_ms": summarize(captures),
        "first_token_while_capturing_ms": summarize(waits),
        "first_token_idle_ms": summarize(idle),
        "memory": taken,
        "bits": {
            batch: graphs.bits(asked.attn, batch, defer_graphs=True) for batch in graphs.BATCHES
        },
    }
    found["ok"] = (
        is_done
        and not found["tokens_at_first_use_differ"]
        and not found["tokens_afterwards_differ"]
        and all(each["ok"] for each in found["bits"].values())
    )
    sys.stderr.write(f"late: {found}\n")
    return found


def answer_each(llm: LLM) -> dict[int, list[list[int]]]:
    """The tokens of single requests of these prompt lengths, greedy and sampled."""
    answers: dict[int, list[list[int]]] = {}
    for length in LENGTHS:
        prompt = [(7 * index + length) % 700 for index in range(length)]
        answers[length] = []
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
            llm.reset_prefix_cache()  # a step of fewer tokens rounds in another way
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            answers[length].append(list(output.outputs[0].token_ids))
    return answers


def time_first_token(llm: LLM) -> float:
    """Milliseconds to the first token of a short prompt that nothing has computed before."""
    prompt = [int(1e6 * time.time()) % 700, *range(30)]
    began = time.perf_counter()
    stream = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    next(stream)
    milliseconds = 1e3 * (time.perf_counter() - began)
    list(stream)
    return milliseconds


def summarize(values: list[float]) -> dict[str, float]:
    """The median, the largest, and the sum."""
    if not values:
        return {}
    return {
        "median": round(statistics.median(values), 2),
        "max": round(max(values), 2),
        "sum": round(sum(values), 1),
    }


def summarize_memory(llm: LLM) -> dict[str, Any]:
    """What was planned for graphs, and what captures have taken."""
    engine: Any = get_session(llm).engine
    late = engine.late_captures
    taken = late.free_before - count_settled_bytes()
    notes = [note for note in engine.summary.notes if "graph" in note]
    return {"planned_MiB": late.planned >> 20, "taken_MiB": taken >> 20, "notes": notes}


if __name__ == "__main__":
    asked = parse_words(sys.argv[1:])
    findings = measure(asked)
    write_findings(asked, findings)
    sys.stdout.write(f"{json.dumps(findings, indent=1)}\n")
    sys.exit(0 if findings["ok"] else 1)
