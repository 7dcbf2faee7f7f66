"""Start the ranks of a model, or take those that something else has started."""

from __future__ import annotations

import logging
import os

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
from headstock_multiprocess.rendezvous import accept_ranks, read_placement

LOG = logging.getLogger("headstock.multiprocess")

_LOCAL = "127.0.0.1"


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
    links = {
        index: Link[FromRank](connection, FromRank)
        for index, connection in accept_ranks(place, options.patience).items()
    }
    followers = [Follower(index, RemoteProcess(link), link) for index, link in links.items()]
    leader = Leader(config.tp, place.address, options, followers)
    return _begin(leader, on_gpu=_uses_gpus(config))


def _start_local_ranks(config: EngineConfig, options: MultiprocessOptions) -> Leader:
    """Start a process on this machine for each rank but the first.   raises: CannotRun"""
    on_gpu = _uses_gpus(config)
    if on_gpu and torch.cuda.device_count() < config.tp:
        raise CannotRun(
            f"tp (--tp) {config.tp}: expected as many GPUs, got {torch.cuda.device_count()}; "
            "lower it, or check CUDA_VISIBLE_DEVICES"
        )
    followers = []
    for index in range(1, config.tp):
        process, link = start_process(config.tp)
        followers.append(Follower(index, process, link))
    return _begin(Leader(config.tp, _LOCAL, options, followers), on_gpu=on_gpu)


def _uses_gpus(config: EngineConfig) -> bool:
    """Whether the ranks compute on GPUs."""
    return config.device != "cpu" and torch.cuda.is_available()


def _begin(leader: Leader, *, on_gpu: bool) -> Leader:
    """Tell each other rank which one it is."""
    level = logging.getLevelName(LOG.getEffectiveLevel())
    for follower in leader.followers:
        start = Start(follower.index, leader.count, leader.address, on_gpu, level)
        send_or_drop(follower.link, start)
    return leader
