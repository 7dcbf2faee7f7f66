"""Cases in processes of their own, so that what one leaves behind reaches no other."""

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
"""Describes the device and lists the cases; called anew in each process."""


@frozen(eq=False)
class _Running:
    """A process that runs a case, and what it answers by."""

    number: int
    process: ForkProcess
    answer: Connection


def can_fork() -> bool:
    """Whether a process of its own can run a case: CUDA does not work behind a fork."""
    torch = sys.modules.get("torch")
    in_use = torch is not None and torch.cuda.is_initialized()
    return "fork" in multiprocessing.get_all_start_methods() and not in_use


def run_in_processes(
    list_cases: ListCases, plugin: str = "the plugin"
) -> tuple[str, tuple[CaseResult, ...]]:
    """Run each case in a process that is forked for it; several at a time on a CPU.

    plugin: what errors call it
    returns: the device, and the results in the cases' order
    raises: HeadstockError of `list_cases`, PluginBroken when its process ends
    """
    with tempfile.TemporaryDirectory(prefix="headstock-check-") as folder:
        device, names = _list_names(list_cases, plugin, Path(folder))
        # A CPU is shared by processes of one thread each. A GPU has room for one engine.
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
    """The device, and the names of the cases, listed in a process of its own.

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
    """What came of a case; one whose process ended without an answer has failed."""
    result: CaseResult | None = _receive(running)
    if result is None:
        end = _describe_end(running.process)
        result = CaseResult(case=name, outcome=Outcome.FAILED, reason=end)
    return result


def _receive(running: _Running) -> Any:
    """What a process answers; None when it ends without an answer."""
    try:
        return running.answer.recv()
    except EOFError:
        return None
    finally:
        running.answer.close()
        running.process.join()


def _describe_end(process: ForkProcess) -> str:
    """How a process ended that gave no answer."""
    code = process.exitcode or 0
    if code < 0:
        return f"the plugin ended its process by signal {-code} ({signal.Signals(-code).name})"
    return f"the plugin ended its process with exit code {code}"


def _fork(work: Callable[[], object], number: int, folder: Path) -> _Running:
    """Start a process that does the work and answers with what it returns."""
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
    """What a child sets for itself.

    What a plugin prints goes to standard error, files that outlive a case to `folder`, and an
    interrupt to the parent alone, which ends its children.
    """
    import torch  # late: `headstock plugins` imports this package without it

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    tempfile.tempdir = str(folder)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder)
    # A collection would write to each object of the parent, and so copy all of its memory.
    gc.freeze()
    # The parent's threads did not come along, and those that start here would wait for them.
    torch.set_num_threads(1)
    yield
