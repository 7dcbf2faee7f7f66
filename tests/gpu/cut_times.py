"""Truncated sampling on the GPU: microseconds as graph replays, and whether the tokens are those of
the search alone.

    export PYTHONPATH=core/src:plugins/conformance/src:plugins/triton-ops/src:tests:tests/support
    python -m gpu.cut_times
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from gpu.op_times import DEVICE, VOCAB, graph_us
from sampling_cases import compare_cut, sampling_of, torch_cut
from torch import Tensor

from headstock.nn.noise import gumbel
from headstock.spi import Sampling
from headstock_triton.pdl import has_pdl
from headstock_triton.sampling.candidates import WHOLE
from headstock_triton.sampling.sampler import fused_sample
from headstock_triton.sampling.truncation import cut_by_search, find_cut

ROWS = (1, 8, 9, 32, 64, 256)
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k 20": {"top_k": 20},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "min_p 0.05, top_p 0.95": {"min_p": 0.05, "top_p": 0.95},
}
TEMPERATURE = 0.6


def main() -> None:
    """Print all of it as JSON."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for rows in ROWS:
        for label, logits in (("peaked", peaked(rows)), ("flat", draw(rows, 1.0))):
            for name, settings in SETTINGS.items():
                found[f"{rows} rows, {label}, {name}"] = measure(logits, settings)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


def draw(rows: int, scale: float) -> Tensor:
    """Logits in 16 bits, normally distributed."""
    generator = torch.Generator(DEVICE).manual_seed(rows)
    noise = torch.randn(rows, VOCAB, device=DEVICE, generator=generator)
    return noise.mul_(scale).to(torch.bfloat16)


def peaked(rows: int) -> Tensor:
    """Logits with some tens far above the rest, at other places in each row."""
    logits = draw(rows, 2.5)
    places = torch.arange(50, device=DEVICE) * 2999 + torch.arange(rows, device=DEVICE)[:, None]
    heights = torch.linspace(18, 8, 50, device=DEVICE).to(torch.bfloat16)
    return logits.scatter_add_(1, places, heights.expand(rows, -1).contiguous())


def measure(logits: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of all and of the cut, its share of rows without a search, and what is wrong."""
    sampling = sampling_of(len(logits), DEVICE, {"temperature": TEMPERATURE, **settings})
    assert sampling.temperature is not None
    sampling.temperature.fill_(TEMPERATURE)
    pdl = has_pdl(logits.device)
    found: dict[str, Any] = {
        "us": round(graph_us(lambda i: fused_sample(logits, sampling, pdl=pdl), 1, 8), 1)
    }
    if settings:
        cut = find_cut(logits, sampling, pdl=pdl)
        assert cut is not None
        found["cut_us"] = round(graph_us(lambda i: find_cut(logits, sampling, pdl=pdl), 1, 8), 1)
        found["search_us"] = round(graph_us(lambda i: cut_by_search(logits, sampling), 1, 2), 1)
        found["decided"] = int((cut.picks != WHOLE.value).sum())
        found["wrong"] = find_difference(logits, sampling)
    return found


def find_difference(logits: Tensor, sampling: Sampling) -> str:
    """What differs from torch, or nothing: which tokens stay, and the token that is taken."""
    try:
        compare_cut(logits, sampling)
    except AssertionError as error:
        return str(error)
    assert sampling.temperature is not None
    assert sampling.seeds is not None
    assert sampling.positions is not None
    wide = logits.float()
    scores = (wide - wide.amax(-1, keepdim=True)) / sampling.temperature[:, None]
    noise = gumbel(sampling.seeds, sampling.positions, logits.shape[1])
    values = torch_cut(scores, sampling) + noise
    tokens = fused_sample(logits, sampling).tokens
    short = values.amax(-1) - values.gather(1, tokens[:, None])[:, 0]
    return "" if float(short.max()) < 1e-4 else f"tokens fall short by {float(short.max())}"


if __name__ == "__main__":
    main()
