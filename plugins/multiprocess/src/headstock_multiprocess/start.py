"""Start the ranks of a model, or take those that something else has started.

This imports no torch: the processes of other ranks import it while this one does.
"""

from __future__ import annotations

import logging
import os
from typing import TypeVar

from headstock.config import EngineConfig
from headstock.errors import CannotRun
from headstock.spi import Ranks
from headstock_multiprocess.leader import Follower, Leader, send_or_drop, uses_gpus
from headstock_multiprocess.link import Link
from headstock_multiprocess.messages import FromRank, Start
from headstock_multiprocess.options import MultiprocessOptions
from headstock_multiprocess.processes import RemoteProcess, start_process
from headstock_multiprocess.rendezvous import (
    accept_ranks,
    connect_to_leader,
    open_listener,
    read_placement,
)

LOG = logging.getLogger("headstock.multiprocess")

_LOCAL = "127.0.0.1"

AnyLeader = TypeVar("AnyLeader", bound=Leader)


class LocalLeader(Leader):
    """Rank 0 of ranks that are processes of this machine."""

    def begin(self) -> None:
        """See `Ranks.begin`."""
        import torch

        wanted = 1 if self.options.one_gpu else self.count
        if uses_gpus(self.device) and torch.cuda.device_count() < wanted:
            raise CannotRun(
                f"tp (--tp) {self.count}: expected as many GPUs, got {torch.cuda.device_count()}; "
                "lower it, or check CUDA_VISIBLE_DEVICES"
            )
        super().begin()

    def count_threads(self) -> int:
        """See `Leader.count_threads`."""
        import torch

        return max(1, torch.get_num_threads() // self.count)


def start_ranks(config: EngineConfig, options: MultiprocessOptions) -> Ranks:
    """Start a process on this machine for each rank but the first, where nothing else has.

    Under torchrun, or what sets the same variables, this process may be another rank than 0.

    raises: UsageError, CannotRun
    """
    place = read_placement(os.environ, config.tp)
    if place is None:
        return _start_local_ranks(config, options)
    if place.index:
        # Before torch is imported, for which rank 0 need not wait.
        connection = connect_to_leader(place, options.patience)
        from headstock_multiprocess.follower import follow_connection

        return follow_connection(connection, place)
    with open_listener(place) as listener:
        connections = accept_ranks(listener, place, options.patience)
    links = {
        index: Link[FromRank](connection, FromRank) for index, connection in connections.items()
    }
    followers = [Follower(index, RemoteProcess(link), link) for index, link in links.items()]
    return number_ranks(Leader(config.tp, place.address, options, followers, config.device))


def _start_local_ranks(config: EngineConfig, options: MultiprocessOptions) -> Leader:
    """Start a process on this machine for each rank but the first."""
    followers = []
    for index in range(1, config.tp):
        process, link = start_process()
        followers.append(Follower(index, process, link))
    return number_ranks(LocalLeader(config.tp, _LOCAL, options, followers, config.device))


def number_ranks(leader: AnyLeader) -> AnyLeader:
    """Tell each other rank which one it is."""
    level = logging.getLevelName(LOG.getEffectiveLevel())
    for follower in leader.followers:
        start = Start(follower.index, leader.count, leader.address, leader.options.one_gpu, level)
        send_or_drop(follower.link, start)
    return leader
