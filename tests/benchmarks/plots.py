"""Draw a record that `gpu.sweep` made, as two SVGs.

    nox -s plots -- docs/benchmarks/DATE-GPU-sweep.json docs/images

`speed-streams.svg` has throughput against the time between tokens, `speed-steps.svg` a decode step
by class of kernel beside the limit of memory. A record gives the same files every time.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS = {
    "headstock, whole answers": "",
    "headstock, each token to a caller in its process": "streamed_",
}
"""Names of lines, and how the fields of their values begin."""
MOST_BUSY = 1.1
"""Of the time of kernels and that of a step; the profiler makes kernels a little slower."""
H200_COPY_BYTES_S = 4.27e12
"""The rate of records that do not name theirs."""
PARTS = ("attention", "linear", "head", "sampling", "rest")
COLORS = {
    "attention": "#0072b2",
    "linear": "#e69f00",
    "head": "#d55e00",
    "sampling": "#009e73",
    "rest": "#9a9a9a",
    "limit": "#404040",
}
"""Okabe and Ito's, which differ for colour-blind readers too."""
LINES = ("#0072b2", "#009e73", "#d55e00")
LABELS = {
    "attention": "attention",
    "linear": "linear layers",
    "head": "head",
    "sampling": "sampling",
    "rest": "norms, rope, the rest",
}
SETTINGS = {
    # Text stays text, and ids do not depend on the run.
    "svg.fonttype": "none",
    "svg.hashsalt": "headstock",
    "font.family": "sans-serif",
    "font.size": 10,
    # A light ground of its own, so that a dark page changes nothing.
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True, kw_only=True)
class StreamPoint:
    """So many streams at once: milliseconds between tokens, and output tokens a second of all."""

    streams: int
    itl_ms: float
    out_tok_s: float


@dataclass(frozen=True, kw_only=True)
class StepBar:
    """A decode step: microseconds of the device by part, and what memory allows at a rate."""

    rows: int
    context: int
    parts: dict[str, float]
    limit_us: float
    copy_bytes_s: float = H200_COPY_BYTES_S


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("folder", type=Path, help="where the SVGs go")
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text("utf-8"))
    import matplotlib as mpl

    mpl.use("svg")
    with mpl.rc_context(SETTINGS):
        for name, draw, read in (
            ("speed-streams.svg", draw_streams, read_streams),
            ("speed-steps.svg", draw_steps, read_steps),
        ):
            figure = draw(record["title"], read(record))
            figure.savefig(arguments.folder / name, metadata={"Date": None})


def read_streams(record: dict[str, Any]) -> dict[str, list[StreamPoint]]:
    """Points by engine and how it answers, by number of streams; both values are of one run.

    A record without the time between tokens of one way to answer has no line for it.
    """
    points: dict[str, list[StreamPoint]] = {}
    for label, prefix in OURS.items():
        if any(f"{prefix}itl_ms" not in each for each in record["streams"]):
            continue
        points[label] = [
            StreamPoint(
                streams=each["streams"],
                itl_ms=each[f"{prefix}itl_ms"],
                out_tok_s=each[f"{prefix}out_tok_s"],
            )
            for each in record["streams"]
        ]
    for each in record.get("peers", []):
        points.setdefault(each["engine"], []).append(
            StreamPoint(streams=each["streams"], itl_ms=each["itl_ms"], out_tok_s=each["out_tok_s"])
        )
    return {
        name: sorted(engine, key=lambda point: point.streams) for name, engine in points.items()
    }


def read_steps(record: dict[str, Any]) -> list[StepBar]:
    """The bars of all steps that the record divides.

    raises: ValueError where kernels take longer than the step, because they overlap
    """
    for each in record["classes"]:
        busy, wall = sum(each["classes_us"].values()), each["step_us"]
        if busy > MOST_BUSY * wall:
            raise ValueError(
                f"the kernels of {each['rows']} rows take {busy} us of a step of {wall}: they "
                "overlap; measure again with a gpu.sweep that shares their time"
            )
    return [
        StepBar(
            rows=each["rows"],
            context=each["context"],
            parts=divide_step(each["classes_us"], each["head_us"]),
            limit_us=each["limit_us"],
            copy_bytes_s=record.get("copy_bytes_s", H200_COPY_BYTES_S),
        )
        for each in record["classes"]
    ]


def divide_step(classes: dict[str, float], head: float) -> dict[str, float]:
    """A step's time by part; the class of products includes `head`."""
    rest = sum(classes.values())
    attention, sampling = classes.get("attention", 0.0), classes.get("sampling", 0.0)
    linear = classes.get("products", 0.0) - head
    return {
        "attention": attention,
        "linear": linear,
        "head": head,
        "sampling": sampling,
        "rest": rest - attention - linear - head - sampling,
    }


def draw_streams(title: str, points: dict[str, list[StreamPoint]]) -> Figure:
    """Throughput against time between tokens, a line an engine; numbers are streams."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for (name, engine), color in zip(points.items(), LINES, strict=False):
        times = [point.itl_ms for point in engine]
        axes.plot(times, [point.out_tok_s for point in engine], "o-", color=color, label=name)
        for point in engine:
            axes.annotate(
                str(point.streams),
                (point.itl_ms, point.out_tok_s),
                textcoords="offset points",
                xytext=(-6, 5),
                ha="right",
                color=color,
            )
    axes.set_yscale("log")
    axes.set_ylim(bottom=300)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("time between the tokens of a stream, ms (numbers: streams at once)")
    axes.set_ylabel("output tokens a second, all streams")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_steps(title: str, bars: list[StepBar]) -> Figure:
    """A panel for each step: its parts stacked beside the limit."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(bars), figsize=(7.2, 4.2), layout="constrained")
    for axes, bar in zip(panels, bars, strict=True):
        bottom = 0.0
        for part in PARTS:
            axes.bar(
                0,
                bar.parts[part],
                bottom=bottom,
                width=0.8,
                color=COLORS[part],
                label=LABELS[part] if bar is bars[0] else None,
            )
            bottom += bar.parts[part]
        limit = f"limit: weights and KV at {bar.copy_bytes_s / 1e12:.2f} TB/s"
        label = limit if bar is bars[0] else None
        axes.bar(1, bar.limit_us, width=0.8, color=COLORS["limit"], label=label)
        for place, value in ((0, bottom), (1, bar.limit_us)):
            axes.annotate(
                f"{value:,.0f}",
                (place, value),
                textcoords="offset points",
                xytext=(0, 3),
                ha="center",
            )
        axes.set_xticks([0, 1], ["step", "limit"])
        axes.set_xlabel(f"{bar.rows} x {bar.context:,}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ymargin(0.1)
    panels[0].set_ylabel("microseconds of the device")
    figure.suptitle(f"{title}: a decode step, rows x context", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main()
