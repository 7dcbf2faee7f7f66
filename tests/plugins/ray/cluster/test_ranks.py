"""Ranks as actors on a cluster of two nodes, which one machine plays, with a CPU each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import patience
import pytest
import ray
from ray.cluster_utils import Cluster
from ray_cluster import describe_node, find_actors, start_cluster, wait_for

RUN = ("--device", "cpu", "--prompt", "Once upon a time", "--temperature", "0")
SIZES = ("--num-pages", "64", "--max-seq-len", "256")
ENDLESS = ("--num-pages", "512", "--max-seq-len", "4096", "--max-tokens", "4000", "--ignore-eos")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with room for a rank each."""
    with start_cluster(1, 1) as found:
        yield found


def start(cluster: Cluster | None, *arguments: str) -> subprocess.Popen[str]:
    """`headstock run` with these arguments, on the cluster if there is one."""
    executor = (
        () if cluster is None else ("--executor", "ray", "--opt", f"ray.address={cluster.address}")
    )
    return subprocess.Popen(
        [sys.executable, "-m", "headstock", "run", *RUN, *executor, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The exit code of a process, and what it has written."""
    try:
        out, errors = process.communicate(timeout=patience.seconds)
    finally:
        process.kill()
    return process.returncode, out, errors


def find_ranks() -> list[int]:
    """The processes of ranks that are actors."""
    return find_actors("RankActor")


def check_nothing_stays(num_cpus: int = 2) -> None:
    """No rank is left, and the cluster is as free as before."""
    wait_for(lambda: find_ranks() == [], "a rank is left")
    wait_for(lambda: ray.available_resources().get("CPU") == num_cpus, "a CPU is taken")


def start_endless(cluster: Cluster) -> tuple[subprocess.Popen[str], int]:
    """A run of two ranks in the middle of its steps, and the process of rank 1."""
    process = start(cluster, *ENDLESS, "--tp", "2")
    assert process.stderr is not None and process.stdout is not None
    while not (line := process.stderr.readline()).startswith("start"):
        assert line, "it did not start"
    (rank,) = find_ranks()
    return process, rank


@pytest.mark.feature("S19")
def test_ranks_on_two_nodes_answer_as_one(cluster: Cluster) -> None:
    short = (*SIZES, "--max-tokens", "24", "--json")
    code, out, errors = finish(start(cluster, *short, "--tp", "2"))
    assert code == 0, errors
    expected = finish(start(None, *short))
    assert json.loads(out)["token_ids"] == json.loads(expected[1])["token_ids"]
    check_nothing_stays()


def test_a_rank_that_is_killed_is_named_and_ends_the_engine(cluster: Cluster) -> None:
    process, rank = start_endless(cluster)
    os.kill(rank, signal.SIGKILL)
    code, _, errors = finish(process)

    assert code == 70, errors
    line = errors.splitlines()[-1]
    assert f"rank 1 (process {rank} on " in line and line.endswith("its worker process has died")
    check_nothing_stays()


def test_ranks_end_with_rank_0(cluster: Cluster) -> None:
    process, _ = start_endless(cluster)
    process.kill()
    finish(process)

    check_nothing_stays()


def test_a_cluster_without_room_is_refused_in_one_line_before_weights_load(
    cluster: Cluster,
) -> None:
    few = start(cluster, *SIZES, "--tp", "3", "--opt", "ray.wait=2")
    code, out, errors = finish(few)

    assert (code, out, errors.count("\n")) == (5, "", 1), errors
    assert "tp (--tp) 3: expected 3 free CPUs in the Ray cluster" in errors
    assert "got 2 of 2 on 2 nodes after 2 s" in errors
    check_nothing_stays()


def test_a_cluster_that_is_not_there_is_refused_in_one_line() -> None:
    code, _, errors = finish(
        start(None, *SIZES, "--tp", "2", "--executor", "ray", "--opt", "ray.address=127.0.0.1:9")
    )
    assert (code, errors.count("\n")) == (5, 1), errors
    assert (
        "no cluster at 127.0.0.1:9: [Errno 111] Connection refused" in errors
        and "ray start --head" in errors
    )


def test_a_rank_whose_node_is_lost_is_named_and_ends_the_engine(cluster: Cluster) -> None:
    process, rank = start_endless(cluster)
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    code, _, errors = finish(process)

    assert code == 70, errors
    assert f"rank 1 (process {rank} on " in errors.splitlines()[-1]
    cluster.add_node(**describe_node(1))
    wait_for(lambda: ray.cluster_resources().get("CPU") == 2, "the node has not come back")
    check_nothing_stays()
