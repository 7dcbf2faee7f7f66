"""The demo model's text says what is so, keeps its held-out sums out, and its tokenizer gives every
text back.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from tokenizers import Tokenizer
from transformers import AutoTokenizer

DEMO = Path(__file__).parents[2] / "models/demo"
CHECKPOINT = DEMO / "src/headstock_demo/checkpoint"
STORIES_A_PLOT = 60


def package(folder: Path, name: str) -> None:
    """Make a folder importable as a package under a name of its own.   writes: sys.modules"""
    places = [str(folder)]
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=places
    )
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def training(module: str) -> ModuleType:
    """A module of the training scripts."""
    if "demo_training" not in sys.modules:
        package(DEMO / "training", "demo_training")
    return importlib.import_module(f"demo_training.{module}")


corpus, sums, recall, stories = map(training, ("corpus", "sums", "recall", "stories"))
joined = training("spans").joined


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Documents of every kind, as text."""
    return [joined(spans) for spans in corpus.documents(seed=7, chars=1_500_000)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_text_depends_on_the_seed_alone() -> None:
    first, again, other = (corpus.documents(seed, 50_000) for seed in (3, 3, 4))
    assert first == again
    assert first != other


# number, sign or word, number; then the forms that name the operation first
INFIX = re.compile(r"(\d+) ?(\+|-|plus|minus) ?(\d+)")
PREFIX = re.compile(r"(add|sum of|sum|take|subtract) (\d+) (?:and|from) (\d+)", re.IGNORECASE)
SIGNS = {
    "plus": "+",
    "minus": "-",
    "add": "+",
    "sum of": "+",
    "sum": "+",
    "take": "-",
    "subtract": "-",
}


def sums_in(text: str) -> list[Any]:
    """All sums and differences that the text asks for or states."""
    found = [(int(a), SIGNS.get(sign, sign), int(b)) for a, sign, b in INFIX.findall(text)]
    for word, first, second in PREFIX.findall(text):
        sign = SIGNS[word.lower()]
        found.append(
            (int(first), sign, int(second)) if sign == "+" else (int(second), sign, int(first))
        )
    return [sums.Sum(*parts) for parts in found]


def test_held_out_sums_appear_in_no_form(texts: list[str]) -> None:
    found = [sum_ for text in texts for sum_ in sums_in(text)]
    assert len(found) > 10_000
    assert {sum_.sign for sum_ in found} == {"+", "-"}
    assert [sum_ for sum_ in found if sum_.is_held_out] == []


def test_one_sum_in_twelve_is_held_out_in_both_orders() -> None:
    held_out = sums.held_out("+", 0, sums.LIMIT)
    assert len(held_out) == pytest.approx(sums.LIMIT**2 / sums.HELD_OUT_PART, rel=0.1)
    assert {(sum_.second, sum_.first) for sum_ in held_out} == {
        (sum_.first, sum_.second) for sum_ in held_out
    }


@pytest.mark.parametrize("form", sums.ASKED_SIGN + sums.ASKED["+"])
def test_every_form_of_a_question_is_seen_by_the_search(form: str) -> None:
    assert sums_in(form.format(a=23, b=48, sign="+")) == [sums.Sum(23, "+", 48)]


def test_stated_results_are_right(texts: list[str]) -> None:
    stated = [sum_ for text in texts for sum_ in re.findall(r"(\d+) ([+*-]) (\d+) = (\d+)\b", text)]
    assert len(stated) > 10_000
    assert [
        parts
        for parts in stated
        if sums.Sum(int(parts[0]), parts[1], int(parts[2])).result != int(parts[3])
    ] == []


def test_answers_in_chats_are_right(texts: list[str]) -> None:
    asked = re.compile(
        r"<\|im_start\|>user\n([^<]*)<\|im_end\|>\n<\|im_start\|>assistant\n(\d+)<\|im_end\|>"
    )
    pairs = [
        (sums_in(question), reply) for text in texts for question, reply in asked.findall(text)
    ]
    answered = [(found[0], int(reply)) for found, reply in pairs if found]
    assert len(answered) > 300
    assert [pair for pair in answered if pair[0].result != pair[1]] == []


@pytest.mark.parametrize("seed", range(40))
def test_every_question_has_the_number_told_before(seed: int) -> None:
    text = joined(recall.document(random.Random(seed)))
    told = dict(re.findall(r"Remember: (the number of the \w+ of \w+) is (\d+)\.", text))
    asked = re.findall(r"Question: what is (the number of the \w+ of \w+)\? Answer: (\d+)\.", text)
    assert sorted(asked) == sorted(told.items())
    assert text.rindex("Remember: ") < text.index("Question: what is the number of the ")


@pytest.mark.parametrize("chat", ["remembered", "noted", "secret"])
def test_what_a_chat_recalls_was_told_by_the_user(chat: str) -> None:
    for seed in range(40):
        turns = getattr(training("chats"), chat)(random.Random(seed))
        value = joined(turns[-1][1]).rstrip(".").split()[-1]
        assert any(value in re.findall(r"\w+", joined(asked)) for asked, _ in turns[:-1])
        assert value not in re.findall(r"\w+", joined(turns[-1][0]))


def tales(plot: str) -> list[str]:
    """Stories of one plot."""
    return [stories.story(random.Random(seed), plot=plot) for seed in range(STORIES_A_PLOT)]


def only(pattern: str, text: str) -> set[str]:
    """What the pattern's group matches in the text; the pattern must be found."""
    found = set(re.findall(pattern, text))
    assert found, (pattern, text)
    return found


@pytest.mark.parametrize("plot", stories.plots.PLOTS)
def test_a_character_stays_what_it_is(plot: str) -> None:
    for text in tales(plot):
        kinds = re.findall(r"(?<!gave )([A-Z]\w+) the (\w+)", text)
        assert len(dict(kinds)) == len(set(kinds)), text
        assert len({name for name, _ in kinds} | only(r"named (\w+)|^(\w+) ", text)) >= 2


# what is said first, and what a later sentence must repeat
ECHOES = {
    "lost": (r'"Where is my ([\w ]+)\?"', r'"I saw your ([\w ]+?) (?:at|in|on) '),
    "borrowed": (r"bring it back ([\w ]+)\.", r'"You came back ([\w ]+), as'),
    "shared": (r"On the way, \w+ met (\w+) the", r"Then (\w+) came by"),
    "rescued": (r"cried a little (\w+)\. It", r"soon the (\w+) was safe"),
    "gift": (r'\w+ loves ([\w ]+),"', r'"Oh, ([\w ]+)! How'),
    "built": (r"wanted to build ([\w ]+)\.", r"they built ([\w ]+)\."),
    "brave": (r" was afraid of ([\w ]+)\.", r'"Were you not afraid of ([\w ]+)\?"'),
    "planted": (r'"Nothing will ever grow there," said (\w+)', r'"I was wrong," said (\w+)'),
    "delivered": (r"Please take it to (\w+) the", r'"How kind!" said (\w+)'),
    "traded": (r"wished for an? ([\w ]+), but", r"had the ([\w ]+)\. (?:Every|\")"),
}


@pytest.mark.parametrize("plot", ECHOES)
def test_what_was_said_comes_back(plot: str) -> None:
    first, later = ECHOES[plot]
    for text in tales(plot):
        assert only(first, text) == only(later, text)


def test_counted_things_add_up() -> None:
    for text in tales("counted"):
        found, more = only(r"found (\d+) ", text), only(r'"I have (\d+) ', text)
        away, left = only(r"gave \w+ (\d+) of them", text), only(r"and kept (\d+),", text)
        (found, more, away, left) = (int(numbers.pop()) for numbers in (found, more, away, left))
        assert found + more - away == left > 0


def test_rows_hold_whole_documents(tokenizer: Tokenizer) -> None:
    length = 513
    documents = list(corpus.encoded(tokenizer, corpus.documents(seed=2, chars=100_000)))
    rows = corpus.packed(iter(documents), length)
    kept = sorted(
        document.tokens.tolist() for document in documents if len(document.tokens) <= length
    )
    flat = [
        token for row, weights in zip(*rows, strict=True) for token in row[weights > 0].tolist()
    ]
    cut = [part.split() for part in " ".join(map(str, flat)).split(f" {corpus.END}")]
    assert sorted([*map(int, part), corpus.END] for part in cut if part) == kept
    assert (rows.weights > 0).mean() > 0.95


@given(st.text())
@settings(max_examples=count_examples(200))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    if not re.search(r"<\|(endoftext|im_start|im_end)\|>", text):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert [token for token in tokenizer.get_vocab() if re.search(r"\d.|.\d", token)] == []
    assert tokenizer.encode("4821").tokens == ["4", "8", "2", "1"]


def test_the_chat_template_writes_chats_as_the_training_text_does() -> None:
    template = AutoTokenizer.from_pretrained(CHECKPOINT)
    for seed in range(20):
        text = joined(training("chats").document(random.Random(seed)))
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
        messages = [{"role": role, "content": content} for role, content in turns]
        assert template.apply_chat_template(messages, tokenize=False) == text
        opened = template.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert text.startswith(opened) and opened.endswith("<|im_start|>assistant\n")


def test_the_checkpoint_is_small_and_ends_texts(tokenizer: Tokenizer) -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 12_000_000
    config = json.loads((CHECKPOINT / "config.json").read_text())
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert generation["eos_token_id"] == [
        tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|im_end|>")
    ]
