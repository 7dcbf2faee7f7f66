"""Run cases in separate processes, so that they cannot affect each other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

from attrs import frozen

from headstock.errors import CannotRun, HeadstockError, PluginBroken, describe_error
from headstock_conformance.case import Case, CaseResult, Outcome, run_case

ListCases = Callable[[], tuple[str, Sequence[Case]]]
"""Describes the device and lists the cases; called again in each process."""


@frozen(eq=False)
class _Running:
    """A process that runs a case, and its connection."""

    number: int
    process: ForkProcess
    answer: Connection


def can_fork() -> bool:
    """Whether a separate process can run a case: CUDA does not work after a fork."""
    torch = sys.modules.get("torch")
    in_use = torch is not None and torch.cuda.is_initialized()
    return "fork" in multiprocessing.get_all_start_methods() and not in_use


def run_in_processes(
    list_cases: ListCases, plugin: str = "the plugin"
) -> tuple[str, tuple[CaseResult, ...]]:
    """Run each case in a forked process; several at a time on a CPU.

    plugin: its name in errors
    returns: the device, and the results in the cases' order
    raises: HeadstockError of `list_cases`, PluginBroken when its process ends
    """
    with tempfile.TemporaryDirectory(prefix="headstock-check-") as folder:
        device, names = _list_names(list_cases, plugin, Path(folder))
        # Processes with one thread each share a CPU. A GPU has room for one engine.
        most = len(os.sched_getaffinity(0)) if device == "cpu" else 1
        results: dict[int, CaseResult] = {}
        running: list[_Running] = []
        todo = list(range(len(names)))
        try:
            while todo or running:
                while todo and len(running) < most:
                    running.append(_start(list_cases, todo.pop(0), Path(folder)))
                ready = wait([each.answer for each in running])
                for each in [each for each in running if each.answer in ready]:
                    running.remove(each)
                    results[each.number] = _collect(each, names[each.number])
        finally:
            for each in running:
                each.process.kill()
                each.process.join()
    return device, tuple(results[number] for number in range(len(names)))


def _list_names(list_cases: ListCases, plugin: str, folder: Path) -> tuple[str, list[str]]:
    """The device, and the names of the cases, listed in a separate process.

    raises: HeadstockError of `list_cases`, PluginBroken when its process ends
    """

    def work() -> Any:
        try:
            device, cases = list_cases()
        except CannotRun as error:
            return CannotRun(str(error))  # its subclasses cannot be sent
        except HeadstockError as error:
            return error
        except Exception:
            raise  # a fault of this kit
        # No interrupt is the user's: the process gets none.
        except BaseException as error:
            return PluginBroken(f"listing the cases of {plugin} raised {describe_error(error)}")
        return device, [case.name for case in cases]

    lister = _fork(work, -1, folder)
    answer: Any = _receive(lister)
    if isinstance(answer, HeadstockError):
        raise answer
    if answer is None:
        raise PluginBroken(
            f"the cases of {plugin} cannot be listed: {_describe_end(lister.process)}"
        )
    device, names = answer
    return device, names


def _start(list_cases: ListCases, number: int, folder: Path) -> _Running:
    """Start the case of that number."""
    return _fork(lambda: run_case(list_cases()[1][number]), number, folder)


def _collect(running: _Running, name: str) -> CaseResult:
    """The result of a case; if its process ended without an answer, it failed."""
    result: CaseResult | None = _receive(running)
    if result is None:
        end = _describe_end(running.process)
        result = CaseResult(case=name, outcome=Outcome.FAILED, reason=end)
    return result


def _receive(running: _Running) -> Any:
    """The answer of a process; None if it ends without one."""
    try:
        return running.answer.recv()
    except EOFError:
        return None
    finally:
        running.answer.close()
        running.process.join()


def _describe_end(process: ForkProcess) -> str:
    """How a process without an answer ended."""
    code = process.exitcode or 0
    if code < 0:
        return f"the plugin ended its process by signal {-code} ({signal.Signals(-code).name})"
    return f"the plugin ended its process with exit code {code}"


def _fork(work: Callable[[], object], number: int, folder: Path) -> _Running:
    """Start a process that does the work and sends back its result."""
    context: ForkContext = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answer() -> None:
        receiver.close()
        with _child_settings(folder):
            sender.send(work())

    process = context.Process(target=answer)
    process.start()
    sender.close()
    return _Running(number, process, receiver)


@contextmanager
def _child_settings(folder: Path) -> Iterator[None]:
    """Set up a child process.

    Output of a plugin goes to standard error, files that outlive a case to `folder`, and an
    interrupt only to the parent, which ends its children.
    """
    import torch  # late: `headstock plugins` imports this package without it

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    tempfile.tempdir = str(folder)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder)
    # A collection would write to each object of the parent, and so copy all its memory.
    gc.freeze()
    # A fork does not copy the parent's threads, and new threads here would wait for them.
    torch.set_num_threads(1)
    yield
