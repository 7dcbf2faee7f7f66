"""One answer, put together from the engine's news of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headstock.outputs import CompletionOutput, Logprob
from headstock.sampling_params import SamplingParams
from headstock.text.detokenizer import Detokenizer
from headstock.text.stop import StopStrings
from headstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headstock.outputs import TokenLogprob, Update


class Answer:
    """Turns news of one request into pieces of its answer; after a piece with a finish reason there
    are none.
    """

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.params = params
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self.count = 0
        self.cumulative: float | None = None if params.logprobs is None else 0.0
        self.ended = False

    def absorb(self, update: Update) -> CompletionOutput:
        """What `update` adds; a stop string may end the answer before the engine knows of it."""
        text, taken, stop = self.read(update)
        reason = "stop" if stop is not None else update.finish_reason
        self.ended = reason is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=update.tokens[:taken],
            logprobs=self.logprobs(update, taken),
            cumulative_logprob=self.cumulative,
            finish_reason=reason,
            stop_reason=stop if stop is not None else self.stop_id(update),
            error=update.error,
        )

    def read(self, update: Update) -> tuple[str, int, str | None]:
        """The text that may go out, the tokens it took, and the stop string found."""
        if not self.stops.stops:
            return self.read_all(update)
        pieces = []
        for position, token in enumerate(update.tokens, start=1):
            self.count += 1
            silent = (
                position == len(update.tokens)
                and update.stop_token is not None
                and not self.stops.include
            )
            found = self.stops.feed(
                "" if silent else self.detokenizer.feed_one(token), armed=self.armed
            )
            pieces.append(found.text)
            if found.stop is not None:
                return "".join(pieces), position, found.stop
        if update.finish_reason is None:
            return "".join(pieces), len(update.tokens), None
        found = self.stops.feed(self.detokenizer.finish(), armed=self.armed)
        return "".join([*pieces, found.text, self.stops.finish()]), len(update.tokens), found.stop

    def read_all(self, update: Update) -> tuple[str, int, None]:
        """As `read`, where no stop string can end the answer: however many tokens there are, they
        are decoded once.
        """
        count = len(update.tokens)
        self.count += count
        silent = count > 0 and update.stop_token is not None and not self.stops.include
        text = self.detokenizer.feed(update.tokens[: count - silent])
        if update.finish_reason is not None:
            text += self.detokenizer.finish()
        return text, count, None

    @property
    def armed(self) -> bool:
        """Whether a stop string may end the answer now."""
        return self.count > self.params.min_tokens

    def stop_id(self, update: Update) -> int | None:
        """The id that ended the answer, if the user asked for it to."""
        return update.stop_token if update.stop_token in self.params.stop_token_ids else None

    def logprobs(self, update: Update, taken: int) -> tuple[dict[int, Logprob], ...] | None:
        """One mapping a token, None when they were not asked for."""
        if self.cumulative is None:
            return None
        entries = (update.logprobs or ())[:taken]
        self.cumulative += sum(entry.logprob for entry in entries)
        return tuple(table(entry, self.tokenizer) for entry in entries)


def table(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """The alternatives of one position and the token that stands there, by id."""
    entries = {
        token: Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False))
        for rank, (token, logprob) in enumerate(entry.top, start=1)
    }
    if entry.token not in entries:
        text = tokenizer.decode([entry.token], skip_special_tokens=False)
        entries[entry.token] = Logprob(entry.logprob, None, text)
    return entries


def prompt_table(
    entries: Sequence[TokenLogprob | None] | None, tokenizer: Tokenizer
) -> tuple[dict[int, Logprob] | None, ...] | None:
    """As `table`, of every prompt position; the first has none."""
    if entries is None:
        return None
    return tuple(None if entry is None else table(entry, tokenizer) for entry in entries)


def joined(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    """The whole answer that `pieces` (at least one) add up to."""
    last = pieces[-1]
    logprobs = (
        None
        if last.logprobs is None
        else tuple(entry for piece in pieces for entry in piece.logprobs or ())
    )
    return CompletionOutput(
        index=last.index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        cumulative_logprob=last.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
    )
