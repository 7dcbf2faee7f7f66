"""Load a model directory in a process of its own, and print the most anonymous memory it took.

`python load_memory.py DIRECTORY OPS`: bytes at the most, of the weights, and of the largest
parameter or the tensor that it is cut out of.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from pathlib import Path

import torch

from headstock.startup.model_loading import read_model
from headstock.weights import load_weights
from headstock.weights.load import parameter_dtype

STATUS = Path("/proc/self/status")
INTERVAL = 0.001


def anonymous_bytes() -> int:
    """Memory of this process that is of no file: mapped checkpoints are not in it."""
    return next(
        int(line.split()[1]) << 10
        for line in STATUS.read_text().splitlines()
        if line.startswith("RssAnon")
    )


def main(directory: Path, ops: str) -> None:
    module, name = ops.split(":")
    prepare = getattr(import_module(module), name)().prepare
    family, config = read_model(directory)
    specs = family.params(config)
    highest, done = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(INTERVAL):
            highest = max(highest, anonymous_bytes())

    # Libraries allocate their own buffers in their first product.
    torch.ones(64, 64) @ torch.ones(64, 64)
    before = anonymous_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    params = load_weights(
        directory,
        specs,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=64,
        prepare=prepare,
    )
    done.set()
    watcher.join()
    largest = max(
        torch.Size(spec.source_shape or spec.shape).numel()
        * parameter_dtype(spec, torch.float32).itemsize
        for spec in specs.values()
    )
    print(highest - before, sum(weight.nbytes for weight in params.values()), largest)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
