"""Two ranks of one host beside one: the same tokens, for every pair of backends, replayed or not.

    python3 -m gpu.ranks --out ranks.jsonl [--device cpu] [--pairs fa fa,fi fi sdpa] [--one-gpu]

With `--one-gpu` both ranks have the same GPU, where there is one; then sums that no kernel computes
go by way of the host. With `--kernels` the exchanges of `push_cases` run first, in two processes on
one GPU.
The demo model, whose weights are real, in float32 where a backend serves that, else in bfloat16.
Greedy tokens may differ only where the two best are closer than rounding.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from push_cases import Exchange, check, draw_exchanges

from headstock import LLM, SamplingParams
from headstock.spi import Collectives, PeerMemory
from headstock_multiprocess.device_memory import share_device_memory
from headstock_triton.ranks.push import PushCollectives, connect_by_push

PROMPTS = [
    f"{opening} {name} had {count} apples and" for opening in ("Once upon a time", "One morning")
    for name in ("Anna", "Ben", "Mia", "Theo", "Sara") for count in (2, 3, 5, 9)
]  # fmt: skip
MAX_TOKENS = 48
TIE = 0.25
"""A margin between the two best tokens, in logits, under which bfloat16 may fall on either side:
logits of 16 to 32 are multiples of 0.125 there.
"""


class TwoRanks(Collectives):
    """One of two processes, which share a GPU's memory."""

    count = 2

    def __init__(self, index: int, other: Any) -> None:
        self.index, self.other = index, other

    def gather(self, content: bytes) -> list[bytes]:
        """The bytes of both."""
        self.other.send_bytes(content)
        both = [content, self.other.recv_bytes()]
        return both[::-1] if self.index else both

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.numel() == 1, "a sum that no kernel serves"
        torch.cuda.synchronize()
        self.gather(b"-")
        return x

    def share_memory(self, size: int) -> PeerMemory | None:
        memory = share_device_memory(self.index, size, torch.device("cuda", 0), self.gather)
        assert isinstance(memory, PeerMemory), memory
        return memory


def run_exchanges(index: int, other: Any, results: Any, count: int) -> None:
    """Exchange numbers with the other process, eagerly and replayed; put what is wrong."""
    signal.alarm(120)  # a rank whose peer fails waits for ever
    torch.cuda.set_device(0)
    both = TwoRanks(index, other)
    ranks = connect_by_push(both, 1 << 20)
    assert isinstance(ranks, PushCollectives)
    faults: list[str] = []

    def compare(exchange: Exchange, found: tuple[torch.Tensor, ...]) -> None:
        torch.cuda.synchronize()
        try:
            check(exchange, (found,))
        except AssertionError as error:
            faults.append(f"rank {index}: {error}"[:300])

    exchanges = list(draw_exchanges(2, count, "cuda", 5))
    for exchange in exchanges:
        compare(exchange, exchange.run(ranks))
    for exchange in exchanges[:40]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(4):
                found = exchange.run(ranks)
        for _ in range(3):
            graph.replay()
        compare(exchange, found)
    results.put(faults)


def check_kernels(count: int) -> dict[str, Any]:
    """What two processes on one GPU exchange through its memory."""
    context = multiprocessing.get_context("spawn")
    ends, results = context.Pipe(), context.Queue()
    processes = [
        context.Process(target=run_exchanges, args=(index, ends[index], results, count))
        for index in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        return {"exit codes": [process.exitcode for process in processes], "wrong": 1}
    faults = [fault for _ in processes for fault in results.get()]
    return {"exchanges": count, "faults": faults[:5], "wrong": len(faults)}


def answer(tp: int, device: str, **settings: Any) -> tuple[list[Any], float, float, float]:
    """The outputs of all prompts, the seconds of the start and of the answers, and the share of
    steps that replayed a graph.
    """
    began = time.perf_counter()
    sizes = {"max_seq_len": 512, "num_pages": 512, "max_running_requests": 64, "device": device}
    with LLM("demo", tp=tp, **sizes | settings) as llm:
        started = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        ended = time.perf_counter()
        share = (
            llm._session.engine.stats().replayed_steps / llm._session.engine.stats().executed_steps
        )
    return [output.outputs[0] for output in outputs], started - began, ended - started, share


def count_differences(found: list[Any], expected: list[Any]) -> tuple[int, int]:
    """How many answers part at a tie, and how many where there is none."""
    ties = wrong = 0
    for ours, theirs in zip(found, expected, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        at = next((at for at, (one, other) in pairs if one != other), None)
        if at is None:
            continue
        best, second = sorted(each.logprob for each in theirs.logprobs[at].values())[-1:-3:-1]
        ties += best - second < TIE
        wrong += best - second >= TIE
    return ties, wrong


def main() -> int:
    """Compare each pair of backends, eager and replayed; 1 if a token is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", nargs="*", default=["fa", "fa,fi", "fi", "sdpa"])
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", type=int, default=0)
    asked = parser.parse_args()
    num_wrong = 0

    def write(line: dict[str, Any]) -> None:
        with asked.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    if asked.kernels:
        line = check_kernels(asked.kernels)
        num_wrong += line["wrong"]
        write(line)
    runners = ("eager",) if asked.device == "cpu" else ("eager", "cudagraph")
    for attn in asked.pairs:
        for runner in runners:
            settings: dict[str, Any] = {"attn": attn, "runner": runner, "dtype": asked.dtype}
            line: dict[str, Any] = {**settings, "ranks": asked.ranks}
            try:
                alone, *alone_seconds = answer(1, asked.device, **settings)
                opt = ("multiprocess.one_gpu=true",) if asked.one_gpu else ()
                found, *seconds = answer(asked.ranks, asked.device, opt=opt, **settings)
            except Exception as error:
                line["error"] = f"{type(error).__name__}: {error}"[:400]
                num_wrong += 1
            else:
                ties, wrong = count_differences(found, alone)
                num_wrong += wrong
                line |= {"answers": len(found), "ties": ties, "wrong": wrong}
                line |= {"seconds": [round(each, 2) for each in seconds]}
                line |= {"seconds_alone": [round(each, 2) for each in alone_seconds]}
            write(line)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
