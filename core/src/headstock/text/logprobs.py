"""Tables of log-probabilities, with the text that each token adds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from attrs import define, frozen

from headstock.outputs import Logprob, TokenLogprob
from headstock.text.detokenizer import Detokenizer
from headstock.text.tokenizer import Tokenizer

LogprobTable = dict[int, Logprob]
"""The candidates of one position by token id: the token that stands there, then the likeliest."""


@define(eq=False)
class _ReadToken:
    """A token with what was found before it counted.

    top: the texts of the likeliest tokens, in the order of the entry
    text: as far as it is known
    is_open: whether it is a byte in a run that goes on
    """

    token: int
    entry: TokenLogprob | None
    top: list[str]
    text: str = ""
    is_open: bool = False
    is_left_out: bool = False


@frozen(eq=False)
class ReadTable:
    """A token whose text is certain, and its table; None where it has no entry."""

    token: int
    text: str
    table: LogprobTable | None


class LogprobReader:
    """Detokenizes token by token, and makes the table of each. The texts of the tokens, joined, are
    the text, but for tokens that are left out of it: those have their own.

    Parts of a character have no text but the last one, which has the character. A run of bytes has
    its text when it ends, so its tokens wait until then.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.waiting: list[_ReadToken] = []

    def add_token(self, token: int, entry: TokenLogprob | None, *, is_silent: bool = False) -> str:
        """The text that `token` makes certain; a silent one is left out of it."""
        detokenizer, tokenizer = self.detokenizer, self.detokenizer.tokenizer
        top: list[str] = []
        if entry is not None and entry.top:
            top = detokenizer.list_additions([each for each, _ in entry.top])
        read = _ReadToken(token, entry, top)
        if is_silent or token in detokenizer.skipped_ids or not tokenizer.has_token(token):
            (read.text,) = detokenizer.list_additions([token])
            read.is_left_out = True
            self.waiting.append(read)
            return ""
        read.is_open = token in tokenizer.byte_ids
        run = "" if read.is_open else self._end_run()
        text = detokenizer.add_token(token)
        read.text = text[len(run) :]
        self.waiting.append(read)
        return text

    def flush(self) -> str:
        """The rest of the text, when no token follows."""
        run = self._end_run()
        text = self.detokenizer.flush()
        shown = [read for read in self.waiting if not read.is_left_out]
        if shown:
            shown[-1].text += text[len(run) :]
        return text

    def take_tables(self) -> list[ReadTable]:
        """The tables of the tokens whose texts are certain and that were not taken yet."""
        count = next((at for at, read in enumerate(self.waiting) if read.is_open), None)
        certain, self.waiting = self.waiting[:count], [] if count is None else self.waiting[count:]
        return [ReadTable(read.token, read.text, _make_table(read)) for read in certain]

    def _end_run(self) -> str:
        """Give the bytes of a run that ends their shares of its text; return that, empty where
        there is no run.

        A byte that ends a character has it; in a run that is not UTF-8 each byte has one U+FFFD.
        """
        own = [read for read in self.waiting if read.is_open]
        if not own:
            return ""
        text = self.detokenizer.peek()
        # The run may have begun in the prompt, and its first space may be cut: so counted from its
        # end.
        values = self.detokenizer.tokenizer.byte_values
        run = [*takewhile(values.__contains__, reversed(self.detokenizer.window))][::-1]
        ends = _count_ended(bytes(values[token] for token in run))[-len(own) :]
        start = 0
        for read, count in zip(own, ends, strict=True):
            end = max(start, len(text) - (ends[-1] - count))
            read.text, start, read.is_open = text[start:end], end, False
        return text


def _count_ended(run: bytes) -> list[int]:
    """How many characters of the run's text have ended after each byte."""
    try:
        text = run.decode()
    except UnicodeDecodeError:
        return list(range(1, len(run) + 1))
    ended: list[int] = []
    for count, character in enumerate(text):
        ended += [count] * (len(character.encode()) - 1) + [count + 1]
    return ended


def _make_table(read: _ReadToken) -> LogprobTable | None:
    """The token that stands there, then the likeliest ones by rank."""
    entry = read.entry
    if entry is None:
        return None
    # In this order, and with the rank among the likeliest where it is one, as in vLLM.
    table = {entry.token: Logprob(entry.logprob, entry.rank, read.text)}
    for rank, ((token, logprob), text) in enumerate(zip(entry.top, read.top, strict=True), start=1):
        shown = read.text if token == entry.token else text
        table[token] = Logprob(logprob, rank, shown)
    return table


def read_tokens(
    tokens: Sequence[int],
    entries: Iterable[TokenLogprob | None],
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool,
) -> list[ReadTable]:
    """The tables of all tokens of a text, from its first one on."""
    reader = LogprobReader(Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens))
    for token, entry in zip(tokens, entries, strict=True):
        reader.add_token(token, entry)
    reader.flush()
    return reader.take_tables()
