"""One completion, built from the engine's updates of its request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from attrs import evolve

from headstock.errors import PluginBroken
from headstock.outputs import CompletionOutput, TokenLogprob, ToolCall, Update
from headstock.sampling_params import SamplingParams
from headstock.text.answer import AnswerDivider, AnswerFormat, join_calls
from headstock.text.detokenizer import REPLACEMENT, Detokenizer
from headstock.text.logprobs import LogprobReader, LogprobTable, ReadTable
from headstock.text.stop import StopMatch, StopStringMatcher
from headstock.text.tokenizer import Tokenizer


class CompletionBuilder:
    """Turns each update of one request into a piece of its completion; after a piece with a finish
    reason there are none. With a format, the pieces are divided. The text is what the tokens add
    to that of the `prompt`.

    With log-probabilities, a token comes with the text that it adds. So one of a run of bytes waits
    for the run's end.

    joined: what pieces add up to, where somebody adds them
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer,
        answer_format: AnswerFormat | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.index = index
        self.params = params
        self.divider = None if answer_format is None else AnswerDivider(answer_format)
        self.detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=frozenset()
            if answer_format is None
            else tokenizer.find_ids(answer_format.special_tokens),
            prompt=prompt,
        )
        self.reader = None if params.logprobs is None else LogprobReader(self.detokenizer)
        self.matcher = StopStringMatcher(
            params.stop,
            include=params.include_stop_str_in_output,
            special_tokens={
                text: token
                for text, token in tokenizer.find_special_tokens(params.stop).items()
                if token in self.detokenizer.skipped_ids
            },
        )
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
        if self.matcher.stops or self.reader is not None:
            text, num_tokens, stop = self._detokenize_each(update)
        else:
            text, num_tokens, stop = self._detokenize(update), len(update.tokens), None
        tables = None if self.reader is None else self.reader.take_tables()
        finish_reason = "stop" if stop is not None else update.finish_reason
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(update.tokens[:num_tokens])
            if tables is None
            else [table.token for table in tables],
            logprobs=self.add_logprobs(update, num_tokens, tables),
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

    def _detokenize_each(self, update: Update) -> tuple[str, int, str | None]:
        """The text that may go out, the number of tokens that it is of, and the stop string that
        ended it, if one did.
        """
        # One token at a time: the completion ends with the token that completes a stop string,
        # `min_tokens` may pass in the middle of an update, and tables have the text of each token.
        pieces = []
        entries = (update.logprobs or ())[: len(update.tokens)]
        for position, (token, entry) in enumerate(zip_longest(update.tokens, entries), start=1):
            self.num_tokens += 1
            is_silent = (
                position == len(update.tokens)
                and update.stop_token is not None
                and not self.matcher.include
            )
            match = self._match_token(token, self._read(token, entry, is_silent=is_silent))
            pieces.append(match.text)
            if match.stop is not None:
                self._flush()
                return "".join(pieces), position, match.stop
        if update.finish_reason is None:
            return "".join(pieces), len(update.tokens), None
        # What the detokenizer held back may complete a stop string yet.
        match = self.matcher.add_text(self._flush(), can_stop=self.can_stop)
        text = "".join([*pieces, match.text, self.matcher.flush()])
        return text, len(update.tokens), match.stop

    def _read(self, token: int, entry: TokenLogprob | None, *, is_silent: bool) -> str:
        """The text that `token` makes certain."""
        if self.reader is not None:
            return self.reader.add_token(token, entry, is_silent=is_silent)
        return "" if is_silent else self.detokenizer.add_token(token)

    def _flush(self) -> str:
        """The rest of the text."""
        return self.detokenizer.flush() if self.reader is None else self.reader.flush()

    def _match_token(self, token: int, piece: str) -> StopMatch:
        """The text that may go out after `token`, which made `piece` certain."""
        if token not in self.matcher.marks:
            return self.matcher.add_text(piece, can_stop=self.can_stop)
        # The token ends a run of bytes where it is shown; an unfinished character has no text yet.
        rest = self.detokenizer.peek()
        return self.matcher.add_special_token(
            token, "" if REPLACEMENT in rest else rest, can_stop=self.can_stop
        )

    @property
    def can_stop(self) -> bool:
        """Whether a stop string may end the completion now."""
        return self.num_tokens > self.params.min_tokens

    def _stop_token_id(self, update: Update) -> int | None:
        """The id among `stop_token_ids` that ended the completion; None for an end-of-sequence
        token, as in vLLM.
        """
        return update.stop_token if update.stop_token in self.params.stop_token_ids else None

    def add_logprobs(
        self, update: Update, num_tokens: int, tables: Iterable[ReadTable] | None
    ) -> list[LogprobTable] | None:
        """The tables that are certain; the update's first `num_tokens` tokens count towards the
        cumulative log-probability. None when they were not requested.
        """
        if self.cumulative_logprob is None:
            return None
        entries = (update.logprobs or ())[:num_tokens]
        self.cumulative_logprob += sum(entry.logprob for entry in entries)
        return [each.table for each in tables or () if each.table is not None]


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
