"""Start the ranks of a model on a Ray cluster."""

from __future__ import annotations

from headstock.config import EngineConfig
from headstock.spi import Ranks
from headstock_ray.options import RayOptions


def start_ranks(config: EngineConfig, options: RayOptions) -> Ranks:
    """Start an actor for each rank but the first, which is this process.   raises: CannotRun"""
    # Late: Ray may be absent where the plugin is only listed.
    from headstock_ray.actors import start_actors

    return start_actors(config, options)
