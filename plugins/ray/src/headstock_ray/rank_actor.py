"""The actor of a rank, as it is on its node."""

from __future__ import annotations

import os
from collections.abc import Sequence

import ray
from attrs import frozen

from headstock.errors import HeadstockError
from headstock.logs import show_logs
from headstock.startup import build
from headstock_multiprocess.follower import connect_rank
from headstock_multiprocess.rendezvous import Placement


@frozen
class Seat:
    """Where an actor is.

    gpu: the GPU that Ray has given it, by the name it has there; empty for none
    """

    node: str
    process_id: int
    gpu: str


class RankActor:
    """A rank in its own process. Ray starts and ends it, and has no part in its steps."""

    def find_seat(self) -> Seat:
        """Where this actor is."""
        (gpu,) = ray.get_runtime_context().get_accelerator_ids().get("GPU") or ("",)
        return Seat(ray.util.get_node_ip_address(), os.getpid(), gpu)

    def run(
        self, place: Placement, patience: float, log_level: str, gpu: str, gpus: Sequence[str]
    ) -> str:
        """Follow rank 0 to its end; return why this rank has ended before, or nothing.

        gpu: of this rank    gpus: of all ranks on this node
        """
        if gpu:
            # Ray shows an actor its own GPU alone, and ranks reach into the memory of their peers.
            # Nothing has asked CUDA before.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            os.environ["LOCAL_RANK"] = str(gpus.index(gpu))
        show_logs(log_level)
        try:
            build.run_rank(connect_rank(place, patience))
        except HeadstockError as error:
            return str(error)
        except OSError:
            return "rank 0 has gone"
        return ""
