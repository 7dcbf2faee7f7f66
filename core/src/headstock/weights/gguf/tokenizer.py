"""The tokenizer of a GGUF file, in the words of a tokenizer.json and a tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headstock.errors import shorten
from headstock.weights.gguf.header import HeaderError
from headstock.weights.gguf.metadata import Metadata

_KEYS = "tokenizer.ggml."
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_NONE = ("none", "no_vocab")
_SPACE = "\u2581"
"""How a space is written in vocabularies of SentencePiece."""
_MAX_PIECE = 256
"""The longest token that is made of two others."""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3_SPLIT = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_SPLIT = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_REST}"
_QWEN35_SPLIT = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2, _GPT2, _SMOLLM, _TEKKEN = "llama3", "qwen2", "gpt2", "smollm", "tekken"
_DBRX, _GPT4O, _QWEN35 = "dbrx", "gpt4o", "qwen35"

_SPLITS: Mapping[str, str] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _DBRX),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), _SMOLLM),
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "qwen35": _QWEN35,
}
"""The names that files have for how text is split -> the kind."""

_PATTERNS = {
    _LLAMA3: _LLAMA3_SPLIT,
    _DBRX: _LLAMA3_SPLIT,
    _QWEN2: _QWEN2_SPLIT,
    _QWEN35: _QWEN35_SPLIT,
    _TEKKEN: _TEKKEN_SPLIT,
    _GPT4O: _GPT4O_SPLIT,
}


def translate_tokenizer(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """The contents of the files of a tokenizer, by their names; none where the file has none.

    raises: HeaderError
    """
    kind = metadata.find_text(f"{_KEYS}model")
    if kind is None or kind in _NONE:
        return {}
    tokens = metadata.find_texts(f"{_KEYS}tokens")
    if not tokens:
        raise HeaderError(f"{_KEYS}tokens is missing or empty beside {_KEYS}model")
    types = metadata.find_numbers(f"{_KEYS}token_type") or ()
    if types and len(types) != len(tokens):
        raise HeaderError(
            f"{_KEYS}token_type: expected {len(tokens)} numbers, one a token, got {len(types)}"
        )
    named = {ours: _find_token(metadata, key, tokens) for ours, key in _NAMED.items()}
    if kind == "gpt2":
        parts = _translate_bytes(metadata, tokens, named)
    elif kind == "llama":
        parts = _translate_pieces(metadata, tokens, named)
    else:
        raise HeaderError(
            f"{_KEYS}model: expected gpt2 or llama, got {shorten(kind)}, which is not read from "
            "GGUF"
        )
    added = [
        {"id": token, "content": tokens[token], "special": is_special, **_EXACT}
        for token, is_special in _list_added(types, metadata)
    ]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[token] for name, token in named.items() if token is not None},
    }
    template = metadata.find_text("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    outer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return {"tokenizer.json": outer | parts, "tokenizer_config.json": config}


_EXACT = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _find_token(metadata: Metadata, key: str, tokens: Sequence[str]) -> int | None:
    """A token that has a key of its own.   raises: HeaderError for one beyond the vocabulary"""
    token = metadata.find_count(f"{_KEYS}{key}")
    if token is not None and token >= len(tokens):
        raise HeaderError(f"{_KEYS}{key}: expected one of {len(tokens)} tokens, got {token}")
    return token


def _list_added(types: Sequence[float], metadata: Metadata) -> Iterator[tuple[int, bool]]:
    """The tokens that are found in a text as they are, and whether each is special."""
    # Those that begin and end texts are special even in a file that says nothing of tokens.
    found = {metadata.find_count(f"{_KEYS}{key}") for key in _NAMED.values()}
    named = {token for token in found if token is not None}
    for token in sorted(named | {index for index, type in enumerate(types) if type in _KINDS}):
        yield token, token in named or types[token] != _USER_DEFINED


_KINDS = frozenset((_UNKNOWN, _CONTROL, _USER_DEFINED))


def _translate_bytes(
    metadata: Metadata, tokens: Sequence[str], named: Mapping[str, int | None]
) -> dict[str, Any]:
    """A vocabulary of bytes, which are written as letters.   raises: HeaderError"""
    name = metadata.find_text(f"{_KEYS}pre")
    kind = None if name is None else _SPLITS.get(name)
    if kind is None:
        raise HeaderError(
            f"{_KEYS}pre: expected one of {', '.join(_SPLITS)}, got {shorten(repr(name))}, so how "
            "its tokenizer splits text is not known"
        )
    merges = [_split_merge(merge) for merge in metadata.find_texts(f"{_KEYS}merges") or ()]
    _check_merges(merges, tokens)
    return {
        "normalizer": {"type": "NFC"} if kind in (_QWEN2, _QWEN35) else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _list_splits(kind)},
        "post_processor": _begin_texts(
            metadata, tokens, named, {**_BYTE_LEVEL, "use_regex": False}, by_default=kind == _LLAMA3
        ),
        "decoder": _BYTE_LEVEL,
        "model": _make_bpe(
            tokens, merges, ignore_merges=kind in (_LLAMA3, _TEKKEN), fuse_unk=False
        ),
    }


_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def _list_splits(kind: str) -> list[dict[str, Any]]:
    """What cuts a text into the pieces that merges apply to."""
    if kind == _GPT2:
        return [_BYTE_LEVEL]
    if kind == _SMOLLM:
        return [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]
    pattern = {"Regex": _PATTERNS[kind]}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTE_LEVEL, "use_regex": False}]


def _translate_pieces(
    metadata: Metadata, tokens: Sequence[str], named: Mapping[str, int | None]
) -> dict[str, Any]:
    """A vocabulary of SentencePiece, whose merges follow from its scores.   raises: HeaderError"""
    scores = metadata.find_numbers(f"{_KEYS}scores")
    if scores is None or len(scores) != len(tokens):
        raise HeaderError(
            f"{_KEYS}scores: expected {len(tokens)} numbers, one a token, got "
            f"{'none' if scores is None else len(scores)}"
        )
    has_prefix = metadata.find_flag(f"{_KEYS}add_space_prefix") is not False
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restore = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    normalizers = [prepend, replace] if has_prefix else [replace]
    decoders = [restore, {"type": "ByteFallback"}, {"type": "Fuse"}]
    unknown = named["unk_token"]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _begin_texts(metadata, tokens, named, None, by_default=True),
        "decoder": {"type": "Sequence", "decoders": [*decoders, *([strip] * has_prefix)]},
        "model": _make_bpe(
            tokens,
            _derive_merges(tokens, scores),
            byte_fallback=True,
            unk_token=None if unknown is None else tokens[unknown],
        ),
    }


def _derive_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """The pairs that make up a token, those of the best token first."""
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        if len(token) > _MAX_PIECE:
            continue
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found += (
            (-scores[index], ids[left], ids[right], left, right)
            for left, right in pairs
            if left in ids and right in ids
        )
    return [[left, right] for *_, left, right in sorted(found)]


def _split_merge(merge: str) -> list[str]:
    """The two parts of a merge.   raises: HeaderError"""
    # A part may begin with a space only where the letters of bytes are not used.
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise HeaderError(
            f"{_KEYS}merges: expected two tokens with a space between, got {shorten(repr(merge))}"
        )
    return [left, right]


def _check_merges(merges: Sequence[Sequence[str]], tokens: Sequence[str]) -> None:
    """Raise HeaderError for a merge of what is no token."""
    known = frozenset(tokens)
    for left, right in merges:
        missing = next((each for each in (left, right, left + right) if each not in known), None)
        if missing is not None:
            raise HeaderError(
                f"{_KEYS}merges: {shorten(left)} and {shorten(right)} need the token "
                f"{shorten(repr(missing))}, which {_KEYS}tokens lacks"
            )


def _make_bpe(
    tokens: Sequence[str], merges: Sequence[Sequence[str]], **settings: object
) -> dict[str, Any]:
    """The model of a tokenizer."""
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    others = {"end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": False}
    last = {"ignore_merges": False, "vocab": {token: id for id, token in enumerate(tokens)}}
    return {"type": "BPE", **plain, **others, **last, **settings, "merges": merges}


def _begin_texts(
    metadata: Metadata,
    tokens: Sequence[str],
    named: Mapping[str, int | None],
    first: Mapping[str, Any] | None,
    *,
    by_default: bool,
) -> Mapping[str, Any] | None:
    """What puts the first and the last token around every text.

    first: what comes before it, if anything
    by_default: whether texts begin with a token where the file does not say
    """
    begins = metadata.find_flag(f"{_KEYS}add_bos_token")
    begins = by_default if begins is None else begins
    ends = bool(metadata.find_flag(f"{_KEYS}add_eos_token"))
    bos, eos = named["bos_token"] if begins else None, named["eos_token"] if ends else None
    if bos is None and eos is None:
        return first
    around = {token: tokens[token] for token in (bos, eos) if token is not None}

    def surround(name: str, type_id: int) -> Iterator[dict[str, Any]]:
        """A text with what is before and after it."""
        if bos is not None:
            yield {"SpecialToken": {"id": tokens[bos], "type_id": type_id}}
        yield {"Sequence": {"id": name, "type_id": type_id}}
        if eos is not None:
            yield {"SpecialToken": {"id": tokens[eos], "type_id": type_id}}

    template = {
        "type": "TemplateProcessing",
        "single": list(surround("A", 0)),
        "pair": [*surround("A", 0), *surround("B", 1)],
        "special_tokens": {
            text: {"id": text, "ids": [token], "tokens": [text]} for token, text in around.items()
        },
    }
    return template if first is None else {"type": "Sequence", "processors": [first, template]}
