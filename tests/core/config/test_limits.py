"""Every limit of a setting at its edge and one past it; the rules between settings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.config import EngineConfig
from headstock.config.catalog import sampling_settings
from headstock.config.value_types import INT32_MAX, Integer, InvalidValue
from headstock.errors import UsageError, name_setting

COUNTS = [
    "page_size",
    "num_pages",
    "kv_memory_mb",
    "kv_context_len",
    "max_seq_len",
    "max_running_requests",
    "max_queued_requests",
    "max_batch_tokens",
    "tp",
]


def refused(**values: object) -> str:
    """What EngineConfig says of the values that it refuses."""
    with pytest.raises(UsageError) as raised:
        EngineConfig(**values)
    return str(raised.value)


@pytest.mark.feature("H1", "H2", "H3", "H4")
@pytest.mark.parametrize("field", COUNTS)
def test_counts_must_be_greater_than_0(field: str) -> None:
    room = {"max_batch_tokens": INT32_MAX} if field == "max_running_requests" else {}
    assert getattr(EngineConfig(**room, **{field: 1}), field) == 1
    assert getattr(EngineConfig(**room, **{field: INT32_MAX}), field) == INT32_MAX
    assert refused(**{field: 0}).endswith(": expected 1 or more, got 0")
    assert refused(**{field: -1}).endswith(": expected 1 or more, got -1")
    message = refused(**{field: INT32_MAX + 1})
    assert message.startswith(name_setting(field)) and str(INT32_MAX + 1) in message


def test_a_count_of_many_digits_is_refused_by_its_limit() -> None:
    for digits in (21, 4000):
        assert ": expected 2147483647 or less, got 999" in refused(num_pages="9" * digits)
        assert ": expected 1 or more, got -999" in refused(num_pages="-" + "9" * digits)


@pytest.mark.parametrize(
    "value", [1.5, math.nan, math.inf, "x", "", "1e3", True, None, [1], "9" * 5000]
)
def test_counts_must_be_whole_numbers(value: object) -> None:
    message = refused(max_batch_tokens=value)
    assert message.startswith(f"{name_setting('max_batch_tokens')}: expected a whole number, got ")
    assert len(message) < 160


@pytest.mark.feature("H5")
def test_max_seq_len_must_be_at_least_page_size() -> None:
    assert EngineConfig(max_seq_len=16, page_size=16).max_seq_len == 16
    message = refused(max_seq_len=15, page_size=16)
    assert message.startswith(name_setting("max_seq_len"))
    assert f"{name_setting('page_size')} 16" in message and "got 15" in message
    assert EngineConfig(max_seq_len=1).page_size == "auto"
    assert EngineConfig(max_seq_len=15, page_size=16, page_size_or_less=True).max_seq_len == 15


@pytest.mark.feature("H6")
def test_max_batch_tokens_must_be_at_least_max_running_requests() -> None:
    assert EngineConfig(max_batch_tokens=8, max_running_requests=8).max_running_requests == 8
    message = refused(max_batch_tokens=7, max_running_requests=8)
    assert message.startswith(name_setting("max_batch_tokens"))
    assert f"{name_setting('max_running_requests')} 8" in message and "got 7" in message
    assert EngineConfig(max_batch_tokens=7).max_running_requests == 7
    assert EngineConfig(max_batch_tokens=257).max_running_requests == 256


@pytest.mark.feature("H7")
def test_memory_threshold_must_be_between_0_and_1() -> None:
    for edge in (0, 0.0, 1, 1.0, "0.5"):
        assert EngineConfig(memory_threshold=edge).memory_threshold == float(edge)  # type: ignore[arg-type]
    for beyond in (-0.001, 1.001, math.nan, math.inf, -math.inf, "nan", "inf"):
        assert "expected a number between 0.0 and 1.0, got" in refused(memory_threshold=beyond)
    for wrong in ("x", None, True, [0.5]):
        assert "expected a number, got" in refused(memory_threshold=wrong)


@pytest.mark.feature("P3")
def test_memory_ratio_must_be_above_0_and_at_most_1() -> None:
    assert EngineConfig().memory_ratio == 0.9
    assert EngineConfig(memory_ratio=1.0).memory_ratio == 1.0
    assert EngineConfig(memory_ratio=5e-324).memory_ratio > 0
    for beyond in (0, -0.1, 1.0000001, math.nan, math.inf):
        assert "expected a number above 0.0 and at most 1.0" in refused(memory_ratio=beyond)


@pytest.mark.feature("T4")
def test_two_pool_sizes_in_python() -> None:
    for sizes in ({"num_pages": 3, "kv_memory_mb": 4}, {"num_pages": 3, "memory_ratio": 0.5}):
        message = refused(**sizes)
        assert all(f"{name_setting(name)} {value}" in message for name, value in sizes.items())
    assert EngineConfig(num_pages=3).num_pages == 3


@pytest.mark.parametrize(
    ("field", "least"), [("prefix_cache_n", 0), ("cuda_graph_max_bs", 0), ("seed", 0)]
)
def test_counts_that_may_be_0(field: str, least: int) -> None:
    assert getattr(EngineConfig(**{field: least}), field) == least
    assert f"expected {least} or more, got {least - 1}" in refused(**{field: least - 1})
    assert EngineConfig(seed=2**63 - 1).seed == 2**63 - 1
    assert refused(seed=2**63).startswith("seed (--engine-seed): ")
    assert refused(seed=2**63).endswith(str(2**63))


@pytest.mark.feature("P1", "P7", "S23")
@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("paged_attn", "auto, on, off"),
        ("on_pressure", "queue, reject"),
        ("kv_dtype", "auto, float32, bfloat16, float16, fp8_e4m3"),
        ("dtype", "auto, float32, bfloat16, float16"),
        ("device", "auto, cpu, cuda"),
        ("load_format", "auto, dummy"),
        ("log_level", "DEBUG, INFO, WARNING, ERROR, CRITICAL"),
    ],
)
def test_a_bad_choice_lists_the_good_ones(field: str, choices: str) -> None:
    for good in choices.split(", "):
        assert getattr(EngineConfig(**{field: good}), field) == good
    for bad in ("maybe", "", 1, None):
        assert f"{name_setting(field)}: expected one of {choices}, got" in refused(**{field: bad})


def test_other_spellings_of_types_and_levels() -> None:
    assert EngineConfig(dtype="bf16", kv_dtype="fp8", log_level="debug") == EngineConfig(
        dtype="bfloat16", kv_dtype="fp8_e4m3", log_level="DEBUG"
    )


@pytest.mark.feature("S13")
@pytest.mark.parametrize("value", ["a,b,c", "a,", ",a", "", "a b", "a,,b"])
def test_attn_takes_one_name_or_two(value: str) -> None:
    assert EngineConfig(attn="fa,fi").attn == "fa,fi"
    assert EngineConfig(attn="fa,fa").attn == "fa,fa"
    assert refused(attn=value).startswith(f"{name_setting('attn')}: expected ")


@pytest.mark.parametrize("value", ["fa", "fa.x", ".x=1", "fa.=1", "fa x=1"])
def test_opt_reads_name_field_value(value: str) -> None:
    assert EngineConfig(opt=("fa.x=", "fa.y=a=b c")).opt == ("fa.x=", "fa.y=a=b c")
    assert "expected NAME.FIELD=VALUE, got" in refused(opt=[value])


@pytest.mark.feature("H10", "H11", "H12", "H13")
def test_sampling_limits() -> None:
    edges = {
        "max_tokens": [1],
        "temperature": [0, 2],
        "top_p": [1e-9, 1],
        "top_k": [-1, 0],
        "min_p": [0, 1],
    }
    for field, values in edges.items():
        for value in values:
            assert sampling_settings()[field].read(value, "") == value
    beyond = {
        "max_tokens": [0],
        "temperature": [-0.1, 2.001, math.nan, math.inf],
        "top_p": [0, 1.001, math.nan],
        "top_k": [-2],
        "min_p": [-0.1, 1.1, math.nan],
        "seed": [-(2**63) - 1, 2**63],
        "stop": [("",), 3],
    }
    for field, values in beyond.items():
        for value in values:
            setting = sampling_settings()[field]
            with pytest.raises(UsageError, match=r"^here: expected .*, got "):
                setting.read(value, "here")


@given(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
    )
)
def test_any_value_is_taken_or_refused_with_a_rule(raw: object) -> None:
    value_type = Integer(least=1, word="auto")
    whole = isinstance(raw, int) and not isinstance(raw, bool) and 1 <= raw <= INT32_MAX
    if raw is None or whole:
        assert value_type.read(raw) == raw
    elif not isinstance(raw, str):
        with pytest.raises(InvalidValue, match=r"^expected .*, got "):
            value_type.read(raw)
    elif not raw.strip().lstrip("+-").isdecimal() and raw.strip().lower() != "auto":
        with pytest.raises(InvalidValue, match=r"^expected a whole number or 'auto', got "):
            value_type.read(raw)
