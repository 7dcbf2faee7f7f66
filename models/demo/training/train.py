"""Train the demo checkpoint: `python -m training.train OUT`, from the folder models/demo, on one
GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tokenizer
from .corpus import WEIGHT_UNIT, Rows, corpus, documents
from .model import Decoder, save
from .spans import joined

# Seeds from here on make text that is not trained on: the tokenizer's sample, and evaluation.
OTHER_SEED = 1_000_000
WARM_UP = 200
# Row lengths in tokens, and the part of the steps that each is used for: recall is learned sooner
# on short rows.
PHASES = ((512, 0.4), (2048, 0.4), (4096, 0.2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--seeds", type=int, default=240, help="number of shards of text")
    parser.add_argument("--chars", type=int, default=2_000_000, help="characters a shard")
    parser.add_argument("--rate", type=float, default=4e-3, help="highest learning rate")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--log-every", type=int, default=100, help="steps between lines of the log")
    return parser.parse_args()


def batches(
    rows: Rows, size: int, steps: int, device: torch.device, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random rows, each once before any comes again.   yields: tokens, weights [size, length]"""
    tokens, weights = (torch.from_numpy(part).to(device) for part in rows)
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.empty(0, dtype=torch.int64, device=device)
    for _ in range(steps):
        while len(order) < size:
            order = torch.cat(
                (order, torch.randperm(len(tokens), device=device, generator=generator))
            )
        chosen, order = order[:size], order[size:]
        # uint16 has no gather on every device
        yield tokens.view(torch.int16)[chosen].long(), weights[chosen].float() / WEIGHT_UNIT


def loss(model: Decoder, tokens: Tensor, weights: Tensor) -> Tensor:
    """The mean loss of the predicted tokens by their weights."""
    losses = F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
    )
    weights = weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def optimizers(model: Decoder, name: str, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and AdamW for the rest, or AdamW for all."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    if name == "adamw":
        return [
            torch.optim.AdamW(
                model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.05, fused=True
            )
        ]
    return [
        torch.optim.Muon(inner, rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(
    model: Decoder, phases: list[Iterator[tuple[Tensor, Tensor]]], args: argparse.Namespace
) -> None:
    """Run the phases one after the other; the rate rises, then falls in a line to nothing.

    writes: model
    """
    device = next(model.parameters()).device
    steppers = optimizers(model, args.optimizer, args.rate)
    step, started = 0, time.perf_counter()
    for phase in phases:
        compiled = torch.compile(loss, dynamic=False, disable=device.type == "cpu")
        for tokens, weights in phase:
            rate = args.rate * min((step + 1) / WARM_UP, (args.steps - step) / args.steps)
            with torch.autocast(device.type, torch.bfloat16):
                value = compiled(model, tokens, weights)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for stepper in steppers:
                for group in stepper.param_groups:
                    group["lr"] = rate
                stepper.step()
                stepper.zero_grad(set_to_none=True)
            step += 1
            if step % args.log_every == 0 or step == 1:
                print(
                    (
                        f"step {step} loss {value.item():.4f} seconds "
                        f"{time.perf_counter() - started:.1f}"
                    ),
                    flush=True,
                )


def main() -> None:
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    sample = map(joined, documents(OTHER_SEED, 4_000_000))
    words = tokenizer.train(sample)
    tokenizer.save(words, args.out)
    started = time.perf_counter()
    lengths = [length + 1 for length, _ in PHASES]
    texts = corpus(words, args.seeds, args.chars, lengths, os.cpu_count() or 1)
    print(
        f"text: {texts[-1].tokens.size:,} tokens in {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    model = Decoder().to(device)
    phases = [
        batches(
            rows, max(1, args.batch_tokens // length), round(args.steps * part), device, seed=length
        )
        for rows, (length, part) in zip(texts, PHASES, strict=True)
    ]
    train(model, phases, args)
    save(model, args.out)
    print(f"done: {time.perf_counter() - started:.0f} s, text included", flush=True)


if __name__ == "__main__":
    main()
