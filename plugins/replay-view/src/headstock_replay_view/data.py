"""All that the page shows, as plain values: what draws it computes nothing but places and
colours.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from headstock.errors import shorten
from headstock_replay_view.headline import Headline, summarize
from headstock_replay_view.lanes import MAX_STALLS, Lanes
from headstock_replay_view.watch import Watch


def collect(
    watch: Watch, header: Mapping[str, Any], verdict: str, *, is_complete: bool = True
) -> dict[str, Any]:
    """What the page shows, for JSON; texts are cut to one line of 64 characters, the verdict to
    400.

    `is_complete`: the recording did not break off.
    """
    limits, series = watch.limits, watch.columns()
    headline = summarize(series, watch.lanes, limits.num_pages[0])
    rows, pages = watch.height
    since = (series["at"] - series["at"][:1]) // 1000 if len(series["at"]) else series["at"]
    return {
        "verdict": plain(verdict, 400),
        "identical": watch.differs is None,
        "model": plain(header["model"]),
        "headstock": plain(header["headstock"]),
        "parts": {
            "scheduler": plain(header["scheduler"]),
            "cache": plain(header["cache"] or "none"),
        },
        "limits": {
            "rows": limits.max_rows,
            "tokens a step": limits.max_batch_tokens,
            "tokens a sequence": limits.max_len,
            "tokens a page": limits.page_size,
            "pages": limits.num_pages[0],
        },
        "headline": attrs.asdict(headline),
        "notes": notes(watch, headline, is_complete=is_complete),
        "series": {
            name: differences(since if name == "at" else column) for name, column in series.items()
        },
        "lanes": lanes_data(watch.lanes),
        "map": {
            "steps": differences(watch.maps.steps),
            "rows": rows,
            "pages": pages,
            "kinds": packed(watch.picture()),
        },
        "trees": {"steps": watch.trees.steps, "segments": watch.trees.values},
    }


def lanes_data(lanes: Lanes) -> dict[str, Any]:
    """The lanes: an entry for each request, in the order they came. A segment is a step and what
    began in it.
    """
    return {
        "ids": [plain(id) for id in lanes.ids],
        "reasons": [plain(reason) for reason in lanes.reasons],
        "priority": [plain(priority) for priority in lanes.priorities],
        "segments": [
            [number for segment in steps for number in segment] for steps in lanes.segments
        ],
        **lanes.numbers(),
    }


def plain(value: object, most: int = 64) -> str:
    """The value as one line of at most `most` characters; one that does not print is shorten as its
    code.
    """
    text = "".join(
        each if each.isprintable() else f"\\u{ord(each):04x}" for each in shorten(value, most)
    )
    return shorten(text, most)


def notes(watch: Watch, headline: Headline, *, is_complete: bool) -> list[str]:
    """What the recording cannot say, and what of it is not drawn."""
    found = [
        "A request is known from the step that first saw it; the time before (tokenizing, a "
        "server's queue) is not in a recording.",
        "A step lasts until the next one is planned, so the last step has no length; a step that "
        "computes nothing has none either.",
        "A token counts from the step that was told of it"
        + (
            ", with overlap one step after the one that computed it."
            if watch.limits.overlap
            else "."
        ),
    ]
    if watch.differs is not None:
        found.append(f"The replay differs in step {watch.differs}; the page ends before it.")
    if not is_complete:
        found.append("The recording breaks off; what came afterwards is not in it.")
    if headline.unfinished:
        found.append(
            f"{counted(headline.unfinished, 'request')} had not ended when the recording did."
        )
    if headline.never_back:
        found.append(
            f"{counted(headline.never_back, 'request')} lost the seat and got none again. The "
            "recorded plans do not say so; the replayed state does."
        )
    if len(watch.limits.groups) > 1:
        found.append(f"Pages are those of the first of {len(watch.limits.groups)} KV groups.")
    if watch.maps.stride > 1:
        found.append(f"Of every {watch.maps.stride} steps, the page map has one.")
    if watch.trees.stride > 1:
        found.append(f"Of every {watch.trees.stride} steps, one has a prefix tree.")
    if watch.lanes.num_stalls >= MAX_STALLS:
        found.append(f"Only the first {MAX_STALLS} stalls are drawn; all of them are counted.")
    return found


def counted(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def differences(values: Any) -> list[int]:
    """The first value, then what each adds to the one before: short numbers."""
    found: list[int] = np.diff(np.asarray(values, np.int64), prepend=0).tolist()
    return found


def packed(picture: np.ndarray) -> str:
    """Four kinds a byte, the first in the lowest bits, as base64."""
    flat = picture.ravel()
    quads = np.pad(flat, (0, -len(flat) % 4)).reshape(-1, 4)
    return base64.b64encode(
        (quads << np.array([0, 2, 4, 6], np.uint8)).sum(1, dtype=np.uint8).tobytes()
    ).decode()
