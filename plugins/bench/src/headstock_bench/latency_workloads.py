"""Workloads that measure latency: `online:RATE:COUNT` and `first-token:LENGTH[:COUNT]`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from types import MappingProxyType

from attrs import evolve, field, frozen

from headstock import UsageError
from headstock.errors import shorten
from headstock_bench.workloads import SEED, Workload, draw_tokens

NAME_FORMS: Mapping[str, str] = MappingProxyType(
    {"online": "online:RATE:COUNT", "first-token": "first-token:LENGTH[:COUNT]"}
)
"""Family of latency workloads -> the format of their names."""

ONLINE_SEED = 1
TEMPERATURE = 0.6
NUM_WARM_UP = 16
"""Requests of a warm-up, as many as other engines use for published figures."""
DEFAULT_COUNT = 100
MIN_RATE, MAX_RATE = 0.001, 100_000.0
"""Requests a second."""
MAX_COUNT = 10_000
MAX_PROMPT_TOKENS = 10_000_000
"""Limit of a workload's prompt tokens, which are drawn before the engine checks their fit."""

_EXAMPLES = {"online": "online:16:200", "first-token": "first-token:128 or first-token:128:20"}


@frozen(kw_only=True)
class LatencyWorkload(Workload):
    """Requests that arrive one by one.

    arrivals: seconds after the start, ascending; None sends each when the engine is idle
    """

    arrivals: tuple[float, ...] | None = field(repr=False)

    @property
    def warm_up(self) -> LatencyWorkload:
        """The first requests of the workload."""
        return evolve(
            self,
            prompts=self.prompts[:NUM_WARM_UP],
            outputs=self.outputs[:NUM_WARM_UP],
            arrivals=None if self.arrivals is None else self.arrivals[:NUM_WARM_UP],
        )


def is_latency_workload(name: str) -> bool:
    """Whether the name is of a family of latency workloads, well-formed or not."""
    return name.partition(":")[0] in NAME_FORMS


def check_latency_workload(name: str) -> None:
    """Raise UsageError when the name is malformed, or a number in it is out of range."""
    _parse_name(name)


def draw_latency_workload(name: str) -> LatencyWorkload:
    """Draw the workload of a name.   raises: UsageError as `check_latency_workload`"""
    family, first, count = _parse_name(name)
    if family == "online":
        return _draw_online(name, first, count)
    return _draw_first_token(name, int(first), count)


def _draw_online(name: str, rate: float, count: int) -> LatencyWorkload:
    """Poisson arrivals, `rate` a second, of 128-1,024 tokens in and 64-256 out."""
    rng = Random(ONLINE_SEED)
    at = 0.0
    arrivals, prompts, outputs = [], [], []
    # Each request is drawn completely before the next: a workload of few requests is then a prefix
    # of one of many.
    for _ in range(count):
        at += rng.expovariate(rate)
        arrivals.append(at)
        prompts.append(draw_tokens(rng, rng.randint(128, 1024)))
        outputs.append(rng.randint(64, 256))
    return LatencyWorkload(
        name=name,
        prompts=tuple(prompts),
        outputs=tuple(outputs),
        temperature=TEMPERATURE,
        seed=ONLINE_SEED,
        arrivals=tuple(arrivals),
    )


def _draw_first_token(name: str, length: int, count: int) -> LatencyWorkload:
    """Prompts of `length` tokens, each sent to an idle engine."""
    rng = Random(SEED)
    return LatencyWorkload(
        name=name,
        prompts=tuple(draw_tokens(rng, length) for _ in range(count)),
        # Two tokens: with only one, no next step would compete with the first token.
        outputs=(2,) * count,
        temperature=TEMPERATURE,
        arrivals=None,
    )


def _parse_name(name: str) -> tuple[str, float, int]:
    """The family, the rate or length, and the count of a name.   raises: UsageError"""
    family, *parts = name.split(":")
    if family == "online" and len(parts) == 2:
        rate = _read_number(name, "RATE", parts[0], MIN_RATE, MAX_RATE)
        return family, rate, _read_count(name, parts[1])
    if family == "first-token" and len(parts) in (1, 2):
        length = int(_read_number(name, "LENGTH", parts[0], 1, MAX_PROMPT_TOKENS, whole=True))
        count = _read_count(name, parts[1]) if len(parts) == 2 else DEFAULT_COUNT
        if length * count > MAX_PROMPT_TOKENS:
            raise UsageError(
                f"workload {shorten(name)} has {length * count:,} prompt tokens (LENGTH x COUNT), "
                f"but at most {MAX_PROMPT_TOKENS:,} are possible; lower one of the two"
            )
        return family, length, count
    form, example = NAME_FORMS[family], _EXAMPLES[family]
    raise UsageError(f"workload {shorten(name)} is not of the form {form}, as in {example}")


def _read_count(name: str, text: str) -> int:
    return int(_read_number(name, "COUNT", text, 1, MAX_COUNT, whole=True))


def _read_number(
    name: str, what: str, text: str, low: float, high: float, *, whole: bool = False
) -> float:
    """`text` as a number.   raises: UsageError unless it is a number from low to high"""
    # float() alone would also accept nan, inf, 1_000 and digits of other scripts.
    if re.fullmatch(r"[0-9]{1,20}" if whole else r"[0-9]{1,20}(\.[0-9]{1,20})?", text):
        number = float(text)
        if low <= number <= high:
            return number
    form = NAME_FORMS[name.partition(":")[0]]
    raise UsageError(
        f"workload {shorten(name)}: {what}: expected a {'whole ' * whole}number from {low:g} to "
        f"{high:,.0f}, got {shorten(text)!r}; the form is {form}"
    )
