"""Draw the figures of results: tokens per second of each workload, by settings."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from headstock_bench.result import BenchmarkResult

COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
"""Okabe and Ito's, which differ for colour-blind readers too."""
STYLE = {
    # Text stays text, and ids do not depend on the run.
    "svg.fonttype": "none",
    "svg.hashsalt": "headstock",
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
BAR = 0.35
"""Inches of a bar."""


def list_bars(result: BenchmarkResult) -> list[tuple[str, list[float]]]:
    """Names and the output tokens per second of each run: of the engine, then of its peers."""
    tokens = result.out_tok_s * result.timing.median
    bars = [("this", [tokens / seconds for seconds in result.timing.seconds])]
    for peer in result.peers:
        name = peer.mode if peer.engine == result.conditions.engine else peer.engine
        bars.append((name, [result.workload.tokens_out / seconds for seconds in peer.runs_s]))
    return [(name, rates) for name, rates in bars if rates]


def draw_results(results: Sequence[BenchmarkResult], path: Path) -> None:
    """Write an SVG with a bar for each engine and workload, as long as the median run's rate; its
    line is the spread of the runs.
    """
    # An extra, which is not there where types are checked.
    import_module("matplotlib").use("svg")
    pyplot: Any = import_module("matplotlib.pyplot")

    charts = [list_bars(result) for result in results]
    heights = [BAR * len(bars) + 0.6 for bars in charts]
    with pyplot.rc_context(STYLE):
        figure, rows = pyplot.subplots(
            len(charts),
            squeeze=False,
            figsize=(8, sum(heights) + 0.4),
            height_ratios=heights,
            layout="constrained",
        )
        for result, bars, (axes,) in zip(results, charts, rows, strict=True):
            rates = [sorted(each) for _, each in bars]
            middles = [each[len(each) // 2] for each in rates]
            spread = [
                [middle - each[0] for middle, each in zip(middles, rates, strict=True)],
                [each[-1] - middle for middle, each in zip(middles, rates, strict=True)],
            ]
            colors = [COLORS[index % len(COLORS)] for index in range(len(bars))]
            names = [name for name, _ in bars]
            axes.barh(names, middles, xerr=spread, color=colors, error_kw={"ecolor": "#404040"})
            axes.invert_yaxis()
            shape = result.conditions.shape
            axes.set_title(f"{shape}: {result.workload.name}, output tokens/s", loc="left")
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)
