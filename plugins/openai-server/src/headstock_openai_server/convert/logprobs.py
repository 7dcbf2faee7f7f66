"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headstock import Logprob
from headstock.text import Detokenizer, Tokenizer
from headstock_openai_server.api.answers import (
    LEAST_LOGPROB,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprobs,
    TopLogprob,
)

LogprobTable = dict[int, Logprob]

REPLACEMENT = "\ufffd"
"""A tokenizer's output for an incomplete character."""


def make_chat_logprobs(
    tokens: Sequence[int], tables: Iterable[LogprobTable], most: int, *, as_ids: bool = False
) -> ChatLogprobs:
    """The form of chats: each token with its `most` likeliest alternatives.

    as_ids: tokens are named by their ids, instead of their texts
    """
    return ChatLogprobs(
        content=[
            TokenLogprobs(
                token=name_token(token, table[token].decoded_token, as_ids=as_ids),
                logprob=clamp(table[token].logprob),
                bytes=list_bytes(table[token].decoded_token),
                top_logprobs=[
                    TopLogprob(
                        token=name_token(each, entry.decoded_token, as_ids=as_ids),
                        logprob=clamp(entry.logprob),
                        bytes=list_bytes(entry.decoded_token),
                    )
                    for each, entry in list_top(table, most)
                ],
            )
            for token, table in zip(tokens, tables, strict=True)
        ]
    )


def make_prompt_logprobs(
    tokens: Sequence[int], tables: Sequence[LogprobTable | None], most: int
) -> PromptLogprobs:
    """vLLM's form for prompts: each position's own token and the `most` likeliest ones, by id."""
    return [
        None
        if table is None
        else {
            str(each): PromptLogprob(
                logprob=clamp(entry.logprob), rank=entry.rank, decoded_token=entry.decoded_token
            )
            for each, entry in table.items()
            if each == token or (entry.rank is not None and entry.rank <= most)
        }
        for token, table in zip(tokens, tables, strict=True)
    ]


def list_top(table: LogprobTable, most: int) -> Iterator[tuple[int, Logprob]]:
    """The `most` likeliest tokens of a position, best first."""
    ranked = [
        (token, entry)
        for token, entry in table.items()
        if entry.rank is not None and entry.rank <= most
    ]
    return iter(sorted(ranked, key=lambda pair: pair[1].rank or 0))


def name_token(token: int, text: str, *, as_ids: bool) -> str:
    """The text of a token, or its id as vLLM writes it: two tokens may have one text."""
    return f"token_id:{token}" if as_ids else text


def clamp(logprob: float) -> float:
    """The log-probability; minus infinity becomes a finite number."""
    return max(logprob, LEAST_LOGPROB)


def list_bytes(text: str) -> list[int] | None:
    """The bytes of a token's text; None for an incomplete character."""
    return None if REPLACEMENT in text else list(text.encode())


class CompletionLogprobWriter:
    """Writes the log-probabilities of one completion, piece by piece, with offsets in its text."""

    def __init__(
        self, tokenizer: Tokenizer, most: int, *, skip_special_tokens: bool, as_ids: bool = False
    ) -> None:
        # For the first token of a prompt, which has no table: it adds its text to nothing.
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self.most = most
        self.as_ids = as_ids
        self.offset = 0

    def write(
        self, tokens: Sequence[int], tables: Sequence[LogprobTable | None]
    ) -> CompletionLogprobs:
        """The form of completions; a position without a table, like a prompt's first, is null.

        A token in the middle of a character begins where the character does.
        """
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token, table in zip(tokens, tables, strict=True):
            if table is None:
                (text,) = self.detokenizer.list_additions([token])
                self._add_token(result, token, text)
                result.token_logprobs.append(None)
                result.top_logprobs.append(None)
                continue
            entry = table[token]
            self._add_token(result, token, entry.decoded_token)
            result.token_logprobs.append(clamp(entry.logprob))
            top: dict[str, float] = {}
            # Several tokens may have one text, such as incomplete characters: keep the likeliest.
            for each, other in (*list_top(table, self.most), (token, entry)):
                name = name_token(each, other.decoded_token, as_ids=self.as_ids)
                top.setdefault(name, clamp(other.logprob))
            result.top_logprobs.append(top)
        return result

    def _add_token(self, result: CompletionLogprobs, token: int, text: str) -> None:
        """Add a token and where its text begins."""
        result.tokens.append(name_token(token, text, as_ids=self.as_ids))
        result.text_offset.append(self.offset)
        if token not in self.detokenizer.skipped_ids:
            self.offset += len(text)
