"""Latency workloads are those that other engines are measured on, and bad names are refused."""

from __future__ import annotations

import pytest

from headstock.errors import UsageError
from headstock_bench.latency_workloads import (
    check_latency_workload,
    draw_latency_workload,
    is_latency_workload,
)


@pytest.mark.feature("V8")
def test_online_draws_the_arrivals_prompts_and_lengths_that_peers_are_measured_on() -> None:
    work = draw_latency_workload("online:16:200")
    assert work.arrivals is not None
    assert work.arrivals[:3] == (0.009018191506844325, 0.0246378046096982, 0.09204586561799952)
    assert work.arrivals[-1] == 10.993871554651063 and list(work.arrivals) == sorted(work.arrivals)
    assert [len(prompt) for prompt in work.prompts[:3]] == [995, 264, 443]
    assert [prompt[:3] for prompt in work.prompts[:2]] == [(1033, 4179, 1931), (1847, 3024, 6735)]
    assert work.outputs[:3] == (239, 209, 197)
    assert (len(work.prompts), work.tokens_in, work.tokens_out) == (200, 113_532, 32_230)
    assert (work.name, work.temperature, work.seed) == ("online:16:200", 0.6, 1)


def test_a_higher_rate_brings_the_same_requests_sooner() -> None:
    slow, fast = draw_latency_workload("online:4:8"), draw_latency_workload("online:8.0:8")
    assert (fast.prompts, fast.outputs) == (slow.prompts, slow.outputs)
    assert slow.arrivals is not None and fast.arrivals is not None
    assert [2 * at for at in fast.arrivals] == pytest.approx(slow.arrivals)


def test_first_token_draws_prompts_of_one_length_that_share_nothing() -> None:
    work = draw_latency_workload("first-token:128:3")
    assert [prompt[:3] for prompt in work.prompts] == [
        (6311, 6890, 663),
        (9402, 8752, 9865),
        (241, 6583, 6840),
    ]
    assert [len(prompt) for prompt in work.prompts] == [128] * 3
    assert (work.outputs, work.arrivals, work.seed) == ((2, 2, 2), None, 0)
    assert len(draw_latency_workload("first-token:8").prompts) == 100


@pytest.mark.parametrize("name", ["online:16:20", "first-token:8:20"])
def test_the_first_sixteen_requests_warm_up(name: str) -> None:
    work = draw_latency_workload(name)
    assert (work.warm_up.prompts, work.warm_up.outputs) == (work.prompts[:16], work.outputs[:16])
    assert work.warm_up.arrivals == (work.arrivals and work.arrivals[:16])
    assert work.warm_up.name == name


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("online", "is not of the form online:RATE:COUNT, as in online:16:200"),
        ("online:16", "is not of the form online:RATE:COUNT"),
        ("online:16:200:3", "is not of the form online:RATE:COUNT"),
        ("online:0:200", "RATE: expected a number from 0.001 to 100,000, got '0'"),
        ("online:nan:200", "RATE: expected a number from 0.001 to 100,000, got 'nan'"),
        ("online:1_6:200", "RATE: expected a number from 0.001 to 100,000, got '1_6'"),
        ("online:-1:200", "RATE: expected a number from 0.001 to 100,000, got '-1'"),
        ("online:16:0", "COUNT: expected a whole number from 1 to 10,000, got '0'"),
        ("online:16:2.5", "COUNT: expected a whole number from 1 to 10,000, got '2.5'"),
        ("online:16:10001", "COUNT: expected a whole number from 1 to 10,000, got '10001'"),
        ("first-token", "is not of the form first-token:LENGTH[:COUNT], as in first-token:128"),
        ("first-token:", "LENGTH: expected a whole number from 1 to 10,000,000, got ''"),
        ("first-token:128:", "COUNT: expected a whole number from 1 to 10,000, got ''"),
        ("first-token:1000000", "has 100,000,000 prompt tokens (LENGTH x COUNT)"),
        ("online:" + "9" * 5000 + ":2", "RATE: expected a number from 0.001 to 100,000, got '999"),
    ],
)
def test_a_malformed_name_is_refused_with_its_form(name: str, fault: str) -> None:
    assert is_latency_workload(name)
    with pytest.raises(UsageError) as raised:
        check_latency_workload(name)
    assert fault in str(raised.value) and len(str(raised.value)) < 300


def test_other_names_are_no_latency_workloads() -> None:
    assert [
        name for name in ("cpu1", "first", "onlin:16:200", "") if is_latency_workload(name)
    ] == []
