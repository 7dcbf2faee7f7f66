"""Measure which tiles multiply a model's experts fastest on this GPU, for `headstock tune`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

import torch
from attrs import asdict, frozen
from torch import Tensor

from headstock.spi import Experts
from headstock_triton.expert_tiles import multiply_down, multiply_gate_up
from headstock_triton.experts import fused_mix_experts
from headstock_triton.pair_blocks import Blocks
from headstock_triton.routing import route_tokens
from headstock_triton.tiles import ROW_TILES, RowTile, Tile, Tiles, choose_tiles, fits_registers

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Measured numbers of tokens; a step uses the tiles of the next larger number."""
MARGIN = 0.03
"""How much faster tiles must be than those chosen without measuring."""
MOST_ROW_TOKENS = 8
"""Number of tokens up to which pairs are tried one by one."""
MOST_STEPS = 8
"""Number of steps with different tokens that alternate, so that the weights of few tokens come from
memory, as in an engine, and not from a cache.
"""
RUNS = 5
"""Number of measurements of all of these; the figure is the median."""

Works = Sequence[Callable[[], object]]
Timer = Callable[[Works], float]
"""Returns the microseconds of one work item."""


def _vary(*cuts: tuple[int, int, int, int], group: int = 1, swap: bool = False) -> list[Tile]:
    """Tiles of these columns, depths, warps and stages, with weights loaded either way."""
    return [
        Tile(n=n, k=k, warps=warps, stages=stages, group=group, swap=swap, tma=tma)
        for n, k, warps, stages in cuts
        for tma in (True, False)
    ]


_CANDIDATES: dict[int, tuple[list[Tile], list[Tile]]] = {
    16: (
        [*_vary((32, 128, 4, 3), (32, 256, 4, 2)), *_vary((32, 128, 4, 3), swap=True)],
        [*_vary((64, 128, 4, 3), (128, 128, 4, 3)), *_vary((128, 128, 4, 3), swap=True)],
    ),
    32: (
        [*_vary((64, 64, 4, 3)), *_vary((64, 128, 4, 3), swap=True)],
        [*_vary((128, 64, 4, 3)), *_vary((256, 64, 8, 3), swap=True)],
    ),
    64: (
        _vary((64, 64, 4, 3), (64, 32, 4, 3), group=8),
        _vary((128, 64, 4, 3), (128, 32, 4, 3), group=8),
    ),
    128: (
        _vary((64, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), group=8),
        _vary((128, 64, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4), group=8),
    ),
}
"""Rows of a block -> the tiles of gate and up, and of down, that are tried.

These were the best in some sweep of docs/benchmarks/log.md, and their neighbours.
"""


@frozen(eq=False, kw_only=True)
class Layer:
    """A layer's experts with random weights, and the function that times them."""

    experts: Experts
    gate_up: Tensor
    down: Tensor
    time_us: Timer

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Experts, experts per token, hidden, intermediate."""
        _, hidden, inters = self.down.shape
        return self.experts.count, self.experts.per_token, hidden, inters


def tune_experts(
    mixtures: Iterable[Experts],
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    time_us: Timer | None = None,
) -> dict[str, str]:
    """The option `expert_tiles` for layers with these experts; empty if the tiles chosen without
    measuring are the fastest for all of them.

    A layer of each shape is made with random weights and freed again.
    """
    tables: dict[str, dict[str, object]] = {}
    for experts in mixtures:
        shape = (experts.count, experts.per_token, hidden, experts.intermediate)
        name = "-".join(map(str, shape))
        if name in tables or not _has_room(experts, hidden, dtype, device):
            continue
        found = tune_layer(make_layer(experts, hidden, dtype, device, time_us or time_graph))
        tables[name] = {str(most): asdict(tiles) for most, tiles in found.items()}
    kept = {name: table for name, table in tables.items() if table}
    return {"expert_tiles": json.dumps(kept, separators=(",", ":"))} if kept else {}


def _has_room(experts: Experts, hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has room for such a layer, and the same amount for its tokens."""
    if device.type != "cuda":
        return True
    needed = 3 * len(experts.own) * experts.intermediate * hidden * dtype.itemsize
    return 2 * needed < int(torch.cuda.mem_get_info(device)[0])


def make_layer(
    experts: Experts, hidden: int, dtype: torch.dtype, device: torch.device, time_us: Timer
) -> Layer:
    """A layer of random weights, scaled to keep values near 1."""
    count, inters = len(experts.own), experts.intermediate
    gate_up = torch.empty(count, 2 * inters, hidden, dtype=dtype, device=device)
    down = torch.empty(count, hidden, inters, dtype=dtype, device=device)
    return Layer(
        experts=experts,
        gate_up=gate_up.normal_(0.0, hidden**-0.5),
        down=down.normal_(0.0, inters**-0.5),
        time_us=time_us,
    )


def tune_layer(layer: Layer, tokens: Sequence[int] = TOKENS) -> dict[int, RowTile | Tiles]:
    """The fastest tiles by maximum number of tokens; empty if none is faster than the default."""
    device = layer.down.device
    chosen = [choose_tiles(count, layer.shape, device) for count in tokens]
    fastest = [_find_fastest(layer, *pair) for pair in zip(tokens, chosen, strict=True)]
    if fastest == chosen:
        return {}
    # Of equal neighbours, the last entry covers all.
    return {
        count: tiles
        for count, tiles, after in zip(tokens, fastest, [*fastest[1:], None], strict=True)
        if tiles != after
    }


def _find_fastest(layer: Layer, tokens: int, chosen: RowTile | Tiles) -> RowTile | Tiles:
    """The fastest tiles for this number of tokens: `chosen`, unless others are faster by the
    margin."""
    steps = _draw_steps(layer, tokens)
    times = {chosen: _time_whole(layer, steps, chosen)}
    for tiles in _list_tiles(layer, steps, tokens):
        if tiles not in times:
            times[tiles] = _time_whole(layer, steps, tiles)
    fastest = min(times, key=lambda tiles: times[tiles])
    return fastest if times[fastest] < (1 - MARGIN) * times[chosen] else chosen


def _draw_steps(layer: Layer, tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and the scores of their experts, as many sets as small steps need."""
    count, _, hidden, _ = layer.shape
    return [
        (
            layer.down.new_empty(tokens, hidden).normal_(),
            layer.down.new_empty(tokens, count).normal_(),
        )
        for _ in range(max(2, min(MOST_STEPS, 256 // tokens)))
    ]


def _list_tiles(
    layer: Layer, steps: list[tuple[Tensor, Tensor]], tokens: int
) -> Iterator[RowTile | Tiles]:
    """Tiles worth measuring together: for each block size, the fastest of both products."""
    count, per_token, *sizes = layer.shape
    if tokens <= MOST_ROW_TOKENS:
        yield from (tile for tile in ROW_TILES if fits_registers(tile, per_token, *sizes))
    mean = tokens * per_token / count
    for rows, (gate_ups, downs) in _CANDIDATES.items():
        # Blocks that are almost empty, or of which an expert has many small ones, are hopeless.
        if (rows > 16 and mean < rows / 4) or (rows < 128 and mean > 4 * rows):
            continue
        routed = [
            (x, blocks)
            for x, scores in steps
            if (blocks := route_tokens(scores, layer.experts, rows=rows)[1]) is not None
        ]
        gate_up = _find_fastest_tile(layer, gate_ups, routed, _gate_up_works)
        down = _find_fastest_tile(layer, downs, routed, _down_works)
        if gate_up is not None and down is not None:
            yield Tiles(rows=rows, gate_up=gate_up, down=down)


Routed = list[tuple[Tensor, Blocks]]


def _find_fastest_tile(
    layer: Layer,
    tiles: Sequence[Tile],
    routed: Routed,
    make: Callable[[Layer, Routed, Tile], Works],
) -> Tile | None:
    """The fastest tile of a product; None where none can run."""
    times = [_time_or_infinity(layer, make(layer, routed, tile)) for tile in tiles]
    best = min(range(len(tiles)), key=times.__getitem__)
    return tiles[best] if times[best] < float("inf") else None


def _gate_up_works(layer: Layer, routed: Routed, tile: Tile) -> Works:
    return [
        lambda x=x, blocks=blocks: multiply_gate_up(x, blocks, layer.gate_up, tile)  # type: ignore[misc]
        for x, blocks in routed
    ]


def _down_works(layer: Layer, routed: Routed, tile: Tile) -> Works:
    inters = layer.shape[3]
    # Any numbers will do instead of the output of gate and up.
    inner = [x.new_empty(len(blocks.order), inters).normal_() for x, blocks in routed]
    return [
        lambda x=x, blocks=blocks: multiply_down(x, blocks, layer.down, tile)  # type: ignore[misc]
        for x, (_, blocks) in zip(inner, routed, strict=True)
    ]


def _time_whole(layer: Layer, steps: list[tuple[Tensor, Tensor]], tiles: RowTile | Tiles) -> float:
    """Microseconds from scores to sums; infinity if the tiles cannot run."""
    weights = layer.gate_up, layer.down
    return _time_or_infinity(
        layer,
        [
            lambda x=x, scores=scores: fused_mix_experts(  # type: ignore[misc]
                x, scores, layer.experts, *weights, tiles=tiles
            )
            for x, scores in steps
        ],
    )


def _time_or_infinity(layer: Layer, works: Works) -> float:
    """Microseconds; infinity if a kernel exceeds the GPU's resources or does not compile."""
    try:
        return layer.time_us(works)
    except Exception:  # the exception class depends on the version of Triton
        return float("inf")


def time_graph(works: Works) -> float:
    """The median microseconds of one work item, in a graph of all: the host launches nothing."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for work in works:  # compilation at a first launch cannot be captured
            work()
        side.synchronize()
        # `torch.cuda.graph` would empty torch's cache of memory each time.
        graph.capture_begin()
        kept = [work() for work in works]
        graph.capture_end()
        times = [_time_replay(graph) for _ in range(RUNS + 1)]
    torch.cuda.current_stream().wait_stream(side)
    del kept
    return median(times[1:]) / len(works)


def _time_replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))
