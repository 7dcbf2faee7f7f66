"""Engines that do the same work in turns on one GPU, each in a process of its own, all alive.

    PYTHONPATH=tests:tests/support python -m gpu.turns --shape qwen3-0.6b --out turns.jsonl \\
        --ours '{"memory_ratio": 0.85}' --vllm SITE --memory 0.45 online:16:100 first-token:128:40

Each `--ours` is headstock under settings of its own, as JSON; with a `site` among them it is the
headstock of that folder. `--vllm` is a folder with vLLM, which starts first and takes the share
`--memory` of the GPU; `--vllm-arguments` are further ones of its engine, as JSON. Weights are
random, and packed as `--config`, JSON, says by `quantization_config`: its fields are those of
config.json beside the shape's. An engine has its own by `config` among its settings, or
`--vllm-config`. `--wrapped` puts a hybrid's configuration into the one that is published, of which
vLLM reads no other. With `--at-once` all engines start together, and need sizes that do not depend
on the memory that is free: `kv_memory_mb`, and vLLM's `kv_cache_memory_bytes`. A workload is one of
`headstock bench`, or `streams:COUNT`: so many requests at once of 512 tokens in, 128 out, each
token handed to its caller; `shared:COUNT:PREFIX:OWN:ANSWER`: so many whole answers at once, to
prompts with PREFIX tokens in common and OWN of their own; or
`beside:ROWS:CONTEXT:ANSWER:LOW:HIGH:RATE:COUNT:SHARED`: so many rows of CONTEXT tokens, of which
the first SHARED are the same, decode ANSWER tokens each, while COUNT prompts of LOW to HIGH tokens
arrive, RATE a second. Its times to the first token are those of the prompts, its times between
tokens those of the rows meanwhile. `NAME*RUNS` has a number of turns of its own.

All warm up with each workload before its first turn, whole answers with up to 16 tokens each where
there are many; every second turn runs in the other order. A run is a line of the file as soon as it
is made. An engine that does not start is left out, and standard error says why. vLLM has one engine
for streams and another for whole answers, so that a call has workloads of one kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch

from headstock_bench.latency_workloads import (
    LatencyWorkload,
    draw_latency_workload,
    is_latency_workload,
)
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_bench.workloads import WORKLOADS, Workload, draw_tokens

PROMPT, ANSWER = 512, 128
"""Tokens in and out of a request of `streams`."""
SHORT, MANY = 16, 64
"""Tokens of an answer of a warm-up, where there are more answers than `MANY`."""
BEFORE = 0.5
"""Seconds in which the rows of `beside` begin, before the first prompt."""


class Contestant:
    """An engine in a process, which answers one line of JSON with another."""

    def __init__(self, about: dict[str, Any], kind: str, settings: dict[str, Any]) -> None:
        self.about = about
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
        if kind == "vllm":
            quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
            site = settings.pop("site")
            environment = dict(os.environ) | quiet | {"PYTHONPATH": site, "HF_HUB_OFFLINE": "1"}
        elif "site" in settings:
            sites = (settings.pop("site"), environment.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sites))
        worker = Path(__file__).with_name("turn_worker.py")
        self.process = subprocess.Popen(
            # This folder has modules of common names, which must not be found before others.
            [sys.executable, "-P", str(worker), kind, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Contestant:
        try:
            self.about = self.about | self.read_answer()
        except BaseException:
            self.__exit__()  # a process that half started would keep its memory of the GPU
            raise
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()  # it ends with its input
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def ask(self, path: Path, *, warm_up: bool) -> dict[str, Any]:
        """What a run of this work gave.   raises: RuntimeError when the process ended"""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"work": str(path), "warm_up": warm_up}) + "\n")
        self.process.stdin.flush()
        return self.read_answer()

    def read_answer(self) -> dict[str, Any]:
        """The next line.   raises: RuntimeError when the process ended"""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.about} ended; standard error says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def draw_beside(name: str) -> LatencyWorkload:
    """The workload of `beside`; its rows come first.   raises: ValueError"""
    rows, context, answer, low, high, rate, count, shared = map(float, name.split(":")[1:])
    rng, at = Random(7), BEFORE
    prefix = draw_tokens(rng, int(shared))
    prompts = [prefix + draw_tokens(rng, int(context - shared)) for _ in range(int(rows))]
    arrivals = [0.0] * int(rows)
    for _ in range(int(count)):
        at += rng.uniform(0.5, 1.5) / rate
        arrivals.append(at)
        prompts.append(draw_tokens(rng, rng.randint(int(low), int(high))))
    return LatencyWorkload(
        name=name,
        prompts=tuple(prompts),
        outputs=(int(answer),) * int(rows) + (2,) * int(count),
        temperature=0.6,
        arrivals=tuple(arrivals),
    )


def draw(name: str) -> Workload:
    """The workload of a name.   raises: KeyError, UsageError, ValueError"""
    family, _, count = name.partition(":")
    if family == "beside":
        return draw_beside(name)
    if family == "streams":
        rng = Random(int(count))
        return LatencyWorkload(
            name=name,
            prompts=tuple(draw_tokens(rng, PROMPT) for _ in range(int(count))),
            outputs=(ANSWER,) * int(count),
            temperature=0.6,
            arrivals=(0.0,) * int(count),
        )
    if family == "shared":
        requests, prefix, own, answer = map(int, count.split(":"))
        rng = Random(requests)
        common = draw_tokens(rng, prefix)
        return Workload(
            name=name,
            prompts=tuple(common + draw_tokens(rng, own) for _ in range(requests)),
            outputs=(answer,) * requests,
            temperature=0.6,
        )
    return draw_latency_workload(name) if is_latency_workload(name) else WORKLOADS[name]()


def write_work(workload: Workload, vocab: int, path: Path, most: int | None = None) -> None:
    """Write the workload as JSON, with ids of a vocabulary of this size.

    most: tokens of an answer
    """
    workload = workload.fit_vocab(vocab)
    outputs = workload.outputs if most is None else [min(n, most) for n in workload.outputs]
    work = {
        "prompts": workload.prompts,
        "outputs": outputs,
        "temperature": workload.temperature,
        "seed": workload.seed,
        "is_streamed": isinstance(workload, LatencyWorkload),
        "arrivals": getattr(workload, "arrivals", None),
        "rows": int(workload.name.split(":")[1]) if workload.name.startswith("beside:") else 0,
    }
    path.write_text(json.dumps(work))


def run_turns(
    contestants: Sequence[Contestant],
    name: str,
    path: Path,
    turns: int,
    out: Path,
    warm_up: Path | None = None,
) -> None:
    """Let all warm up with the work in a file, then run it in turns.

    warm_up: the file of that, where it is another
    writes: out
    """
    for each in contestants:
        each.ask(warm_up or path, warm_up=True)
    for turn in range(turns):
        for each in contestants if turn % 2 == 0 else contestants[::-1]:
            found = {"workload": name, "turn": turn + 1} | each.ask(path, warm_up=False)
            line = json.dumps(each.about | found)
            sys.stderr.write(line + "\n")
            with out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def parse_words(words: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="+", metavar="NAME[*RUNS]")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=MODEL_SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ours", action="append", default=[], type=json.loads, metavar="JSON")
    parser.add_argument("--vllm", metavar="SITE")
    parser.add_argument("--vllm-arguments", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--vllm-config", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--config", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--wrapped", action="store_true")
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--memory", type=float, default=0.45)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-seq-len", type=int, default=5120)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(words)
    asked.works = []
    for text in asked.workloads:
        name, _, turns = text.partition("*")
        asked.works.append((draw(name), int(turns or asked.turns)))
    if asked.vllm and len({isinstance(work, LatencyWorkload) for work, _ in asked.works}) > 1:
        parser.error("vLLM runs workloads of one kind in a call: streams, or whole answers")
    return asked


def write_model(shape: str, folder: Path, fields: dict[str, Any], *, is_wrapped: bool) -> str:
    """Write the directory of a shape, whose config.json has these fields too.   returns: its name

    is_wrapped: as the text part of a model that also takes images
    """
    write_model_directory(MODEL_SHAPES[shape], folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    if is_wrapped:
        (kind,), name = config.pop("architectures"), config["model_type"].removesuffix("_text")
        whole = kind.replace("ForCausalLM", "ForConditionalGeneration")
        rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        rope |= {"partial_rotary_factor": config["partial_rotary_factor"]}
        rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
        vision = {"model_type": name, "out_hidden_size": config["hidden_size"]}
        config = {
            "architectures": [whole],
            "model_type": name,
            "text_config": config | {"rope_parameters": rope},
            "vision_config": vision,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
    path.write_text(json.dumps(config))
    return str(folder)


def list_entries(
    asked: argparse.Namespace, folder: Path
) -> list[tuple[dict[str, Any], str, dict[str, Any]]]:
    """What each engine's process is started with.   writes: model directories in the folder"""
    common = {"shape": asked.shape, "torch": torch.__version__}
    common["gpu"] = torch.cuda.get_device_name() if asked.device == "cuda" else None
    entries: list[tuple[dict[str, Any], str, dict[str, Any]]] = []

    def add(kind: str, about: dict[str, Any], own: dict[str, Any], more: dict[str, Any]) -> None:
        fields, place = asked.config | own, folder / str(len(entries))
        model = write_model(asked.shape, place, fields, is_wrapped=asked.wrapped)
        about = common | about | ({"config": fields} if fields else {})
        entries.append((about, kind, {"model": model, "max_seq_len": asked.max_seq_len} | more))

    if asked.vllm:
        about = {"engine": "vLLM", "gpu_memory_utilization": asked.memory}
        about["settings"] = asked.vllm_arguments
        theirs = {"site": asked.vllm, "memory": asked.memory}
        theirs["arguments"] = asked.vllm_arguments
        theirs["is_streamed"] = isinstance(asked.works[0][0], LatencyWorkload)
        add("vllm", about, asked.vllm_config, theirs)
    for settings in asked.ours or [{}]:
        ours = {name: value for name, value in settings.items() if name != "config"}
        about = {"engine": "headstock", "settings": ours}
        ours = {"load_format": "dummy", "device": asked.device} | ours
        add("headstock", about, settings.get("config", {}), ours)
    return entries


def start_all(
    entries: Sequence[tuple[dict[str, Any], str, dict[str, Any]]],
    stack: ExitStack,
    *,
    at_once: bool,
) -> list[Contestant]:
    """The engines that start, in the order of the entries; one after another, or together."""

    def start(entry: tuple[dict[str, Any], str, dict[str, Any]]) -> Contestant | None:
        try:
            return Contestant(*entry).__enter__()
        except RuntimeError as error:
            sys.stderr.write(f"left out: {error}\n")
            return None

    # One after another each takes its share of the memory that is free by then.
    with ThreadPoolExecutor(len(entries) if at_once else 1) as pool:
        started = [each for each in pool.map(start, entries) if each is not None]
    for each in started:
        stack.push(each)
    return started


def main(words: Sequence[str] | None = None) -> None:
    """Run all workloads in turns."""
    asked = parse_words(words)
    with tempfile.TemporaryDirectory(prefix="headstock-turns-") as folder, ExitStack() as stack:
        entries = list_entries(asked, Path(folder))
        contestants = start_all(entries, stack, at_once=asked.at_once)
        for work, turns in asked.works:
            path, warm_up = Path(folder, "work.json"), Path(folder, "warm-up.json")
            vocab = MODEL_SHAPES[asked.shape].vocab
            write_work(work, vocab, path)
            is_long = not isinstance(work, LatencyWorkload) and len(work.outputs) > MANY
            write_work(work, vocab, warm_up, SHORT if is_long else None)
            run_turns(contestants, work.name, path, turns, asked.out, warm_up)


if __name__ == "__main__":
    main()
