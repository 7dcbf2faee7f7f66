"""What the executor `ray` decides without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from headstock import registry
from headstock.errors import CannotRun, UsageError
from headstock.spi import ExecutorSpec
from headstock_ray.gpus import find_visible_gpu


@pytest.fixture
def spec() -> ExecutorSpec:
    found: ExecutorSpec = registry.load_spec("executor", "ray")
    return found


def test_the_options_of_a_cluster_come_beside_those_of_ranks(spec: ExecutorSpec) -> None:
    options: Any = registry.make_options(spec, ("ray.address=10.0.0.1:6379", "ray.silence=5"))

    assert (options.address, options.wait) == ("10.0.0.1:6379", 20.0)
    assert (options.silence, options.patience) == (5.0, 300.0)


@pytest.mark.parametrize("option", ["address=ray://10.0.0.1:10001", "address=", "wait=0"])
def test_an_option_that_no_cluster_can_have_is_refused(option: str, spec: ExecutorSpec) -> None:
    with pytest.raises(UsageError, match=option.partition("=")[0]):
        registry.make_options(spec, (f"ray.{option}",))


@pytest.mark.parametrize(
    ("visible", "gpu", "number"),
    [(None, "3", 3), ("2,3", "3", 1), ("3", "3", 0), (" 5, 1", "1", 1), ("GPU-ab", "GPU-ab", 0)],
)
def test_the_gpu_that_ray_gives_rank_0_is_found_among_those_that_it_sees(
    visible: str | None, gpu: str, number: int
) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert find_visible_gpu(gpu, variables) == number


@pytest.mark.parametrize("visible", [None, "", "0,1"])
def test_a_gpu_that_rank_0_does_not_see_is_refused(visible: str | None) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(CannotRun, match="Ray has given rank 0 the GPU"):
        find_visible_gpu("GPU-x" if visible is None else "3", variables)
