"""The cases of a family whose layers keep states: copies of them, and those behind drafts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headstock.spi import StateKV
from headstock_conformance.model.parity import expected, tokens
from headstock_conformance.model.subject import Subject, compare, load, make_checkpoint


def list_state_cases(
    subject: Subject, hf: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases by name; none where the family keeps no state."""
    try:
        groups = subject.family.config(hf).kv_groups
    except Exception:  # the other cases say what is wrong with it
        return
    layouts = [group.layout for group in groups if isinstance(group.layout, StateKV)]
    alignment = math.lcm(*(each.alignment or 0 for each in layouts)) if layouts else 0
    if alignment:
        yield "a copied state", partial(check_copy, subject, alignment)
        yield "a state amid a prompt", partial(check_amid, subject, alignment)
        yield "states behind drafts", partial(check_drafts, subject)


def check_copy(subject: Subject, alignment: int) -> None:
    """A sequence goes on from a copy of another one's state, which went on otherwise."""
    cut = -(-9 // alignment) * alignment
    common, length = tokens(cut, seed=4), cut + 20
    prompts = [common + tokens(20, seed=seed) for seed in (5, 6)]
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(subject, {"max_position_embeddings": 4 * length}, Path(folder))
        paged = load(subject, Path(folder), 4, length)
        first = paged.step({0: common})
        paged.fork(0, 1)
        for number, prompt in enumerate(prompts):
            rest = paged.step({number: prompt[cut:]})
            compare(
                torch.cat((first, rest)),
                expected(Path(folder), prompt),
                f"behind {cut} tokens, sequence {number + 1} of 2: ",
            )


def check_amid(subject: Subject, alignment: int) -> None:
    """A sequence goes on from a state that a step saved amid another one's prompt."""
    cut = -(-9 // alignment) * alignment
    common, length = tokens(cut, seed=4), 2 * cut + 20
    first, second = (common + tokens(cut + 20, seed=seed) for seed in (5, 6))
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(subject, {"max_position_embeddings": 4 * length}, Path(folder))
        paged = load(subject, Path(folder), 4, length)
        scores = paged.step({0: first}, saved={0: {cut - 1: 1}})
        compare(scores, expected(Path(folder), first), "a prompt whose state is saved: ")
        rest = paged.step({1: second[cut:]})
        compare(
            torch.cat((scores[:cut], rest)),
            expected(Path(folder), second),
            f"behind {cut} tokens of another prompt: ",
        )


def check_drafts(subject: Subject) -> None:
    """A sequence goes on from the state behind the middle one of three tokens of a step."""
    common, length = tokens(9, seed=4), 32
    drafts, others = tokens(3, seed=5), tokens(20, seed=6)
    prompt = common + drafts[:2] + others
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(subject, {"max_position_embeddings": 4 * length}, Path(folder))
        paged = load(subject, Path(folder), 4, length)
        first = torch.cat((paged.step({0: common}), paged.step({0: drafts}, saved={0: {1: 1}})[:2]))
        rest = paged.step({1: others})
        compare(torch.cat((first, rest)), expected(Path(folder), prompt), "behind a draft: ")
