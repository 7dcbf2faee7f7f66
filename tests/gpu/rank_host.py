"""What rank 0's host takes of a step because there are other ranks, in microseconds.

    PYTHONPATH=tests:tests/support python -m gpu.rank_host [--ranks 2] [--rows 1,256] [--steps 500]
        [--work 4000]

Nothing computes: rank 0 is busy for a few milliseconds in each step, as it is while it waits for an
event of a GPU, and the other ranks are processes that read its plan and answer with its digest.
"launch" is the processor time of the engine's thread to encode and send the plan, "end" that to
compare the tokens once the step is over. "listeners" is that of the threads that hear the other
ranks, which hold the interpreter's lock for a part of it. One rank alone takes less than one.
"control" is what ten small products of numpy take after the same work: 10 to 15 us on an idle
machine. Where other processes share its cores it is four times that, and so is the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import socket
import sys
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from headstock.execution.abstract_executor import Executor, Pending
from headstock.scheduler import Plan
from headstock.spi import Sample
from headstock_multiprocess.leader import Follower, Leader
from headstock_multiprocess.leading_executor import LeadingExecutor
from headstock_multiprocess.link import Link
from headstock_multiprocess.messages import (
    Close,
    Execute,
    Finished,
    FromRank,
    Start,
    ToRank,
    digest_sample,
    read_execute,
)
from headstock_multiprocess.options import MultiprocessOptions
from headstock_multiprocess.processes import RankProcess

TOKEN = 65
WANTED = 30.0
"""Microseconds of the engine's thread a step."""


class Busy(Pending):
    """A step that is over when the processor has done some work.

    iterations: of the work, without the interpreter's lock
    ended: the thread's processor time after it
    """

    def __init__(self, sample: Sample, iterations: int) -> None:
        self.sample, self.iterations = sample, iterations
        self.ended = 0.0

    def wait(self) -> Sample:
        hashlib.pbkdf2_hmac("sha256", b"", b"", self.iterations)
        self.ended = time.thread_time()
        return self.sample


class Idle(Executor):
    """Computes nothing.   step: the latest"""

    def __init__(self, sample: Sample, iterations: int) -> None:
        self.sample, self.iterations = sample, iterations
        self.step = Busy(sample, iterations)

    def execute(self, plan: Plan, new_rows: Any) -> Pending:
        self.step = Busy(self.sample, self.iterations)
        return self.step

    def close(self) -> None:
        pass


class Answering(RankProcess):
    """The process of a rank that only answers."""

    def __init__(self, process: Any) -> None:
        self.process = process

    def kill(self) -> None:
        self.process.kill()

    def wait(self, seconds: float) -> None:
        self.process.join(seconds)

    def describe_end(self) -> str:
        return "ended"


def make_sample(rows: int) -> Sample:
    """What a step of so many rows has sampled."""
    return Sample(tokens=torch.full((rows,), TOKEN), healthy=torch.ones(rows, dtype=torch.bool))


def make_plan(rows: int) -> Plan:
    """A step in which so many rows decode."""
    row_ids, ones = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    return Plan(
        number=0,
        num_decode=rows,
        rows=row_ids,
        admission_ids=row_ids,
        starts=600 * ones,
        stops=601 * ones,
        num_logits=ones,
        samples=ones,
    )


def answer(sock: socket.socket) -> None:
    """Answer steps until rank 0 closes."""
    link: Link[ToRank] = Link(sock, ToRank)
    number = 0
    while (message := link.receive()) is not None and not isinstance(message, Close):
        if isinstance(message, Execute):
            number += 1
            plan, _ = read_execute(message)
            link.send(Finished(number, digest_sample(make_sample(len(plan.rows))), ""))
        elif not isinstance(message, Start):
            raise TypeError(f"no step asks for {type(message).__name__}")


def read_listeners() -> float:
    """Seconds of the processor that the threads took that hear other ranks."""
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threading.enumerate()
        if thread.name == "headstock-ranks" and thread.ident is not None
    )


def measure(leader: Leader, rows: int, steps: int, iterations: int) -> dict[str, Any]:
    """Medians of microseconds a step, but for the listeners' mean."""
    plan = make_plan(rows)
    idle = Idle(make_sample(rows), iterations)
    led = LeadingExecutor(idle, leader)
    launches, ends = [], []
    heard = read_listeners()
    for _ in range(steps):
        began = time.thread_time()
        pending = led.execute(plan, {})
        launches.append(time.thread_time() - began)
        pending.wait()
        ends.append(time.thread_time() - idle.step.ended)
    listened = read_listeners() - heard
    controls, factors = [], np.arange(rows)
    for _ in range(steps):
        idle.execute(plan, {}).wait()
        for _ in range(10):
            np.multiply(factors, factors)
        controls.append(time.thread_time() - idle.step.ended)
    launch, end = 1e6 * median(launches), 1e6 * median(ends)
    return {
        "engine": round(launch + end, 1),
        "launch": round(launch, 1),
        "end": round(end, 1),
        "listeners": round(1e6 * listened / steps, 1),
        "control": round(1e6 * median(controls), 1),
        "plan_bytes": len(plan.encode()),
    }


def main(words: Sequence[str]) -> dict[str, Any]:
    """The findings by rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", default="1,256")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--work", type=int, default=4000, help="iterations of a hash in each step")
    asked = parser.parse_args(words)
    context = multiprocessing.get_context("fork")
    followers = []
    for index in range(1, asked.ranks):
        ours, theirs = socket.socketpair()
        process = context.Process(target=answer, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        followers.append(Follower(index, Answering(process), Link[FromRank](ours, FromRank)))
    leader = Leader(asked.ranks, "127.0.0.1", MultiprocessOptions(), followers)
    try:
        found = {
            f"{rows} rows": measure(leader, rows, asked.steps, asked.work)
            for rows in map(int, asked.rows.split(","))
        }
    finally:
        leader.close()
    return {"ok": all(each["engine"] <= WANTED for each in found.values()), "us_a_step": found}


if __name__ == "__main__":
    findings = main(sys.argv[1:])
    sys.stdout.write(f"{json.dumps(findings, indent=1)}\n")
    sys.exit(0 if findings["ok"] else 1)
