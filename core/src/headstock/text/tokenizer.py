"""The tokenizer of a checkpoint."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from string import hexdigits
from typing import Any

from headstock.errors import ModelError, RequestError, shorten

BYTE_TOKENS = tuple(f"<0x{first}{second}>" for first, second in product(hexdigits, repeat=2))
"""How vocabularies with byte fallback spell a byte (tokenizers' ByteFallback decoder)."""

MAX_REASON_LENGTH = 160
"""Characters of transformers' error about a config.json, which names the key late."""

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
"""The files that transformers reads a vocabulary from; tokenizer_config.json has none."""

SENTENCEPIECE = ("sentencepiece", "protobuf")
"""The distributions with which transformers reads a tokenizer.model."""

LONG = 4096
"""Tokens from which decoding is worth more than a call."""

PIECE_CHARACTERS = 8
"""Characters for each token that a text is cut to, of which its beginning is tokenized."""

CUT_TOKENS = 16
"""Tokens at the end of a piece of text that may differ from those of the whole text."""

PROCESSOR_TEMPLATE = "chat_template.json"
"""The file in which transformers' processors had a chat template before chat_template.jinja."""

LFS_POINTER = b"version https://git-lfs"
"""The beginning of the pointer that stands for a large file until Git LFS fetches it."""


class Tokenizer:
    """Text to token ids and back, as the checkpoint in `directory` defines it. Safe to share
    between threads.

    special_tokens: the ids of special tokens, by their texts
    byte_values: the bytes that tokens of vocabularies with byte fallback stand for, by id

    raises: ModelError
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hf_tokenizer: Any = None
        self._hf_lock = threading.Lock()
        # Here and not above: the command line imports this module for --help too.
        from headstock.text.plain_tokenizer import read_plain_tokenizer

        plain = read_plain_tokenizer(directory)
        if plain is None:
            self._hf_tokenizer = _load_untruncated(directory)
            self.backend = self._hf_tokenizer.backend_tokenizer
            eos_id = self._hf_tokenizer.eos_token_id
        else:
            self.backend, eos_id = plain.backend, plain.eos_id
            _leave_whole(self.backend)
        self.vocab_size: int = self.backend.get_vocab_size(with_added_tokens=True)
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (int(eos_id),)
        added = self.backend.get_added_tokens_decoder()
        self.special_tokens = {
            str(entry.content): int(token) for token, entry in added.items() if entry.special
        }
        self.special_ids = frozenset(self.special_tokens.values())
        ids = ((self.backend.token_to_id(text), int(text[3:5], 16)) for text in BYTE_TOKENS)
        self.byte_values = {token: value for token, value in ids if token is not None}
        self.byte_ids = frozenset(self.byte_values)

    @property
    def hf_tokenizer(self) -> Any:
        """The transformers tokenizer, with the chat template.   raises: ModelError

        It may be loaded at its first use.
        """
        with self._hf_lock:
            if self._hf_tokenizer is None:
                self._hf_tokenizer = _load_untruncated(self._directory)
                # Of equal ones, one is kept: a large vocabulary takes some 100 MB.
                self.backend = self._hf_tokenizer.backend_tokenizer
            return self._hf_tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; `add_special_tokens` adds those that begin or end every text.

        raises: RequestError
        """
        try:
            # A batch of one: `encode` holds the interpreter's lock, some seconds for a megabyte.
            (encoding,) = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        # Half of a surrogate pair, which a JSON escape can spell, has no UTF-8 form.
        except (UnicodeEncodeError, TypeError):
            raise RequestError(
                "prompt holds characters that are not valid Unicode", parameter="prompt"
            ) from None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `tokens`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary
        have no text.
        """
        if len(tokens) > LONG:  # `decode` holds the interpreter's lock
            texts = self.backend.decode_batch(
                [list(tokens)], skip_special_tokens=skip_special_tokens
            )
            return str(texts[0])
        ids = tokens if isinstance(tokens, list) else list(tokens)
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def cut_text(self, text: str, num_tokens: int) -> str:
        """The beginning of `text` that has at most `num_tokens` tokens; not all of it is tokenized.

        raises: RequestError
        """
        size = PIECE_CHARACTERS * num_tokens
        while True:
            try:
                piece = self.backend.encode(text[:size], add_special_tokens=False)
            except (UnicodeEncodeError, TypeError):
                raise RequestError(
                    "prompt holds characters that are not valid Unicode", parameter="prompt"
                ) from None
            # Its last tokens may be others than those of a longer piece.
            if len(piece.ids) > num_tokens + CUT_TOKENS or size >= len(text):
                break
            size *= 2
        if len(piece.ids) <= num_tokens:
            return text
        # The offsets of a character in several tokens are those of the whole character. Cut within
        # a word, the text may have other tokens, and one more.
        return self.cut_text(text[: piece.offsets[num_tokens][0]], num_tokens)

    def find_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The ids of the tokens that are these texts, as far as there are any."""
        ids = map(self.backend.token_to_id, texts)
        return frozenset(token for token in ids if token is not None)

    def find_special_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """The special tokens whose texts `texts` hold, and their ids."""
        pattern = self._special_pattern
        found = (
            [] if pattern is None else [each for text in texts for each in pattern.findall(text)]
        )
        return {text: self.special_tokens[text] for text in found}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Finds special tokens in a text; of several at one place the longest, as tokenizers do."""
        texts = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def find_id(self, text: str) -> int | None:
        """The id of the token with this text; None if no token has it."""
        return next(iter(self.find_ids([text])), None)

    def has_token(self, token: int) -> bool:
        """Whether the vocabulary holds `token`; scores may be padded past its end."""
        return self.backend.id_to_token(token) is not None


class NoTokenizer(Tokenizer):
    """Stands for the tokenizer of a directory without one: token ids are served, with empty text.

    `encode` and `hf_tokenizer` raise ModelError with `reason`.
    """

    vocab_size = 0
    eos_ids = ()
    special_ids = frozenset()
    byte_ids = frozenset()

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.special_tokens, self.byte_values = {}, {}

    @property
    def hf_tokenizer(self) -> Any:
        raise ModelError(self.reason)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise ModelError(self.reason)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return ""

    def has_token(self, token: int) -> bool:
        return False


class MissingTokenizer(ModelError):
    """A model directory has no file with a vocabulary."""


def open_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of `directory`, or a NoTokenizer if it has none.

    raises: ModelError when it is damaged
    """
    try:
        return Tokenizer(directory)
    except MissingTokenizer as error:
        return NoTokenizer(str(error))


def check_vocabulary(directory: Path) -> None:
    """Raise MissingTokenizer for a model without one; a vocabulary is not read, which may take
    seconds.

    Whatever else is wrong is left to loading.
    """
    if not (directory / "config.json").exists() or any(
        (directory / name).exists() for name in VOCABULARIES
    ):
        return
    try:
        load_tokenizer(directory)
    except MissingTokenizer:
        raise
    except ModelError:
        return


def import_transformers() -> None:
    """Import what `Tokenizer.hf_tokenizer` needs of transformers, which takes half a second."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401 - imported for later


def load_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer of `directory`, without code from it.

    raises: MissingTokenizer without a tokenizer, ModelError
    """
    if not directory.is_dir():
        raise ModelError(
            f"no directory {shorten(directory)} to read a tokenizer from; set model (--model) to a "
            "checkpoint directory"
        )
    present = [name for name in VOCABULARIES if (directory / name).exists()]
    load_from = _choose_loader(directory)
    try:
        tokenizer = load_from(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the library raises whatever its parsers do
        if _has_code(directory):
            raise ModelError(
                f"the tokenizer in {shorten(directory)} needs Python code of its own, which is "
                "never run; choose a checkpoint with a plain tokenizer.json"
            ) from error
        _check_config(directory, error)
        if not present:
            raise _make_missing_error(directory) from error
        reason = shorten(str(error) or type(error).__name__)
        advice = _suggest_repair(directory / present[0])
        raise ModelError(
            f"cannot read the tokenizer in {shorten(directory)}: {reason}; {advice}"
        ) from error
    if not present and not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        # Of some families transformers makes a tokenizer without a vocabulary, and no error.
        raise _make_missing_error(directory)
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"the tokenizer in {shorten(directory)} has no tokenizer.json; save it with "
            "save_pretrained first"
        )
    return tokenizer


def _load_untruncated(directory: Path) -> Any:
    """As `load_tokenizer`, and texts are never cut or padded."""
    tokenizer = load_tokenizer(directory)
    _leave_whole(tokenizer.backend_tokenizer)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _read_processor_template(directory)
    return tokenizer


def _read_processor_template(directory: Path) -> str | None:
    """The template that models with images kept beside their tokenizer's files until 2025; None
    without one.

    raises: ModelError
    """
    path = directory / PROCESSOR_TEMPLATE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {path.name} in {shorten(directory)}: {shorten(error)}; correct or remove "
            "the file"
        ) from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    if not isinstance(template, str):
        raise ModelError(
            f"{path.name} in {shorten(directory)}: expected one JSON object with a chat_template, "
            f"got {shorten(content)}; correct or remove the file"
        )
    return template


def _leave_whole(backend: Any) -> None:
    """Have texts neither cut nor padded, which a tokenizer.json may ask for."""
    backend.no_truncation()
    backend.no_padding()


def _choose_loader(directory: Path) -> Callable[..., Any]:
    """The function of transformers that loads the tokenizer of `directory`."""
    # A tokenizer.json is complete, and loading it imports a tenth of transformers. Finding the
    # family's own class took 4.5 s of a start on a GPU host, most of it for training libraries.
    if (directory / "tokenizer.json").exists() and not _has_code(directory):
        from transformers import PreTrainedTokenizerFast

        load_fast: Callable[..., Any] = PreTrainedTokenizerFast.from_pretrained
        return load_fast
    from transformers import AutoTokenizer

    load_any: Callable[..., Any] = AutoTokenizer.from_pretrained
    return load_any


def _make_missing_error(directory: Path) -> MissingTokenizer:
    """The error for a directory without a vocabulary."""
    return MissingTokenizer(
        f"no tokenizer in {shorten(directory)}; looked for {', '.join(VOCABULARIES)}; copy or "
        "download it there, or give token ids as prompts"
    )


def _suggest_repair(file: Path) -> str:
    """The next move after `file` could not be read as a tokenizer."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            return f"{file.name} is a Git LFS pointer: fetch the file with git lfs pull"
    if file.suffix == ".model" and not all(map(is_installed, SENTENCEPIECE)):
        return (
            f"{file.name} needs {' and '.join(SENTENCEPIECE)}: pip install "
            f"{' '.join(SENTENCEPIECE)}"
        )
    return f"is {file.name} whole? Copy or download it again"


def is_installed(distribution: str) -> bool:
    """Whether the distribution is installed."""
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def _check_config(directory: Path, refusal: Exception) -> None:
    """Raise ModelError when the config.json beside the tokenizer, which transformers reads too, is
    the reason for `refusal`.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers do
        if str(error) == str(refusal) and (directory / "config.json").exists():
            reason = " ".join(str(error).split())[:MAX_REASON_LENGTH] or type(error).__name__
            raise ModelError(
                f"config.json in {shorten(directory)} cannot be read by transformers: {reason}"
            ) from error


def _has_code(directory: Path) -> bool:
    """Whether the tokenizer needs code that comes with the checkpoint."""
    try:
        return "auto_map" in json.loads(
            (directory / "tokenizer_config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError, TypeError):
        return False
