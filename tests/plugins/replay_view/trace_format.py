"""The trace event format of Chrome and Perfetto, as far as events of durations, counters, instants
and names go.

Source: "Trace Event Format" (the Chromium project's document), sections on the JSON object format
    and event phases.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

PHASES = frozenset("XBECiM")
METADATA = {
    "process_name",
    "thread_name",
    "process_labels",
    "process_sort_index",
    "thread_sort_index",
}
HALF_A_NANOSECOND = 5e-4
"""Times are microseconds with three places, so an end (ts + dur) may lie that much past the next
start.
"""

Event = dict[str, Any]
Track = tuple[int, int]


def find_faults(text: str) -> list[str]:
    """What is wrong with a trace; nothing when every viewer must take it."""
    try:
        trace = json.loads(text, parse_constant=refuse, object_pairs_hook=without_doubles)
    except ValueError as error:
        return [f"no JSON: {error}"]
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        return ["displayTimeUnit is neither ms nor ns"]
    events: list[Event] = trace["traceEvents"]
    malformed = [
        f"event {number}: {fault}"
        for number, event in enumerate(events)
        for fault in of_event(event)
    ]
    return malformed or [*of_names(events), *of_tracks(events), *of_counters(events)]


def refuse(constant: str) -> None:
    """NaN and infinities are no JSON."""
    raise ValueError(constant)


def without_doubles(pairs: list[tuple[str, Any]]) -> Event:
    """An object, none of whose keys comes twice."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError(f"a key twice in {pairs}")
    return dict(pairs)


def is_time(value: object) -> bool:
    """Whether the value is a number of microseconds from the start of the trace on."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    )


def of_event(event: Any) -> Iterator[str]:
    """What is wrong with one event by itself."""
    if not isinstance(event, dict):
        yield "no object"
        return
    phase, arguments = event.get("ph"), event.get("args", {})
    if phase not in PHASES:
        yield f"phase {phase!r}"
    if not isinstance(event.get("name"), str) or not (event["name"] or phase == "E"):
        yield "no name"
    if not all(type(event.get(key)) is int and event[key] >= 0 for key in ("pid", "tid")):
        yield "pid and tid are no numbers"
    if not is_time(event.get("ts", 0 if phase == "M" else None)):
        yield f"ts is {event.get('ts')!r}"
    if not isinstance(arguments, dict):
        yield "args is no object"
        return
    if phase == "X" and not is_time(event.get("dur")):
        yield f"dur is {event.get('dur')!r}"
    if phase == "i" and event.get("s", "t") not in ("g", "p", "t"):
        yield f"scope {event['s']!r}"
    if phase == "C" and not (
        arguments and all(type(value) in (int, float) for value in arguments.values())
    ):
        yield "a counter without numbers"
    if phase == "M" and event["name"] not in METADATA:
        yield f"metadata {event['name']!r}"
    if (
        phase == "M"
        and event["name"].endswith("_name")
        and not isinstance(arguments.get("name"), str)
    ):
        yield "a name that is no text"


def of_names(events: list[Event]) -> Iterator[str]:
    """Every process and every track with slices has one name, given before it is used."""
    named: set[tuple[str, int, int]] = set()
    for event in events:
        process, track = (
            ("process_name", event["pid"], 0),
            ("thread_name", event["pid"], event["tid"]),
        )
        if event["ph"] == "M":
            key = track if event["name"] == "thread_name" else (event["name"], event["pid"], 0)
            if key in named:
                yield f"{key} is named twice"
            named.add(key)
        elif process not in named or (event["ph"] in "XBE" and track not in named):
            yield f"{event['name']!r} is on a track without a name"


def of_tracks(events: list[Event]) -> Iterator[str]:
    """Along a track time goes forward, slices lie beside or within each other, and every B has its
    E.
    """
    last: dict[tuple[int, int, str], float] = defaultdict(float)
    open_until: dict[Track, list[float]] = defaultdict(list)
    begun: dict[Track, list[str]] = defaultdict(list)
    for event in (event for event in events if event["ph"] != "M"):
        track, at, phase = (event["pid"], event["tid"]), event["ts"], event["ph"]
        line = (*track, event["name"] if phase == "C" else "")
        if at < last[line]:
            yield f"{event['name']!r} at {at} comes after {last[line]} of its track"
        last[line] = at
        if phase == "X":
            ends = open_until[track]
            while ends and ends[-1] <= at + 2 * HALF_A_NANOSECOND:
                ends.pop()
            if ends and at + event["dur"] > ends[-1] + 2 * HALF_A_NANOSECOND:
                yield f"{event['name']!r} at {at} ends past the slice around it"
            ends.append(at + event["dur"])
        elif phase == "B":
            begun[track].append(event["name"])
        elif phase == "E" and (not begun[track] or begun[track].pop() != event["name"]):
            yield f"{event['name']!r} at {at} ends but did not begin"
    yield from (
        f"{name!r} of {track} never ends" for track, names in begun.items() for name in names
    )


def of_counters(events: list[Event]) -> Iterator[str]:
    """A counter has the same series at all times."""
    series: dict[tuple[int, str], set[str]] = {}
    for event in (event for event in events if event["ph"] == "C"):
        if series.setdefault((event["pid"], event["name"]), set(event["args"])) != set(
            event["args"]
        ):
            yield f"counter {event['name']!r} changes its series"
