"""A Ray cluster whose nodes are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import patience
import ray
from ray.cluster_utils import Cluster

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Ray itself imports
    from ray import serve

__all__ = ["describe_node", "find_actors", "find_processes", "serve", "start_cluster", "wait_for"]

MEMORY = 100 << 20
"""Of a node's object store."""


@contextlib.contextmanager
def start_cluster(*num_cpus: int, **head: Any) -> Iterator[Cluster]:
    """A cluster of nodes with so many CPUs each; this process is connected to the first.

    head: more arguments of the first node
    """
    # Paths of sockets may have a hundred letters, and Ray's own part of them has seventy.
    folder = tempfile.mkdtemp(prefix="hs", dir="/tmp")
    variables = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    cluster = Cluster()
    try:
        cluster.add_node(**describe_node(num_cpus[0]), include_dashboard=False, **head)
        for each in num_cpus[1:]:
            cluster.add_node(**describe_node(each))
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(folder, ignore_errors=True)


def describe_node(num_cpus: int) -> dict[str, Any]:
    """The arguments of a node."""
    return {"num_cpus": num_cpus, "object_store_memory": MEMORY}


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Wait until something is so."""
    end = time.monotonic() + patience.seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def find_actors(name: str) -> list[int]:
    """The processes of the actors of a class."""
    return find_processes(lambda line: line.startswith(f"ray::{name}".encode()))


def find_processes(fits: Callable[[bytes], bool]) -> list[int]:
    """The processes of this machine whose command line fits."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if fits(path.read_bytes()):
                found.append(int(path.parent.name))
    return found
