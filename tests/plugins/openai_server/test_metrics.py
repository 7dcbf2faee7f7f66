"""What `/metrics` says is what happened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import SUMMARY
from served import Served

from headstock.engine.stats import EngineStats
from headstock_openai_server.observe.metrics import (
    BETWEEN_TOKENS,
    Histogram,
    ServerMetrics,
    name_series,
)

MONITORING = Path(__file__).parents[3] / "docs" / "monitoring"


@given(st.lists(st.floats(0, 100), max_size=30))
def test_a_histogram_counts_what_is_at_most_each_bound(seconds: list[float]) -> None:
    histogram = Histogram("a", "b", "m", BETWEEN_TOKENS)
    for each in seconds:
        histogram.observe(each)
    (family,) = histogram.collect()
    found = {each.labels.get("le", each.name): each.value for each in family.samples}
    for bound in BETWEEN_TOKENS:
        assert found[str(bound)] == sum(each <= bound for each in seconds)
    assert found["+Inf"] == found["a_count"] == len(seconds)
    assert found["a_sum"] == pytest.approx(sum(seconds))


@pytest.mark.feature("W11")
def test_vllms_prefix_gives_vllms_names() -> None:
    assert name_series("vllm", "kv_usage_ratio", "kv_cache_usage_perc") == (
        "vllm:kv_cache_usage_perc"
    )
    assert name_series("mine", "kv_usage_ratio", "kv_cache_usage_perc") == "mine_kv_usage_ratio"


BOARD = (
    "e2e_request_latency_seconds_bucket inter_token_latency_seconds_bucket prompt_tokens_total "
    "time_to_first_token_seconds_bucket generation_tokens_total num_requests_running "
    "num_requests_waiting kv_cache_usage_perc request_prompt_tokens_bucket "
    "request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum "
    "request_prefill_time_seconds_sum request_decode_time_seconds_sum "
    "request_max_num_generation_tokens_sum"
)
"""The series that the board of vLLM's own repository draws."""


@pytest.mark.feature("W11")
def test_vllms_prefix_serves_what_vllms_board_draws() -> None:
    counts = dict.fromkeys(EngineStats.__annotations__, 0)
    session = SimpleNamespace(
        engine=SimpleNamespace(
            stats=lambda: EngineStats(**counts), summary=SimpleNamespace(**SUMMARY)
        )
    )
    service: Any = SimpleNamespace(opened=session, num_sequences=0, silence=0.0)
    text = ServerMetrics("vllm", "demo", service).render().decode()
    drawn = set(re.findall(r'^vllm:(\w+){.*model_name="demo"', text, re.MULTILINE))
    assert set(BOARD.split()) - drawn == set()


def test_of_several_answers_the_longest_counts(server: Served) -> None:
    name = "headstock_request_longest_output_tokens"
    before = server.metric(f"{name}_count"), server.metric(f"{name}_sum")
    body = {"prompt": [[5, 6, 7, 8]] * 2, "n": 2, "max_tokens": 5, "ignore_eos": True}
    assert server.post("/v1/completions", body).status == 200
    assert server.metric(f"{name}_count") == before[0] + 2
    assert server.metric(f"{name}_sum") == before[1] + 10


@pytest.mark.feature("W11")
def test_requests_tokens_and_times_are_counted(server: Served) -> None:
    names = {
        "headstock_requests_total": 2.0,
        "headstock_time_to_first_token_seconds_count": 2.0,
        "headstock_request_seconds_count": 2.0,
        "headstock_output_tokens_total": 10.0,
        "headstock_prompt_tokens_total": 8.0,
        "headstock_inter_token_latency_seconds_count": 8.0,
        "headstock_queue_seconds_count": 2.0,
        "headstock_prefill_seconds_count": 2.0,
        "headstock_decode_seconds_count": 2.0,
        "headstock_request_prompt_tokens_sum": 8.0,
        "headstock_request_output_tokens_sum": 10.0,
        "headstock_request_longest_output_tokens_sum": 10.0,
    }
    server.wait_for("headstock_requests_running", 0)
    before = {name: server.metric(name) for name in names if server.get("/metrics")}
    body = {"prompt": [[5, 6, 7, 8]] * 2, "max_tokens": 5, "ignore_eos": True, "stream": True}
    assert server.post("/v1/completions", body).status == 200
    server.wait_for("headstock_output_tokens_total", before["headstock_output_tokens_total"] + 10)
    for name, rise in names.items():
        assert server.metric(name) == before[name] + rise, name
    text = server.get("/metrics").body.decode()
    assert 'http_responses_total{status="200"}' in text
    # Those that have not happened yet too: a series that begins at its first event hides it.
    outcomes = {"stop", "length", "tool_calls", "abort", "error"}
    assert set(re.findall(r'^headstock_requests_total{.*outcome="(\w+)"', text, re.M)) == outcomes
    (facts,) = re.findall(r"headstock_engine_info{(.*)}", text)
    assert 'attention="sdpa"' in facts and 'model_name="demo"' in facts
    pages = [server.metric(f"headstock_kv_pages_{kind}") for kind in ("live", "cached", "free")]
    assert pages[0] == 0 and sum(pages) == 128
    assert server.get("/metrics").headers["content-type"].startswith("text/plain; version=")


@pytest.mark.feature("W11")
def test_the_board_and_the_alerts_ask_for_series_that_exist(server: Served) -> None:
    text = server.get("/metrics").body.decode()
    published = set(re.findall(r"^(headstock_\w+)", text, re.MULTILINE))
    board = json.loads((MONITORING / "grafana.json").read_text())
    alerts = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    queries = [
        *(target["expr"] for panel in board["panels"] for target in panel["targets"]),
        *(each["query"] for each in board["templating"]["list"]),
        *(rule["expr"] for rule in alerts["groups"][0]["rules"]),
    ]
    # Whatever was asked of this server so far: a rate does not see the first of a new series.
    assert 'headstock_http_responses_total{status="503"} 0.0' in text
    wanted = set(re.findall(r"headstock_\w+", " ".join(queries)))
    assert len(wanted) > 20
    assert wanted - published == set()
    labels = {"model_name", "outcome", "kind", "status", "le"}
    assert set(re.findall(r"(\w+)=~?\"", " ".join(queries))) <= labels
    places = [tuple(panel["gridPos"][name] for name in "xy") for panel in board["panels"]]
    assert len(places) == len(set(places)), "a panel would cover another"


@pytest.mark.feature("W11")
def test_the_page_names_every_series(server: Served) -> None:
    text = server.get("/metrics").body.decode()
    published = set(re.findall(r"^# TYPE headstock_(\w+)", text, re.MULTILINE))
    page = (MONITORING.parent / "serving.md").read_text()
    rows = re.findall(r"^\| (`.*`.*) \|.*\|$", page.partition("| series |")[2], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {name for name in published if not name.endswith("_created")} <= named
