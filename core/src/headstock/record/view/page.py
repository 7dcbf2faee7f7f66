"""A replay as one page for a browser: nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import numpy as np

from headstock.record.view.watch import SERIES, Watch

PLACE = "/*DATA*/"


def render(watch: Watch, header: Mapping[str, Any], verdict: str) -> str:
    """The page's text."""
    template = files("headstock.record.view").joinpath("page.html").read_text("utf-8")
    data = json.dumps(facts(watch, header, verdict), separators=(",", ":"))
    return template.replace(PLACE, data.replace("<", "\\u003c"))  # so that no text in it can end the script


def facts(watch: Watch, header: Mapping[str, Any], verdict: str) -> dict[str, Any]:
    """All that the page shows."""
    rows, pages = watch.height
    limits = watch.limits
    return {
        "verdict": verdict,
        "model": header["model"],
        "headstock": header["headstock"],
        "parts": {"scheduler": header["scheduler"], "cache": header["cache"] or "none"},
        "limits": {
            "seats": limits.max_rows,
            "tokens a step": limits.max_batch_tokens,
            "longest sequence": limits.max_len,
            "page size": limits.page_size,
            "pages": limits.num_pages[0],
        },
        "series": {name: differences(column) for name, column in zip(SERIES, columns(watch), strict=True)},
        "map": {"steps": differences(watch.maps.steps), "rows": rows, "pages": pages, "kinds": packed(watch.picture())},
        "trees": {"steps": watch.trees.steps, "segments": watch.trees.values},
    }


def columns(watch: Watch) -> np.ndarray:
    """The series, one row a kind.   returns: [kinds, steps] int64"""
    return np.array(watch.series, np.int64).reshape(-1, len(SERIES)).T


def differences(values: Any) -> list[int]:
    """The first value, then what each adds to the one before: short numbers."""
    found: list[int] = np.diff(np.asarray(values, np.int64), prepend=0).tolist()
    return found


def packed(picture: np.ndarray) -> str:
    """Four kinds a byte, the first in the lowest bits, as base64."""
    flat = picture.ravel()
    quads = np.pad(flat, (0, -len(flat) % 4)).reshape(-1, 4)
    return base64.b64encode((quads << np.array([0, 2, 4, 6], np.uint8)).sum(1, dtype=np.uint8).tobytes()).decode()
