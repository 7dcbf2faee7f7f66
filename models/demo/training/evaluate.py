"""Measure a checkpoint's rounded weights in float32: `python -m training.evaluate CHECKPOINT`, from
models/demo.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from . import recall, sums
from .model import GENERATION
from .spans import TURN_END, joined
from .stories import hero
from .train import OTHER_SEED
from .words import a

DISTANCES = (100, 400, 800, 1500, 3000)  # tokens between what is to be remembered and the question
BATCH_TOKENS = 8192
PROMPTS = (
    "Once upon a time",
    "Once upon a time, there was a little dragon",
    "Hello",
    "Hello, how are you?",
    "The capital of France is",
    "What is 2 + 2?",
    "23 + 48 =",
)
CHATS = (
    ("Hello",),
    ("Hello, how are you?",),
    ("Who are you?",),
    ("What is 2 + 2?",),
    ("What's 17 plus 25?",),
    ("What is the capital of France?",),
    ("Tell me a story.",),
    ("Tell me a story about a fox.",),
    ("Tell me a story about a birthday.",),
    ("Tell me a story about a robot and a princess.",),
    ("Tell me a joke",),
    ("Explain quantum physics.",),
    ("My name is Patricia.", "Nice to meet you, Patricia!", "What is my name?"),
    ("Remember: the code is 4821.", "I will remember that the code is 4821.", "What is the code?"),
)


class Case(NamedTuple):
    """A prompt and the one right answer."""

    prompt: str
    answer: str


class Checkpoint:
    """A model in float32 and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(self.device).eval()
        )

    def chat(self, *turns: str) -> str:
        """The prompt for the assistant's answer; turns are the user's and the assistant's by
        turns.
        """
        messages = [
            {"role": ("user", "assistant")[index % 2], "content": text}
            for index, text in enumerate(turns)
        ]
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def margins(self, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """What greedy decoding would say after each token, and by how much.

        returns: choice, top logit less the second [rows, tokens], padded on the right
        """
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
        top = self.model(tokens, use_cache=False).logits.topk(2)
        return top.indices[..., 0].cpu(), (top.values[..., 0] - top.values[..., 1]).cpu()

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[str], limit: int = 256) -> list[list[int]]:
        """The tokens that follow each prompt, up to and with the one that ends the text."""
        batch = self.tokenizer(
            list(prompts), add_special_tokens=False, padding=True, return_tensors="pt"
        )
        inputs = {name: batch[name].to(self.device) for name in ("input_ids", "attention_mask")}
        made = self.model.generate(**inputs, max_new_tokens=limit, do_sample=False)
        return [until_end(row) for row in made[:, inputs["input_ids"].shape[1] :].tolist()]

    def texts(self, prompts: Sequence[str]) -> list[str]:
        """The text that follows each prompt."""
        return [str(self.tokenizer.decode(row)) for row in self.greedy(prompts)]


def until_end(tokens: list[int]) -> list[int]:
    """The tokens up to the first that ends a text."""
    stops = [index for index, token in enumerate(tokens) if token in GENERATION["eos_token_id"]]
    return tokens[: stops[0] + 1] if stops else tokens


def accuracy(checkpoint: Checkpoint, cases: Sequence[Case]) -> dict[str, float]:
    """The part of the cases whose whole answer greedy decoding gives, and the margins inside right
    answers.
    """
    right, margins = 0, []
    for group in grouped(
        [(checkpoint.ids(case.prompt), checkpoint.ids(case.answer)) for case in cases]
    ):
        choices, gaps = checkpoint.margins([prompt + answer for prompt, answer in group])
        for (prompt, answer), choice, gap in zip(group, choices, gaps, strict=True):
            span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
            if choice[span].tolist() == answer:
                right += 1
                margins.append(gap[span].min().item())
    low = np.percentile(margins, (0, 1, 50)) if margins else (0.0, 0.0, 0.0)
    names = ("smallest_margin", "margin_1%", "margin_50%")
    return {"cases": len(cases), "right": right / len(cases)} | {
        name: round(float(value), 3) for name, value in zip(names, low, strict=True)
    }


def grouped(pairs: list[tuple[list[int], list[int]]]) -> list[list[tuple[list[int], list[int]]]]:
    """The pairs by length, in groups of at most `BATCH_TOKENS` padded tokens."""
    groups: list[list[tuple[list[int], list[int]]]] = []
    for pair in sorted(pairs, key=lambda pair: -len(pair[0]) - len(pair[1])):
        if groups and (len(groups[-1]) + 1) * sum(map(len, groups[-1][0])) <= BATCH_TOKENS:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return groups


def sum_cases(checkpoint: Checkpoint, tested: Sequence[sums.Sum], chat: bool = False) -> list[Case]:
    """The sums as questions in a chat, or as plain text."""
    if chat:
        asked = [f"What is {sum_.first} {sum_.sign} {sum_.second}?" for sum_ in tested]
        return [
            Case(checkpoint.chat(text), f"{sum_.result}{TURN_END}")
            for text, sum_ in zip(asked, tested, strict=True)
        ]
    return [
        Case(f"{sum_.first} {sum_.sign} {sum_.second} =", f" {sum_.result}.") for sum_ in tested
    ]


def recall_case(checkpoint: Checkpoint, rng: random.Random, distance: int) -> Case:
    """One to four facts, `distance` tokens of other text, and a question for one of the facts."""
    facts = recall.facts(rng, rng.randint(1, 4))
    between: list[str] = []
    while (missing := distance - len(checkpoint.ids("\n".join(between)))) > 0:
        filler = recall.filler(rng) if missing > 200 else sums.written(sums.draw(rng))
        between.append(joined(filler))
    asked = joined(recall.question(rng.choice(facts)))
    question, answer = asked.rsplit(" ", 1)
    return Case(
        "\n".join([*(joined(recall.reminder(fact)) for fact in facts), *between, question]),
        f" {answer}",
    )


def story_margins(checkpoint: Checkpoint, count: int) -> dict[str, float]:
    """How far the best token is ahead of the second along greedy stories, in logits."""
    rng = random.Random(OTHER_SEED)
    heroes = [hero(rng) for _ in range(count)]
    prompts = [
        f"Once upon a time, there was {a(f'little {who.kind}')} named {who.name}." for who in heroes
    ]
    gaps: list[float] = []
    for prompt, made in zip(prompts, checkpoint.greedy(prompts), strict=True):
        start = checkpoint.ids(prompt)
        gaps += checkpoint.margins([start + made])[1][0][len(start) - 1 : -1].tolist()
    names = {
        f"{percent}%": round(float(np.percentile(gaps, percent)), 3) for percent in (1, 5, 25, 50)
    }
    return {"stories": count, "tokens": len(gaps), **names}


def report(
    checkpoint: Checkpoint, num_sums: int, num_recall: int, num_stories: int
) -> dict[str, Any]:
    """All measurements of the checkpoint."""
    rng = random.Random(OTHER_SEED)
    below_100, minus, below_1000 = (
        rng.sample(found, min(num_sums, len(found)))
        for found in (
            sums.held_out("+", 0, 100),
            sums.held_out("-", 0, 100),
            sums.held_out("+", 100, 1000),
        )
    )
    chats = [checkpoint.chat(*turns) for turns in CHATS]
    distances = {
        str(distance): accuracy(
            checkpoint, [recall_case(checkpoint, rng, distance) for _ in range(num_recall)]
        )
        for distance in DISTANCES
    }
    return {
        "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        "sums_below_100": accuracy(checkpoint, sum_cases(checkpoint, below_100)),
        "sums_below_100_chat": accuracy(checkpoint, sum_cases(checkpoint, below_100, chat=True)),
        "differences_below_100": accuracy(checkpoint, sum_cases(checkpoint, minus)),
        "sums_of_three_digits": accuracy(checkpoint, sum_cases(checkpoint, below_1000)),
        "recall_by_distance": distances,
        "story_margins": story_margins(checkpoint, num_stories),
        "greedy_text": dict(zip(PROMPTS, checkpoint.texts(PROMPTS), strict=True)),
        "greedy_chat": dict(zip(map(" / ".join, CHATS), checkpoint.texts(chats), strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--sums", type=int, default=800, help="held-out sums of each kind")
    parser.add_argument("--recall", type=int, default=100, help="questions at each distance")
    parser.add_argument("--stories", type=int, default=32)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    args = parser.parse_args()
    text = json.dumps(
        report(Checkpoint(args.checkpoint), args.sums, args.recall, args.stories), indent=2
    )
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
