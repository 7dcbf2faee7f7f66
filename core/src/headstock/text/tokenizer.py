"""The tokenizer of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headstock.errors import ModelError, RequestError, shown

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""How vocabularies with byte fallback spell a byte (tokenizers' ByteFallback decoder)."""

LONGEST_REASON = 160
"""Characters of what transformers says of a config.json, whose key comes late in it."""


class Tokenizer:
    """Text to token ids and back, as the checkpoint in `directory` defines it. Safe to share between threads.

    raises: ModelError
    """

    def __init__(self, directory: Path) -> None:
        self.whole = load(directory)  # chat templates live here
        self.inner = self.whole.backend_tokenizer
        self.inner.no_truncation()
        self.inner.no_padding()
        self.vocab_size: int = self.inner.get_vocab_size(with_added_tokens=True)
        self.eos_ids: tuple[int, ...] = () if self.whole.eos_token_id is None else (int(self.whole.eos_token_id),)
        added = self.inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.byte_ids = byte_fallback_ids(self.inner.get_vocab())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the tokens a checkpoint begins every text with unless told otherwise.

        raises: RequestError
        """
        try:
            return list(self.inner.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError):  # half of a surrogate pair, as a JSON escape can spell
            raise RequestError("prompt holds characters that are not valid Unicode", parameter="prompt") from None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `tokens`; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def known(self, token: int) -> bool:
        """Whether the vocabulary holds `token`; scores may be padded past its end."""
        return self.inner.id_to_token(token) is not None


def load(directory: Path) -> Any:
    """The transformers tokenizer of `directory`, without code from it.

    raises: ModelError
    """
    if not directory.is_dir():
        raise ModelError(
            f"no directory {shown(directory)} to read a tokenizer from; give --model a checkpoint directory"
        )
    open_directory = opener(directory)
    try:
        tokenizer = open_directory(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises whatever its parsers do
        if has_code(directory):
            raise ModelError(
                f"the tokenizer in {shown(directory)} needs Python code of its own, which is never run; "
                "choose a checkpoint with a plain tokenizer.json"
            ) from error
        check_config(directory, error)
        reason = shown(str(error) or type(error).__name__)
        raise ModelError(
            f"cannot read the tokenizer in {shown(directory)}: {reason}; is tokenizer.json whole?"
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"the tokenizer in {shown(directory)} has no tokenizer.json; save it with save_pretrained first"
        )
    return tokenizer


def opener(directory: Path) -> Callable[..., Any]:
    """What reads the tokenizer of `directory`.

    A tokenizer.json is the whole of it, and reading it imports a tenth of transformers: finding the family's own class
    took 4.5 s of a start on a GPU host, most of it for training libraries.
    """
    if (directory / "tokenizer.json").exists() and not has_code(directory):
        from transformers import PreTrainedTokenizerFast

        found: Callable[..., Any] = PreTrainedTokenizerFast.from_pretrained
        return found
    from transformers import AutoTokenizer

    any_class: Callable[..., Any] = AutoTokenizer.from_pretrained
    return any_class


def check_config(directory: Path, refused: Exception) -> None:
    """Raise ModelError when what `refused` the tokenizer is the config.json beside it, which transformers reads too."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # as above
        if str(error) == str(refused) and (directory / "config.json").exists():
            reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
            raise ModelError(f"config.json in {shown(directory)} cannot be read by transformers: {reason}") from error


def has_code(directory: Path) -> bool:
    """Whether the tokenizer asks for code that comes with the checkpoint."""
    try:
        return "auto_map" in json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def byte_fallback_ids(vocabulary: dict[str, int]) -> frozenset[int]:
    """The ids that stand for single bytes in a vocabulary with byte fallback; empty for one without."""
    return frozenset(token for piece, token in vocabulary.items() if BYTE_TOKEN.fullmatch(piece))
