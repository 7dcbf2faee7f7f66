"""One completion, built from the engine's updates of its request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve

from headstock.errors import PluginBroken
from headstock.outputs import CompletionOutput, Logprob, TokenLogprob, ToolCall, Update
from headstock.sampling_params import SamplingParams
from headstock.text.answer import AnswerDivider, AnswerFormat, join_calls
from headstock.text.detokenizer import Detokenizer
from headstock.text.stop import StopStringMatcher
from headstock.text.tokenizer import Tokenizer

LogprobTable = dict[int, Logprob]
"""The candidates of one position, by token id."""


class CompletionBuilder:
    """Turns each update of one request into a piece of its completion; after a piece with a finish
    reason there are none. With a format, the pieces are divided.

    joined: what pieces add up to, where somebody adds them
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat | None = None,
    ) -> None:
        self.index = index
        self.params = params
        self.tokenizer = tokenizer
        self.divider = None if answer_format is None else AnswerDivider(answer_format)
        self.detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=frozenset()
            if answer_format is None
            else tokenizer.find_ids(answer_format.special_tokens),
        )
        self.matcher = StopStringMatcher(params.stop, include=params.include_stop_str_in_output)
        self.joined = JoinedPieces()
        self.num_tokens = 0  # counted where stop strings may end the completion
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        # Until its end, a piece is new text and tokens alone.
        self.is_plain = not params.stop and params.logprobs is None and answer_format is None
        self.is_finished = False

    def apply_update(self, update: Update) -> CompletionOutput:
        """The piece that `update` adds; a stop string may finish it before the engine does."""
        if update.finish_reason is None and self.is_plain:  # as most are
            text = self.detokenizer.add_tokens(update.tokens)
            return CompletionOutput(index=self.index, text=text, token_ids=[*update.tokens])
        if self.matcher.stops:
            text, num_tokens, stop = self._detokenize_until_stop(update)
        else:
            text, num_tokens, stop = self._detokenize(update), len(update.tokens), None
        finish_reason = "stop" if stop is not None else update.finish_reason
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(update.tokens[:num_tokens]),
            logprobs=None
            if self.cumulative_logprob is None
            else self.add_logprobs(update, num_tokens),
            cumulative_logprob=self.cumulative_logprob,
            finish_reason=finish_reason,
            stop_reason=self._stop_token_id(update) if stop is None else stop,
            error=update.error,
        )
        if self.divider is not None:
            output = self._divide(output, self.divider)
        self.is_finished = output.finish_reason is not None
        return output

    def _divide(self, output: CompletionOutput, divider: AnswerDivider) -> CompletionOutput:
        """The piece with its text divided; a call that must be the last one ends it."""
        finish_reason = output.finish_reason
        try:
            parts = divider.add_text(output.text, is_last=finish_reason is not None)
        except PluginBroken as error:
            return evolve(output, text="", finish_reason="error", error=str(error))
        # A call that is the last one ends an answer that would go on.
        reasons = (None, "stop", "length") if divider.is_ended else ("stop",)
        if divider.num_ended and finish_reason in reasons:
            finish_reason = "tool_calls"
        return evolve(
            output,
            text=parts.content,
            reasoning=parts.reasoning or None,
            tool_calls=parts.tool_calls,
            finish_reason=finish_reason,
        )

    def _detokenize(self, update: Update) -> str:
        """The text that `update` makes certain, where no stop string can end it."""
        # All tokens of an update are decoded at once: a request whose tokens are not streamed gets
        # thousands in its last update.
        count = len(update.tokens)
        is_silent = count > 0 and update.stop_token is not None and not self.matcher.include
        tokens = update.tokens[: count - is_silent]
        if update.finish_reason is not None:
            return self.detokenizer.add_last_tokens(tokens)
        return self.detokenizer.add_tokens(tokens)

    def _detokenize_until_stop(self, update: Update) -> tuple[str, int, str | None]:
        """The text that may go out, the number of tokens that it is of, and the stop string that
        ended it, if one did.
        """
        # One token at a time: the completion ends with the token that completes a stop string, and
        # `min_tokens` may pass in the middle of an update.
        pieces = []
        for position, token in enumerate(update.tokens, start=1):
            self.num_tokens += 1
            is_silent = (
                position == len(update.tokens)
                and update.stop_token is not None
                and not self.matcher.include
            )
            match = self.matcher.add_text(
                "" if is_silent else self.detokenizer.add_token(token), can_stop=self.can_stop
            )
            pieces.append(match.text)
            if match.stop is not None:
                return "".join(pieces), position, match.stop
        if update.finish_reason is None:
            return "".join(pieces), len(update.tokens), None
        # What the detokenizer held back may complete a stop string yet.
        match = self.matcher.add_text(self.detokenizer.flush(), can_stop=self.can_stop)
        text = "".join([*pieces, match.text, self.matcher.flush()])
        return text, len(update.tokens), match.stop

    @property
    def can_stop(self) -> bool:
        """Whether a stop string may end the completion now."""
        return self.num_tokens > self.params.min_tokens

    def _stop_token_id(self, update: Update) -> int | None:
        """The id among `stop_token_ids` that ended the completion; None for an end-of-sequence
        token, as in vLLM.
        """
        return update.stop_token if update.stop_token in self.params.stop_token_ids else None

    def add_logprobs(self, update: Update, num_tokens: int) -> list[LogprobTable] | None:
        """A table for each of the update's first `num_tokens` tokens, which also count towards the
        cumulative log-probability; None when they were not requested.
        """
        if self.cumulative_logprob is None:
            return None
        entries = (update.logprobs or ())[:num_tokens]
        self.cumulative_logprob += sum(entry.logprob for entry in entries)
        return [make_logprob_table(entry, self.tokenizer) for entry in entries]


def make_logprob_table(entry: TokenLogprob, tokenizer: Tokenizer) -> LogprobTable:
    """The likeliest tokens of one position, and the token that stands there."""
    table = {
        token: Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False))
        for rank, (token, logprob) in enumerate(entry.top, start=1)
    }
    if entry.token not in table:
        text = tokenizer.decode([entry.token], skip_special_tokens=False)
        table[entry.token] = Logprob(entry.logprob, None, text)
    return table


def make_prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, tokenizer: Tokenizer
) -> list[LogprobTable | None] | None:
    """A table for each prompt position but the first, which nothing predicts; None for None."""
    if entries is None:
        return None
    return [None if entry is None else make_logprob_table(entry, tokenizer) for entry in entries]


class JoinedPieces:
    """What the pieces of one completion add up to."""

    # Texts and numbers and not the pieces: those are objects that the garbage collector visits. Of
    # 256 streams with 60 tokens each it took a quarter of their callers' time on a CPU.
    def __init__(self) -> None:
        self.last: CompletionOutput | None = None
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[LogprobTable] = []
        self.calls: list[ToolCall] = []

    def add(self, piece: CompletionOutput) -> None:
        """Add the next piece."""
        self.last = piece
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        if piece.logprobs:
            self.logprobs += piece.logprobs
        if piece.reasoning:
            self.reasoning.append(piece.reasoning)
        if piece.tool_calls:
            self.calls += piece.tool_calls

    def join(self) -> CompletionOutput:
        """The whole of them, at least one."""
        last = self.last
        assert last is not None, "internal error: a completion without a piece"
        return CompletionOutput(
            index=last.index,
            text="".join(self.texts),
            token_ids=list(self.token_ids),
            cumulative_logprob=last.cumulative_logprob,
            logprobs=None if last.logprobs is None else list(self.logprobs),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            error=last.error,
            reasoning="".join(self.reasoning) or None,
            tool_calls=join_calls(self.calls),
        )


def join_pieces(pieces: Iterable[CompletionOutput]) -> CompletionOutput:
    """The whole completion that `pieces`, at least one, add up to."""
    joined = JoinedPieces()
    for piece in pieces:
        joined.add(piece)
    return joined.join()
