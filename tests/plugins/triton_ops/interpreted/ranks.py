"""Sums and joins by kernels that write to other ranks' memory, each rank in a process."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable
from typing import Any

import patience
import pytest
import torch
from push_cases import check, draw_exchanges
from torch import Tensor

from headstock.spi import Collectives, PeerMemory
from headstock_triton.ranks.push import PushCollectives, connect_by_push, count_bytes

MOST = 1 << 16


class SharedRank(Collectives):
    """A rank that shares memory with others of a machine, and can wait for them, no more."""

    def __init__(self, index: int, memory: list[Tensor], barrier: Any) -> None:
        self.index, self.count = index, len(memory)
        self.memory, self.barrier = memory, barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.numel() == 1, "a sum that no kernel serves"
        self.barrier.wait(patience.seconds)
        return x

    def share_memory(self, size: int) -> PeerMemory | None:
        assert len(self.memory[self.index]) == size
        addresses = torch.tensor([each.data_ptr() for each in self.memory])
        flag = torch.zeros(1, dtype=torch.int32)
        return PeerMemory(own=self.memory[self.index], addresses=addresses, abandoned=flag)


def run_rank(rank: SharedRank, count: int, seed: int, results: Any) -> None:
    signal.alarm(int(patience.seconds))  # a rank whose peer fails waits for ever
    torch.set_num_threads(1)
    ranks = connect_by_push(rank, MOST)
    assert isinstance(ranks, PushCollectives)
    exchanges = draw_exchanges(rank.count, count, "cpu", seed)
    # As bytes: a queue of tensors would need the process that has filled it.
    found = [exchange.run(ranks) for exchange in exchanges]
    words = {2: torch.int16, 4: torch.int32}
    results.put((rank.index, [[x.view(words[x.itemsize]).numpy() for x in row] for row in found]))


@pytest.mark.parametrize(("world", "count"), [(2, 30), (3, 12)])
def test_ranks_exchange_numbers_through_memory(world: int, count: int) -> None:
    context = multiprocessing.get_context("fork")
    size = count_bytes(world, MOST)
    memory = [torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(world)]
    barrier, results = context.Barrier(world), context.Queue()
    processes = []
    for index in range(world):
        rank = SharedRank(index, memory, barrier)
        process = context.Process(target=run_rank, args=(rank, count, world, results), daemon=True)
        process.start()
        processes.append(process)

    found = dict(results.get(timeout=patience.seconds) for _ in processes)

    for at, exchange in enumerate(draw_exchanges(world, count, "cpu", world)):
        dtypes = [right.dtype for right in exchange.expect()]
        check(
            exchange,
            tuple(
                tuple(
                    torch.from_numpy(x).view(dtype)
                    for x, dtype in zip(found[index][at], dtypes, strict=True)
                )
                for index in range(world)
            ),
        )
    for process in processes:
        process.join(patience.seconds)
        assert process.exitcode == 0


def test_no_kernel_waits_for_a_rank_that_has_gone() -> None:
    memory = [torch.zeros(count_bytes(2, MOST), dtype=torch.uint8) for _ in range(2)]
    barrier = multiprocessing.get_context("fork").Barrier(1)
    ranks = connect_by_push(SharedRank(0, memory, barrier), MOST)
    assert isinstance(ranks, PushCollectives)
    x, weight = torch.ones(3, 256), torch.ones(256)
    exchanges: dict[str, Callable[[], object]] = {
        "sum": lambda: ranks.all_reduce(x),
        "join": lambda: ranks.all_gather(x),
        "add and norm": lambda: ranks.add_norm(x, x.clone(), weight, 1e-6),
    }
    done: list[str] = []

    def work() -> None:
        for name, exchange in exchanges.items():
            exchange()
            done.append(name)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.5)
    assert not done, "rank 1 has sent nothing"

    ranks.flag.fill_(1)
    thread.join(patience.seconds)

    assert done == list(exchanges)


def test_a_rank_alone_or_without_memory_keeps_its_collectives() -> None:
    alone = Collectives()
    apart = SharedRank(0, [torch.zeros(1)] * 2, None)
    apart.share_memory = lambda size: None  # type: ignore[method-assign]

    assert connect_by_push(alone, MOST) is alone
    assert connect_by_push(apart, MOST) is apart
    assert connect_by_push(apart, 0) is apart
