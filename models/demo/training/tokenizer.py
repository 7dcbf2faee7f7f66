"""A byte-level BPE tokenizer whose digits are tokens of their own, with a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .spans import END_OF_TEXT, SPECIAL_TOKENS, TURN_END, TURN_START

VOCAB = 768
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{TURN_START}' + message['role'] + '\\n' + message['content'] + '{TURN_END}' + '\\n' "
    f"}}}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{TURN_START}assistant\\n' }}}}{{% "
    "endif %}"
)


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """The texts cut at their special tokens, which are not made of smaller ones."""
    for text in texts:
        yield from re.split("|".join(map(re.escape, SPECIAL_TOKENS)), text)


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of `VOCAB` entries that can write any bytes and is made for these texts."""
    tokenizer = Tokenizer(models.BPE())
    split = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(texts), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Keep the tokenizer as Hugging Face reads it.

    writes: tokenizer.json, tokenizer_config.json
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
