"""The capturer of CUDA graphs over a torch.cuda that notes what it is asked."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from headstock_cuda_graph.capture import CudaGraphCapturer


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The graph that is captured."""
    made = Mock(spec=("capture_begin", "capture_end", "replay"))
    for name, stand_in in {
        "graph_pool_handle": Mock(side_effect=[(0, number) for number in range(1, 9)]),
        "graph": lambda graph: SimpleNamespace(capture_stream=Mock()),
        "CUDAGraph": lambda: made,
        "current_stream": Mock(),
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return made


def test_work_is_done_once_before_it_is_captured_unless_it_is_warm(graph: Mock) -> None:
    for warm, times in ((False, 2), (True, 1)):
        work: Any = Mock(return_value="made")
        graph_of_work = CudaGraphCapturer()(work, warm=warm)
        assert (work.call_count, graph_of_work.result, graph_of_work.replay) == (
            times,
            "made",
            graph.replay,
        )
    assert graph.capture_begin.call_count == graph.capture_end.call_count == 2


def test_two_engines_of_a_process_capture_one_after_the_other(graph: Mock) -> None:
    inside, most = [], []

    def work() -> None:
        inside.append(1)
        time.sleep(0.002)
        most.append(len(inside))
        inside.pop()

    capturers = CudaGraphCapturer(), CudaGraphCapturer()
    with ThreadPoolExecutor(2) as pool:
        assert (
            len([*pool.map(lambda number: capturers[number % 2](work, warm=True), range(8))]) == 8
        )
    assert most == [1] * 8


@pytest.mark.feature("G11")
@pytest.mark.parametrize("end", [Mock(), Mock(side_effect=RuntimeError("it was ended already"))])
def test_work_that_spoils_the_capture_is_blamed_and_the_capture_is_ended_all_the_same(
    graph: Mock, end: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", Mock(), raising=False)
    monkeypatch.setattr(torch, "zeros", Mock())
    graph.capture_end.side_effect = [
        RuntimeError("operation failed due to a previous error during capture"),
        None,
        None,
    ]
    capturer = CudaGraphCapturer()
    with pytest.raises(ValueError, match="a number was read from the device"):
        capturer(Mock(side_effect=ValueError("a number was read from the device")), warm=True)
    end.assert_called_once_with(3, (0, 1))
    assert graph.capture_end.call_count == 2, (
        "a capture must end well before torch draws random numbers again"
    )

    capturer(Mock(), warm=True)
    assert [each.kwargs["pool"] for each in graph.capture_begin.call_args_list] == [
        (0, 1),
        (0, 2),
        (0, 2),
    ]


@pytest.mark.feature("G11")
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_capture_that_cannot_be_ended_after_its_work_is_abandoned(
    in_pieces: bool, graph: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Mock()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", Mock(), raising=False)
    monkeypatch.setattr(torch, "zeros", Mock())
    spoilt = RuntimeError("operation failed due to a previous error during capture")
    graph.capture_end.side_effect = [spoilt, spoilt, None]
    capturer = CudaGraphCapturer()
    capture = capturer.capture_pieces if in_pieces else partial(capturer, warm=True)
    with pytest.raises(RuntimeError, match="previous error"):
        capture(Mock())
    end.assert_called_once_with(3, (0, 1))
    assert graph.capture_end.call_count == 3


@pytest.mark.feature("G11")
def test_no_capture_is_left_open_where_memory_is_missing(
    graph: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that still captures would end the engine at its next wait."""
    state = {"open": False}
    full = torch.OutOfMemoryError("2.00 MiB are missing")

    def end() -> None:
        if not state["open"]:
            raise RuntimeError("not capturing")
        state["open"] = False
        if graph.capture_end.call_count == 1:
            raise RuntimeError("operation failed due to a previous error during capture")

    graph.capture_begin.side_effect = lambda **options: state.update(open=True)
    graph.capture_end.side_effect = end
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", Mock(), raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_cuda_releasePool", Mock(), raising=False)
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=full))
    capturer = CudaGraphCapturer()
    with pytest.raises(torch.OutOfMemoryError):
        capturer(Mock(side_effect=full), warm=True)
    assert not state["open"]

    def begin(**options: Any) -> None:
        state["open"] = True
        raise full

    graph.capture_begin.side_effect = begin
    for capture in (partial(capturer, warm=True), capturer.capture_pieces):
        with pytest.raises(torch.OutOfMemoryError):
            capture(Mock())
        assert not state["open"]
