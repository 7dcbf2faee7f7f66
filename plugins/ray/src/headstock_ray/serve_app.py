"""A Ray Serve application of `headstock serve`: `serve run headstock_ray.serve_app:build ...`."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from headstock_openai_server.command import read_command
from headstock_ray.ingress import Ingress
from headstock_ray.layout import split_arguments
from headstock_ray.replica import Replica

_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
_HEALTH_SECONDS = 2.0
_STREAMS = 10_000
"""Requests that an ingress may have at once; replicas refuse what they have no room for."""
_BUSY_SHARE = 0.75
"""The share of a replica's rows from which Ray Serve adds one."""


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application for the fields of `Layout`, and flags of `headstock serve` without dashes.

    raises: UsageError, ModelError
    """
    layout, flags = split_arguments(arguments)
    command = read_command(flags)
    config = command.resolved.engine
    count: dict[str, Any] = {"num_replicas": layout.replicas}
    if layout.autoscaling:
        busy = max(1, int(_BUSY_SHARE * config.max_running_requests))
        automatic = {"max_replicas": layout.replicas, "target_ongoing_requests": busy}
        count = {"autoscaling_config": automatic | dict(layout.autoscaling)}
    most = config.max_running_requests + config.max_queued_requests
    resources = {"num_cpus": config.tp} if config.device == "cpu" else {"num_gpus": config.tp}
    replicas = serve.deployment(Replica).options(
        name="replica",
        **count,
        ray_actor_options=resources | dict(layout.replica_resources),
        max_ongoing_requests=most,
        max_queued_requests=most,
        graceful_shutdown_timeout_s=command.settings.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=layout.ingresses,
        ray_actor_options={"num_cpus": 0} | dict(layout.ingress_resources),
        max_ongoing_requests=_STREAMS,
        graceful_shutdown_timeout_s=command.settings.drain_timeout,
    )
    bound: serve.Application = ingress.bind(replicas.bind(flags), command.settings.max_body_bytes)
    return bound
