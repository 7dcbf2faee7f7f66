"""Rank 0 of ranks that are actors."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from headstock.errors import describe_error, shorten
from headstock_multiprocess.leader import Follower, Leader
from headstock_multiprocess.options import MultiprocessOptions
from headstock_multiprocess.processes import RankProcess
from headstock_ray.rank_actor import Seat

_END_SECONDS = 5.0
"""How long Ray may take to notice the end of an actor."""
_TEXT_LENGTH = 240


class RankHandle(RankProcess):
    """A rank that is an actor.

    run: the reference to what `RankActor.run` returns
    """

    def __init__(self, actor: Any, seat: Seat) -> None:
        self.actor = actor
        self.seat = seat
        self.run: Any = None

    def __str__(self) -> str:
        return f"process {self.seat.process_id} on {self.seat.node}"

    def kill(self) -> None:
        """See `RankProcess.kill`."""
        kill_actor(self.actor)

    def wait(self, seconds: float) -> None:
        """See `RankProcess.wait`."""
        ray.wait([self.run], timeout=seconds)

    def describe_end(self) -> str:
        """See `RankProcess.describe_end`."""
        return self.find_end(_END_SECONDS) or "closed its connection"

    def find_end(self, seconds: float) -> str:
        """Say how the actor has ended; empty if it has not after so many seconds."""
        done, _ = ray.wait([self.run], timeout=seconds)
        if not done:
            return ""
        try:
            reason = ray.get(self.run)
        except RayError as error:
            # Ray's second sentence on begins to guess.
            return f"was lost: {describe_ray_error(error).partition('. ')[0]}"
        return f"ended: {reason}" if reason else "ended"


class RayLeader(Leader):
    """Rank 0 of ranks that are actors of a placement group."""

    def __init__(
        self,
        count: int,
        address: str,
        options: MultiprocessOptions,
        followers: Sequence[Follower],
        group: ActorGroup,
        device: str,
    ) -> None:
        self.group = group
        super().__init__(count, address, options, followers, device)

    def close(self) -> None:
        """See `Ranks.close`."""
        super().close()
        self.group.release()


class ActorGroup:
    """A placement group and its actors."""

    def __init__(self, placement: Any) -> None:
        self.placement = placement
        self.actors: list[Any] = []

    def release(self) -> None:
        """End the actors and free what they hold; a second call does nothing."""
        for actor in self.actors:
            kill_actor(actor)
        self.actors.clear()
        if self.placement is not None and ray.is_initialized():
            with contextlib.suppress(RayError):
                ray.util.remove_placement_group(self.placement)
        self.placement = None


def kill_actor(actor: Any) -> None:
    """End an actor, which may have ended before."""
    with contextlib.suppress(RayError, ValueError):
        ray.kill(actor, no_restart=True)


def describe_ray_error(error: BaseException) -> str:
    """The last line of an error of Ray's, which has the cause below its traces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shorten(lines[-1].rstrip("."), _TEXT_LENGTH) if lines else describe_error(error)
