"""An engine whose GPU serves it no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve

from headstock import LLM, SamplingParams
from headstock.errors import EngineDied
from headstock.execution.executor import LocalExecutor
from headstock.spi import DeviceEnv
from headstock.startup.device import check_usable

LOST = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"
GPU = DeviceEnv(device="cuda", capability=(9, 0))


def fails(*arguments: Any) -> None:
    raise RuntimeError(LOST)


class Stream:
    """A stream on which nothing runs any more, or on which a kernel has failed."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.synchronize = synchronize


@pytest.mark.feature("G11")
def test_a_device_that_answers_still_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(fails))
    check_usable(DeviceEnv(device="cpu"))
    with pytest.raises(
        EngineDied, match=r"the GPU is lost to this process \(CUDA error: an illegal memory access"
    ):
        check_usable(GPU)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(lambda: None))
    check_usable(GPU)


@pytest.mark.feature("G11")
def test_an_engine_that_lost_its_device_dies_instead_of_failing_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = SamplingParams(max_tokens=4)
    with LLM("demo", max_running_requests=2, num_pages=32) as llm:
        assert llm.generate(["a"], params)[0].outputs[0].finish_reason == "length"
        llm._session.engine.env = evolve(llm._session.engine.env, device="cuda")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(fails))
        monkeypatch.setattr(LocalExecutor, "execute", fails)
        for _ in range(2):
            with pytest.raises(EngineDied, match="the GPU is lost"):
                llm.generate(["a"], params)
