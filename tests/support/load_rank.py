"""The parameters of a rank, as loading makes them for some operations."""

from __future__ import annotations

from pathlib import Path

import torch

from headstock.ops.torch_ops import TorchOps
from headstock.spi import Ops, Params, Shard, WeightKind
from headstock.startup.model_loading import read_model
from headstock.weights import load_weights

WHOLE = Shard()


def load_rank(
    directory: Path,
    shard: Shard = WHOLE,
    ops: Ops | None = None,
    *,
    dummy: bool = False,
    quant: WeightKind | None = None,
) -> Params:
    """The parameters of a rank in float32, by default all of them and for torch."""
    family, whole = read_model(directory)
    assert family.shard is not None
    config, ops = family.shard(whole, shard), ops or TorchOps()
    return load_weights(
        directory,
        family.params(config),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=16,
        prepare=ops.prepare,
        takes_format=ops.takes_format,
        whole=family.params(whole),
        dummy=dummy,
        quant=quant,
    )
