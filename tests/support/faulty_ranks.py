"""Operations of which one rank fails: the plugin `faulty-ranks`.

HEADSTOCK_TEST_FAULT in the environment says when and how, such as `step:raise`.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import torch
from attrs import evolve
from torch import Tensor

from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    ALONE,
    Batch,
    Collectives,
    DeviceRange,
    LayerConfig,
    LayoutKind,
    ModelConfig,
    OpsCapabilities,
    OpsSpec,
    Params,
    Sample,
    Sampling,
    SpiRange,
    Stream,
)

FAULT = "HEADSTOCK_TEST_FAULT"
ENTRY_POINTS = "[headstock.ops]\nfaulty-ranks = faulty_ranks:spec\n"
MOST_STEPS = 5
"""Steps before the one that fails; the start has one."""


def spec() -> OpsSpec:
    """Plain torch, but for the fault."""
    return OpsSpec(
        name="faulty-ranks",
        spi=SpiRange(0, 3),
        summary="one rank fails",
        implementation="faulty_ranks:FaultyRanks",
        capabilities=OpsCapabilities(
            devices=(DeviceRange("cpu"),),
            dtypes=frozenset({"float32"}),
            layouts=frozenset(LayoutKind),
        ),
    )


def install(folder: Path) -> None:
    """Install the plugin in a folder, which is to be in PYTHONPATH with this file's."""
    info = folder / "faulty_ranks-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-ranks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


class FaultyRanks(TorchOps):
    """Plain torch; rank 1 fails, or all do."""

    def __init__(self) -> None:
        moment, _, how = os.environ.get(FAULT, "never:").partition(":")
        self.moment, self.how = moment, how
        self.num_steps = 0
        self.is_last = False

    def bind(self, params: Params, config: ModelConfig, collectives: Collectives = ALONE) -> None:
        """See `Ops.bind`."""
        super().bind(params, config, collectives)
        self.is_last = config.shard.index == config.shard.count - 1
        if self.is_last:
            self._fail_at("bind")

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """See `Ops.takes`."""
        return operation == "embed"

    def embed(self, batch: Batch) -> Stream:
        """See `Ops.embed`."""
        self.num_steps += 1
        if self.num_steps > MOST_STEPS and (self.is_last or self.how.startswith("all")):
            self._fail_at("step")
        return super().embed(batch)

    def sample_shard(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `FineTierOps.sample_shard`."""
        sample = super().sample_shard(logits, sampling)
        if self.how == "other" and self.is_last and self.num_steps > MOST_STEPS:
            return evolve(sample, tokens=(sample.tokens + 1) % self.config.full_vocab)
        return sample

    def _fail_at(self, moment: str) -> None:
        if moment != self.moment:
            return
        match self.how:
            case "raise":
                raise RuntimeError("no such kernel")
            case "all-raise":
                if self.num_steps == MOST_STEPS + 1:
                    raise RuntimeError("no such kernel")
            case "memory":
                raise torch.OutOfMemoryError("out of memory")
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(3600)
            case "garbage":
                os.write(int(sys.argv[1]), b"\0\0\0\7garbage")
                time.sleep(3600)
            case "length":
                os.write(int(sys.argv[1]), b"\xff" * 9)
                time.sleep(3600)
            case "leave":
                socket.socket(fileno=os.dup(int(sys.argv[1]))).shutdown(socket.SHUT_RDWR)
                time.sleep(3600)
