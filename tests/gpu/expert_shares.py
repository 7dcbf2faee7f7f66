"""What `expert_times` tries and checks: tiles of the 30B-A3B shape, and the cases of
`expert_cases`.

    python tests/gpu/expert_shares.py INDEX COUNT OUT

takes one share of COUNT: it compiles its kernels, which the compiler's cache keeps, and writes
    OUT/share-INDEX.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from attrs import asdict
from expert_cases import CASES, WAYS, Mixture, draw_tokens, draw_weights, mixture_case
from torch import Tensor

from headstock.spi import Experts
from headstock_triton.expert_tiles import multiply_down, multiply_gate_up
from headstock_triton.pair_blocks import Blocks
from headstock_triton.routing import route_tokens
from headstock_triton.tiles import RowTile, Tile, Tiles

EXPERTS = Experts(count=128, per_token=8, intermediate=768, renormalize=True)
HIDDEN = 2048
ROWS = {16: (1, 256), 32: (128, 512), 64: (256, 2048), 128: (1024, 8192)}
"""Rows of a block, and for how few and how many tokens they are tried."""
DTYPE, DEVICE = torch.bfloat16, "cuda"


def list_row_tiles() -> list[RowTile]:
    """Ways to cut pairs."""
    return [
        RowTile(gate_up=rows, down=down, warps=warps)
        for rows, down, warps in (
            (4, 4, 4),
            (2, 2, 2),
            (2, 4, 4),
            (8, 8, 4),
            (8, 4, 4),
            (4, 4, 2),
            (2, 2, 4),
            (8, 8, 8),
            (1, 1, 1),
            (4, 2, 2),
        )
    ]


def list_tiles(rows: int) -> dict[str, list[Tile]]:
    """Tiles of both products for blocks of so many rows. Of gate and up, a tile has `2 * n` rows of
    the weight.
    """
    if rows == 16:
        cuts = (
            (64, 64, 4, 4),
            (64, 64, 6, 4),
            (64, 128, 3, 4),
            (64, 128, 4, 4),
            (64, 256, 2, 4),
            (64, 256, 3, 4),
            (128, 64, 4, 4),
            (128, 64, 5, 4),
            (128, 128, 3, 4),
            (128, 128, 3, 8),
            (32, 128, 4, 2),
            (32, 256, 3, 4),
            (128, 64, 3, 8),
            (256, 64, 3, 8),
        )
        each = [
            (*cut, swap, tma, 1)
            for cut, swap, tma in product(cuts, (False, True), (False, True))
            if not (swap and cut[0] < 64) and not (swap and cut[3] == 8 and cut[0] < 128)
        ]
    elif rows == 32:
        cuts = (
            (64, 128, 3, 4),
            (128, 64, 4, 4),
            (128, 128, 3, 4),
            (128, 128, 3, 8),
            (256, 64, 3, 8),
            (256, 128, 2, 8),
        )
        each = [
            (*cut, swap, tma, 1) for cut, swap, tma in product(cuts, (False, True), (False, True))
        ]
    elif rows == 64:
        cuts = (
            (128, 64, 3, 4),
            (128, 64, 4, 4),
            (128, 128, 3, 4),
            (256, 64, 3, 4),
            (256, 64, 3, 8),
            (256, 64, 4, 8),
        )
        each = [
            (*cut, False, tma, group) for cut, tma, group in product(cuts, (False, True), (1, 4))
        ]
    else:
        cuts = (
            (128, 64, 3, 4),
            (128, 64, 3, 8),
            (128, 64, 4, 8),
            (256, 64, 3, 8),
            (256, 64, 4, 8),
            (256, 32, 4, 8),
        )
        each = [
            (*cut, False, tma, group) for cut, tma, group in product(cuts, (False, True), (1, 8))
        ]
    made = [
        Tile(n=n, k=k, stages=stages, warps=warps, swap=swap, tma=tma, group=group)
        for n, k, stages, warps, swap, tma, group in each
    ]
    return {"gate_up": [halve(tile) for tile in made], "down": made}


def halve(tile: Tile) -> Tile:
    """The tile of as many rows of gate and up together as the given one has columns."""
    return Tile(**(asdict(tile) | {"n": tile.n // 2}))


def list_kernels() -> Iterator[tuple[int, str, Tile]]:
    """All that is compiled for the sweep of tiles."""
    for rows in ROWS:
        for name, tiles in list_tiles(rows).items():
            for tile in tiles:
                yield rows, name, tile


def multiply(
    name: str, x: Tensor, inner: Tensor, blocks: Blocks, gate_up: Tensor, down: Tensor, tile: Tile
) -> Tensor:
    """One of the two products; that of down is of any numbers in place of what gate and up made."""
    if name == "gate_up":
        return multiply_gate_up(x, blocks, gate_up, tile)
    return multiply_down(inner[: len(blocks.order)], blocks, down, tile)


def compile_tiles(index: int, count: int) -> None:
    """Launch every `count`th kernel on few experts. One that the device refuses is found out again
    by the sweep.
    """
    case = Mixture(tokens=1, count=8, chosen=8, hidden=HIDDEN, inters=EXPERTS.intermediate)
    (gate_up, down), (x, scores) = (
        draw_weights(case, DTYPE, DEVICE),
        draw_tokens(case, DTYPE, DEVICE),
    )
    inner = x.new_ones(8 * 128, EXPERTS.intermediate)
    for rows, name, tile in list(list_kernels())[index::count]:
        _, blocks = route_tokens(scores, case.experts, rows=rows)
        assert blocks is not None
        try:
            multiply(name, x, inner, blocks, gate_up, down, tile)
            torch.cuda.synchronize()
        except Exception as problem:
            sys.stderr.write(
                f"{rows} {name} {tile}: {type(problem).__name__}: {str(problem)[:200]}\n"
            )


def check_share(index: int, count: int) -> tuple[dict[str, float], dict[str, str]]:
    """The errors of every `count`th check, and what is wrong with those that fail."""
    whole = [
        Mixture(tokens=tokens, count=128, chosen=8, hidden=HIDDEN, inters=768)
        for tokens in (1, 9, 33, 300, 3000)
    ]
    odd = [
        Mixture(tokens=tokens, count=6, chosen=2, hidden=520, inters=200, renormalize=False)
        for tokens in (2, 9, 300)
    ]
    swapped, full = (
        Tile(n=64, k=64, swap=True),
        Tile(n=128, k=64, warps=8, stages=3, tma=True, group=8),
    )
    ways: dict[str, RowTile | Tiles] = WAYS | {
        "large": Tiles(rows=128, gate_up=full, down=full),
        "slim": Tiles(rows=16, gate_up=swapped, down=swapped),
    }
    errors, fails = {}, {}
    # By way and size to one process: what one case compiles, the next one takes.
    for (name, way), size in list(product(ways.items(), whole + odd))[index::count]:
        if name == "rows" and size.tokens > 300:
            continue
        for dtype in (torch.bfloat16, torch.float16) if size.count == 6 else (torch.bfloat16,):
            for case in (mixture_case, *(CASES if size.tokens in (9, 300) else ())):
                label = (
                    f"{case.__name__}, {name}, {size.tokens} tokens of {size.count} experts, "
                    f"{dtype}"
                )
                try:
                    errors[label] = case(size, dtype, DEVICE, way)
                    torch.cuda.synchronize()
                except Exception as problem:
                    fails[label] = (
                        f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
                    )
    return errors, fails


if __name__ == "__main__":
    place, shares = int(sys.argv[1]), int(sys.argv[2])
    compile_tiles(place, shares)
    right, wrong = check_share(place, shares)
    (Path(sys.argv[3]) / f"share-{place}.json").write_text(
        json.dumps({"errors": right, "failed": wrong})
    )
