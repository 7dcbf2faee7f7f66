"""The data of the page as plain values; the scripts compute positions and colours from them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from headstock.errors import format_count, shorten
from headstock_replay_view.headline import Headline, make_headline
from headstock_replay_view.history import History
from headstock_replay_view.lanes import MAX_STALLS, Lanes


def collect_page_data(
    history: History, header: Mapping[str, Any], verdict: str, *, is_complete: bool = True
) -> dict[str, Any]:
    """Return the data of the page, for JSON.

    Texts of the recording are cut to one line of 64 characters, the verdict to 400.
    """
    limits, series = history.limits, history.make_series()
    headline = make_headline(series, history.lanes, history.num_pages)
    rows, pages = history.map_height
    # microseconds from the start: JavaScript's integers are only exact up to 2**53
    since = (series["at"] - series["at"][:1]) // 1000 if len(series["at"]) else series["at"]
    return {
        "verdict": escape_text(verdict, 400),
        "identical": history.differing_step is None,
        "model": escape_text(header["model"]),
        "headstock": escape_text(header["headstock"]),
        "parts": {
            "scheduler": escape_text(header["scheduler"]),
            "cache": escape_text(header["cache"] or "none"),
        },
        "limits": {
            "rows": limits.max_rows,
            "tokens a step": limits.max_batch_tokens,
            "tokens a sequence": limits.max_len,
            "tokens a page": limits.page_size,
            "pages": history.num_pages,
        },
        "headline": attrs.asdict(headline),
        "notes": _list_notes(history, headline, is_complete=is_complete),
        "series": {
            name: delta_encode(since if name == "at" else column) for name, column in series.items()
        },
        "lanes": _collect_lanes(history.lanes),
        "map": {
            "steps": delta_encode(history.maps.steps),
            "rows": rows,
            "pages": pages,
            "kinds": pack_kinds(history.make_page_map()),
        },
        "trees": {"steps": history.trees.steps, "segments": history.trees.values},
    }


def _collect_lanes(lanes: Lanes) -> dict[str, Any]:
    """Return the lanes: an entry per request in order of arrival.

    Segments are flat: a step, the phase that began in it, the next step, and so on.
    """
    return {
        "ids": [escape_text(id) for id in lanes.ids],
        "reasons": [escape_text(reason) for reason in lanes.reasons],
        # As text: a request that never gets a row may have an arbitrarily large priority.
        "priority": [escape_text(priority) for priority in lanes.priorities],
        "segments": [
            [number for segment in steps for number in segment] for steps in lanes.segments
        ],
        **lanes.list_numbers(),
    }


def escape_text(value: object, most: int = 64) -> str:
    """Return the value as one line of at most `most` characters, unprintable ones as codes."""
    # A request's id may contain marks that reverse the surrounding text.
    text = "".join(
        letter if letter.isprintable() else f"\\u{ord(letter):04x}"
        for letter in shorten(value, most)
    )
    return shorten(text, most)


def _list_notes(history: History, headline: Headline, *, is_complete: bool) -> list[str]:
    """List what is missing from a recording and what the page leaves out."""
    notes = [
        "A request is known from the step that first saw it; the time before (tokenizing, a "
        "server's queue) is not in a recording.",
        "A step lasts until the next one is planned, so the last step has no length; a step that "
        "computes nothing has none either.",
        "A token counts from the step that read it"
        + (
            ", with overlap one step after the one that computed it."
            if history.limits.overlap
            else "."
        ),
    ]
    if history.differing_step is not None:
        notes.append(
            f"The replay differs in step {history.differing_step}; the page ends before it."
        )
    if not is_complete:
        notes.append("The recording breaks off; what came afterwards is not in it.")
    if headline.unfinished:
        notes.append(
            f"{format_count(headline.unfinished, 'request')} had not ended when the recording did."
        )
    if headline.never_back:
        notes.append(
            f"{format_count(headline.never_back, 'request')} lost the row and got none again. The "
            "recorded plans do not say so; the replayed state does."
        )
    notes += _list_group_notes(history)
    if history.maps.stride > 1:
        notes.append(f"Of every {history.maps.stride} steps, the page map has one.")
    if history.trees.stride > 1:
        notes.append(f"Of every {history.trees.stride} steps, one has a prefix tree.")
    if history.lanes.num_stalls >= MAX_STALLS:
        notes.append(f"Only the first {MAX_STALLS} stalls are drawn; all of them are counted.")
    return notes


def _list_group_notes(history: History) -> list[str]:
    """Explain what the page shows of several KV groups, or of one with a window."""
    counts, notes = history.limits.num_pages, []
    if len(counts) > 1:
        pages = ", ".join(f"{count:,} of group {group}" for group, count in enumerate(counts))
        notes.append(
            f"Pages are those of {len(counts)} KV groups together: {pages}. The page map has one "
            "group above the other, group 0 at the bottom."
        )
    if history.prefixes is None:
        notes.append("There is no prefix tree: no KV group keeps every page of a prefix.")
    elif len(counts) > 1:
        notes.append(f"The prefix tree is that of KV group {history.prefixes.group}.")
    return notes


def delta_encode(values: Any) -> list[int]:
    """Return the first value and the differences between neighbours, which are shorter."""
    deltas: list[int] = np.diff(np.asarray(values, np.int64), prepend=0).tolist()
    return deltas


def pack_kinds(picture: np.ndarray) -> str:
    """Return kinds as base64, four in a byte, the first in the lowest bits."""
    flat = picture.ravel()
    quads = np.pad(flat, (0, -len(flat) % 4)).reshape(-1, 4)
    return base64.b64encode(
        (quads << np.array([0, 2, 4, 6], np.uint8)).sum(1, dtype=np.uint8).tobytes()
    ).decode()
