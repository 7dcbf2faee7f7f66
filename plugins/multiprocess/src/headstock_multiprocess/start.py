"""Start the ranks of a model, or take those that something else has started."""

from __future__ import annotations

import logging
import os
from typing import TypeVar

import torch

from headstock.config import EngineConfig
from headstock.errors import CannotRun
from headstock.spi import Ranks
from headstock_multiprocess.follower import connect_rank
from headstock_multiprocess.leader import Follower, Leader, send_or_drop
from headstock_multiprocess.link import Link
from headstock_multiprocess.messages import FromRank, Start
from headstock_multiprocess.options import MultiprocessOptions
from headstock_multiprocess.processes import RemoteProcess, start_process
from headstock_multiprocess.rendezvous import accept_ranks, open_listener, read_placement

LOG = logging.getLogger("headstock.multiprocess")

_LOCAL = "127.0.0.1"

AnyLeader = TypeVar("AnyLeader", bound=Leader)


def start_ranks(config: EngineConfig, options: MultiprocessOptions) -> Ranks:
    """Start a process on this machine for each rank but the first, where nothing else has.

    Under torchrun, or what sets the same variables, this process may be another rank than 0.

    raises: UsageError, CannotRun
    """
    place = read_placement(os.environ, config.tp)
    if place is None:
        return _start_local_ranks(config, options)
    if place.index:
        return connect_rank(place, options.patience)
    with open_listener(place) as listener:
        connections = accept_ranks(listener, place, options.patience)
    links = {
        index: Link[FromRank](connection, FromRank) for index, connection in connections.items()
    }
    followers = [Follower(index, RemoteProcess(link), link) for index, link in links.items()]
    leader = Leader(config.tp, place.address, options, followers)
    return begin_ranks(leader, on_gpu=uses_gpus(config))


def _start_local_ranks(config: EngineConfig, options: MultiprocessOptions) -> Leader:
    """Start a process on this machine for each rank but the first.   raises: CannotRun"""
    on_gpu = uses_gpus(config)
    wanted = 1 if options.one_gpu else config.tp
    if on_gpu and torch.cuda.device_count() < wanted:
        raise CannotRun(
            f"tp (--tp) {config.tp}: expected as many GPUs, got {torch.cuda.device_count()}; "
            "lower it, or check CUDA_VISIBLE_DEVICES"
        )
    followers = []
    for index in range(1, config.tp):
        process, link = start_process(config.tp)
        followers.append(Follower(index, process, link))
    return begin_ranks(Leader(config.tp, _LOCAL, options, followers), on_gpu=on_gpu)


def uses_gpus(config: EngineConfig) -> bool:
    """Whether the ranks compute on GPUs."""
    return config.device != "cpu" and torch.cuda.is_available()


def begin_ranks(leader: AnyLeader, *, on_gpu: bool) -> AnyLeader:
    """Tell each other rank which one it is."""
    level = logging.getLevelName(LOG.getEffectiveLevel())
    for follower in leader.followers:
        start = Start(
            follower.index, leader.count, leader.address, on_gpu, leader.options.one_gpu, level
        )
        send_or_drop(follower.link, start)
    return leader
