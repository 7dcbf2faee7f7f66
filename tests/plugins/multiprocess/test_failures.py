"""A rank that is lost is named in one line, ends the engine and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_ranks
import patience
import pytest
from often import often
from rank_imports import find_children

from headstock import LLM, SamplingParams
from headstock.errors import EngineDied, HeadstockError, PluginBroken

ENDLESS = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)
LATE = "multiprocess.patience=20"
SIZES: dict[str, Any] = {"num_pages": 512, "max_seq_len": 4096, "device": "cpu"}


def ranks_of(llm: LLM) -> Any:
    """The leader of an engine that runs its steps where it plans them."""
    return llm._session.engine.executor.ranks


def lose(llm: LLM, end: Callable[[int], None], *, under_load: bool) -> tuple[str, float]:
    """End a rank by its process; how the engine says so, and after how many seconds."""
    pid = ranks_of(llm).followers[0].process.process.pid
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(["Once upon a time"] * 4, ENDLESS, use_tqdm=False)
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=generate)
    if under_load:
        caller.start()
        while llm._session.engine.stats().output_tokens < 20:
            time.sleep(0.01)
    began = time.monotonic()
    end(pid)
    while llm._session.loop.failure is None and time.monotonic() < began + patience.seconds:
        time.sleep(0.01)
    seconds = time.monotonic() - began
    if not under_load:
        caller.start()
    caller.join(patience.seconds)
    (error,) = errors
    assert isinstance(error, EngineDied) and error.exit_code == 70
    llm.close()
    assert all(each.process.process.poll() is not None for each in ranks_of(llm).followers)
    return str(error), seconds


@pytest.mark.parametrize("under_load", often(1, [True, False]))
def test_a_rank_that_is_killed_ends_the_engine_and_is_named(under_load: bool) -> None:
    llm = LLM("demo", tp=2, **SIZES)
    text, _ = lose(llm, lambda pid: os.kill(pid, signal.SIGKILL), under_load=under_load)

    assert "rank 1 (process" in text and "was ended by SIGKILL" in text


@pytest.mark.full
@pytest.mark.parametrize("under_load", [False, True], ids=["idle", "under load"])
def test_a_rank_that_is_stopped_ends_the_engine_and_is_named(under_load: bool) -> None:
    llm = LLM("demo", tp=2, opt=("multiprocess.silence=4",), **SIZES)
    text, _ = lose(llm, lambda pid: os.kill(pid, signal.SIGSTOP), under_load=under_load)

    assert "rank 1 (process" in text and "gave no sign of life for 4 s" in text


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Starts an engine of two ranks, of which the last fails."""
    faulty_ranks.install(tmp_path)
    paths = [str(tmp_path), str(Path(faulty_ranks.__file__).parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))

    def start(fault: str, **settings: Any) -> LLM:
        monkeypatch.setenv(faulty_ranks.FAULT, fault)
        return LLM("demo", tp=2, ops="faulty-ranks", **SIZES, **settings)

    return start


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("bind:raise", PluginBroken, r"rank 1 \(process \d+\): .*RuntimeError: no such kernel"),
        ("bind:memory", HeadstockError, r"rank 1 \(process \d+\): .*out of memory"),
        ("bind:exit", EngineDied, r"rank 1 \(process \d+\) ended with exit code 3"),
        ("bind:hang", EngineDied, r"rank 1 \(process \d+\) has not started 20 s after"),
    ],
)
def test_a_rank_that_fails_at_the_start_is_named_and_none_stays(
    fault: str, error: type[Exception], text: str, faulty: Callable[..., LLM]
) -> None:
    with pytest.raises(error, match=text):
        faulty(fault, opt=(LATE,) if fault.endswith("hang") else ())
    assert find_children() == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("step:raise", "rank 1 .* failed in a step: RuntimeError: no such kernel"),
        ("step:exit", "rank 1 .* ended with exit code 3"),
        ("step:garbage", "rank 1 .* sent what is no message"),
        ("step:length", "rank 1 .* sent what is no message: .*4294967295 bytes"),
        ("step:leave", "rank 1 .* closed its connection"),
        ("step:hang", "a step has not ended for 20 s on rank 0, rank 1 "),
    ],
)
def test_a_rank_that_fails_in_a_step_ends_the_engine_and_is_named(
    fault: str, text: str, faulty: Callable[..., LLM]
) -> None:
    llm = faulty(fault, opt=(LATE,) if fault.endswith("hang") else ())
    with pytest.raises(EngineDied, match=text):
        llm.generate(["Once upon a time"] * 3, ENDLESS, use_tqdm=False)
    llm.close()
    assert find_children() == {}


@pytest.mark.full
def test_a_step_that_fails_on_all_ranks_fails_alone(faulty: Callable[..., LLM]) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with faulty("step:all-raise") as llm:
        (failed,) = llm.generate(["Once upon a time"], short, use_tqdm=False)
        (next_one,) = llm.generate(["Once upon a time"], short, use_tqdm=False)

    assert failed.outputs[0].finish_reason == "error"
    assert next_one.outputs[0].finish_reason == "length"


@pytest.mark.full
def test_a_start_that_is_refused_leaves_no_rank(tmp_path: Path) -> None:
    record = tmp_path / "record"
    record.write_text("taken")
    for settings in ({"record": str(record)}, {"tp": 3}, {"memory_ratio": 1e-4}):
        with pytest.raises(HeadstockError):
            LLM("demo", **{"tp": 2, "device": "cpu", **settings})
        assert find_children() == {}


@pytest.mark.full
def test_ranks_that_sample_other_tokens_end_the_engine(faulty: Callable[..., LLM]) -> None:
    llm = faulty("step:other")
    with pytest.raises(EngineDied, match=r"rank 1 .* got other results than rank 0 in a step"):
        llm.generate(["Once upon a time"], ENDLESS, use_tqdm=False)
    llm.close()


@pytest.mark.full
def test_a_rank_ends_when_rank_0_is_killed() -> None:
    program = (
        "from headstock import LLM, SamplingParams\n"
        f"llm = LLM('demo', tp=2, **{SIZES!r})\n"
        "ranks = llm._session.engine.executor.ranks\n"
        "print(ranks.followers[0].process.process.pid, flush=True)\n"
        "params = SamplingParams(max_tokens=3000, ignore_eos=True)\n"
        "llm.generate(['Once upon a time'], params, use_tqdm=False)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as rank_0:
        assert rank_0.stdout is not None
        other = int(rank_0.stdout.readline())
        rank_0.kill()

    deadline = time.monotonic() + patience.seconds
    while Path(f"/proc/{other}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{other}").exists()
