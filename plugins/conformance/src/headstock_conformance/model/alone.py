"""Models compared with themselves: a prompt in chunks and in batches, and the prompt in one step.

For an architecture that transformers lacks, only this and some fields of config.json can be tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from headstock.errors import CannotRun, shorten
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Model, ModelConfig
from headstock_conformance.model.config_fields import check_eos, check_sizes
from headstock_conformance.model.paged import Paged
from headstock_conformance.ops.models import Weights, draw_weights

LENGTH = 40
NUM_SEQUENCES = 34
TOLERANCE = 1e-4
"""Tolerance of a log-probability, in float32."""
EXPERT_FIELDS = ("experts", "moe", "group", "dense_replace")
LATENT_FIELDS = ("lora", "qk_", "v_head_dim")


@frozen(kw_only=True)
class Lone:
    """A family, a small model of it, and random weights."""

    family: Model
    hf: Mapping[str, Any]
    config: ModelConfig
    weights: Weights

    def open(self, page_size: int, sequences: int = 2) -> Paged:
        """The model with its own pages."""
        ops = TorchOps()
        params = self.weights.prepare(ops)
        return Paged.new(
            self.family,
            self.config,
            params,
            ops,
            page_size=page_size,
            sequences=sequences,
            length=LENGTH,
        )

    def prompt(self, length: int, seed: int) -> list[int]:
        """A prompt of random tokens."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.config.vocab, (length,), generator=generator).tolist()


def make_lone(family: Model, name: str, sizes: Mapping[str, Any]) -> Lone:
    """A small model of the family, with the first sizes that it accepts.

    raises: CannotRun when it accepts none
    """
    reasons: list[str] = []
    for left_out in ((*EXPERT_FIELDS, *LATENT_FIELDS), LATENT_FIELDS, ()):
        hf = {"architectures": [name]} | {
            field: value
            for field, value in sizes.items()
            if not any(word in field for word in left_out)
        }
        try:
            config = family.config(hf)
        except ValueError as error:
            reasons.append(str(error))
            continue
        weights = draw_weights(config, torch.float32, "cpu", family.params(config))
        return Lone(family=family, hf=hf, config=config, weights=weights)
    raise CannotRun(f"the family refuses the kit's config.json: {shorten(reasons[0], 200)}")


def list_lone_cases(
    make: Callable[[], Lone],
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases of config.json, and of a model compared with itself."""
    checks: dict[str, Callable[[Lone], object]] = {
        "tokens that end a text": lambda lone: check_eos(lone.family, lone.hf),
        "positions and the vocabulary": lambda lone: check_sizes(
            lone.family, lone.hf, may_rename=True
        ),
        "in chunks, beside itself": check_chunks,
        "two sequences in a step, beside itself": check_two,
        "many sequences in a step, beside itself": check_many,
    }
    for name, check in checks.items():

        def run(check: Callable[[Lone], object] = check) -> None:
            check(make())

        yield name, run


def compare(actual: Tensor, right: Tensor, text: str) -> None:
    """Raise AssertionError unless log-probabilities are those of the prompt in one step."""
    off = (actual.log_softmax(-1) - right.log_softmax(-1)).abs().amax(-1)
    wrong = ~(off <= TOLERANCE)
    assert not bool(wrong.any()), (
        f"{text}: log-probabilities are off by up to {float(off.max()):.2g} from those of the "
        f"prompt in one step, first at token {int(wrong.nonzero()[0])}"
    )


def check_chunks(lone: Lone) -> None:
    """A prompt in chunks, then token by token, over small pages."""
    prompt = lone.prompt(LENGTH, 1)
    whole = lone.open(16).step({0: prompt})
    bounds = [0, 9, 10, 23, 36, *range(37, LENGTH + 1)]
    paged = lone.open(4)
    parts = [paged.step({0: prompt[start:stop]}) for start, stop in pairwise(bounds)]
    compare(torch.cat(parts), whole, "in chunks")


def check_two(lone: Lone) -> None:
    """Two sequences of other lengths share steps."""
    prompts = lone.prompt(30, 2), lone.prompt(17, 3)
    whole = [lone.open(16).step({0: prompt}) for prompt in prompts]
    paged = lone.open(4)
    first = paged.step({0: prompts[0][:20], 1: prompts[1][:6]})
    second = paged.step({1: prompts[1][6:], 0: prompts[0][20:]})
    compare(torch.cat([first[:20], second[11:]]), whole[0], "sequence 1 of 2")
    compare(torch.cat([first[20:], second[:11]]), whole[1], "sequence 2 of 2")


def check_many(lone: Lone) -> None:
    """Many sequences share a step, and none of them reads another."""
    prompts = [lone.prompt(1 + 3 * row % 11, row) for row in range(NUM_SEQUENCES)]
    scores = lone.open(4, NUM_SEQUENCES).step(dict(enumerate(prompts)))
    parts: Sequence[Tensor] = torch.split(scores, [len(prompt) for prompt in prompts])
    for row in range(0, NUM_SEQUENCES, 5):
        whole = lone.open(16).step({0: prompts[row]})
        compare(parts[row], whole, f"sequence {row + 1} of {NUM_SEQUENCES}")
