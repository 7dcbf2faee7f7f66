"""Ranks as actors of a Ray cluster: their room, their start."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import attrs
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headstock.config import EngineConfig
from headstock.errors import CannotRun, shorten
from headstock_multiprocess.leader import Follower, uses_gpus
from headstock_multiprocess.link import Link
from headstock_multiprocess.messages import FromRank
from headstock_multiprocess.rendezvous import Placement, accept_ranks, open_listener
from headstock_multiprocess.start import number_ranks
from headstock_ray.gpus import find_visible_gpu
from headstock_ray.options import RayOptions
from headstock_ray.rank_actor import RankActor, Seat
from headstock_ray.ranks import ActorGroup, RankHandle, RayLeader, describe_ray_error

LOG = logging.getLogger("headstock.ray")

_NODE_LABEL = "ray.io/node-id"
_PROBE_SECONDS = 10.0
_SECRET_BYTES = 32


def start_actors(config: EngineConfig, options: RayOptions) -> RayLeader:
    """Start an actor for each rank but the first, which is this process.   raises: CannotRun"""
    connect_cluster(options.address)
    on_gpu = uses_gpus(config.device)
    group = ActorGroup(reserve_bundles(config.tp, options.wait, on_gpu=on_gpu))
    try:
        return _start_actors(config, options, group, on_gpu=on_gpu)
    except BaseException:
        group.release()
        raise


def connect_cluster(address: str) -> None:
    """Connect this process to a cluster, to the end of the process.   raises: CannotRun"""
    if ray.is_initialized():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        check_listens(address)
        # What actors print must not get between the lines of an answer: Ray keeps it in its logs.
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise CannotRun(
            f"executor (--executor) ray: no cluster at {shorten(address)}: "
            f"{describe_ray_error(error)}; start one with 'ray start --head', or set --opt "
            "ray.address"
        ) from error
    finally:
        # Ray's own would end this process, which may have requests to finish.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def check_listens(address: str) -> None:
    """Raise OSError where nothing listens on HOST:PORT, for which Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()


def reserve_bundles(count: int, wait: float, *, on_gpu: bool) -> Any:
    """Reserve a GPU, or a CPU, for each rank; that of rank 0 on this node.   raises: CannotRun"""
    name = "GPU" if on_gpu else "CPU"
    here = {_NODE_LABEL: ray.get_runtime_context().get_node_id()}
    placement = ray.util.placement_group(
        [{name: 1}] * count,
        strategy="PACK",
        bundle_label_selector=[here, *({} for _ in range(count - 1))],
    )
    if placement.wait(wait):
        return placement
    ray.util.remove_placement_group(placement)
    free, total = (
        int(each.get(name, 0)) for each in (ray.available_resources(), ray.cluster_resources())
    )
    num_nodes = sum(node["Alive"] for node in ray.nodes())
    raise CannotRun(
        f"tp (--tp) {count}: expected {count} free {name}s in the Ray cluster, one of them on this "
        f"node, got {free} of {total} on {num_nodes} nodes after {wait:g} s; lower it, add nodes, "
        "or wait longer with --opt ray.wait"
    )


def _start_actors(
    config: EngineConfig, options: RayOptions, group: ActorGroup, *, on_gpu: bool
) -> RayLeader:
    """Start the actors of all ranks but the first, and connect to them.   raises: CannotRun"""
    count = config.tp
    # Rank 0's own GPU is one that Ray gives away: an actor holds it.
    first = 0 if on_gpu else 1
    actors = {index: _make_actor(group, index, on_gpu=on_gpu) for index in range(first, count)}
    handles = {
        index: RankHandle(actor, _find_seat(index, actor, options.patience))
        for index, actor in actors.items()
    }
    holder = handles.pop(0, None)
    if holder is not None:
        torch.cuda.set_device(find_visible_gpu(holder.seat.gpu, os.environ))
    seats = [each.seat for each in (holder, *handles.values()) if each is not None]
    (address,) = (
        node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["NodeID"] == ray.get_runtime_context().get_node_id()
    )
    place = Placement(0, count, address, 0, secrets.token_bytes(_SECRET_BYTES))
    level = logging.getLevelName(LOG.getEffectiveLevel())
    with open_listener(place) as listener:
        place = attrs.evolve(place, port=listener.getsockname()[1])
        for index, handle in handles.items():
            seat = handle.seat
            handle.run = handle.actor.run.remote(
                attrs.evolve(place, index=index),
                options.patience,
                level,
                seat.gpu,
                [each.gpu for each in seats if each.node == seat.node],
            )
        watch = _StartWatch(handles, options.patience)
        connections = accept_ranks(listener, place, float("inf"), watch.check)
    followers = []
    for index, connection in sorted(connections.items()):
        followers.append(Follower(index, handles[index], Link[FromRank](connection, FromRank)))
    return number_ranks(RayLeader(count, address, options, followers, group, config.device))


def _make_actor(group: ActorGroup, index: int, *, on_gpu: bool) -> Any:
    """An actor in the bundle of its rank, which may still be starting."""
    actor = (
        ray.remote(RankActor)
        .options(
            num_cpus=int(not on_gpu),
            num_gpus=int(on_gpu),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group.placement, placement_group_bundle_index=index
            ),
        )
        .remote()
    )
    group.actors.append(actor)
    return actor


def _find_seat(index: int, actor: Any, patience: float) -> Seat:
    """Where the actor of a rank is, once it has started.   raises: CannotRun"""
    try:
        seat: Seat = ray.get(actor.find_seat.remote(), timeout=patience)
    except GetTimeoutError as error:
        raise CannotRun(
            f"rank {index}: its actor has not started within {patience:g} s; see Ray's logs"
        ) from error
    except RayError as error:
        raise CannotRun(
            f"rank {index}: its actor did not start: {describe_ray_error(error)}; install the same "
            "packages on all nodes"
        ) from error
    return seat


class _StartWatch:
    """Watches over ranks until they have connected."""

    def __init__(self, handles: Mapping[int, RankHandle], patience: float) -> None:
        self.handles = handles
        self.patience = patience
        self.deadline = time.monotonic() + patience

    def check(self) -> None:
        """Raise CannotRun once a rank has ended or is late."""
        for index, handle in self.handles.items():
            if end := handle.find_end(0):
                raise CannotRun(f"rank {index} ({handle}) {end}")
        if time.monotonic() > self.deadline:
            names = ", ".join(map(str, self.handles.values()))
            raise CannotRun(
                f"no connection from each of the ranks ({names}) within {self.patience:g} s; check "
                "that their nodes reach this one on any TCP port"
            )
