"""The chat that `headstock run` begins on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headstock.cli.answers import format_footer
from headstock.cli.notes import print_note
from headstock.cli.tables import fold_line, terminal_width
from headstock.cli.turns import LineDropped
from headstock.errors import RequestError, format_count
from headstock.outputs import RequestOutput
from headstock.sampling_params import SamplingParams
from headstock.text.conversation import Conversation
from headstock.text.prompt import Prompt

if TYPE_CHECKING:
    from headstock.requests.session import EngineSession

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

ROOM_SHARE = 4
"""The part of the context that older turns leave to an answer: a quarter."""

COMMANDS = ("/reset", "/system", "/stats", "/save", "/exit", "/quit", "/help")

HELP_INDENT = 14
"""Characters before what a line of HELP says of a command."""

HELP = """/reset        clear the conversation
/system TEXT  start over with TEXT as the system message; without TEXT, with none
/stats        tokens and times of the last answer and of the whole chat
/save FILE    write the conversation to a new file, as JSON
/exit         leave (so do Ctrl-D, and Ctrl-C twice on an empty line)
Enter sends, Alt-Enter begins a new line, and a pasted text is one turn.
Ctrl-C stops an answer, and drops the line at the prompt."""


def run_chat(
    session: EngineSession,
    params: SamplingParams,
    system: str | None,
    read: Callable[[], str],
    options: Mapping[str, Any] = NO_OPTIONS,
) -> int:
    """Answer turns until the user leaves; the exit code.

    `read` returns a turn, or raises EOFError or LineDropped. `options` are those of conversations.
    raises: UsageError without a chat template
    """
    # A model without a chat template is refused here, before the user has typed a turn.
    hello = Conversation(messages=[{"role": "user", "content": "hello"}], **options)
    session.input_processor.render_chat(hello)
    print_note("/help lists the commands; /exit leaves")
    chat = Chat(session, params, system, options)
    has_dropped = False
    while True:
        try:
            turn = read().strip()
        except EOFError:
            return chat.leave()
        except LineDropped as dropped:
            if has_dropped and dropped.is_empty:
                return chat.leave()
            print_note("Ctrl-C again leaves, as do Ctrl-D and /exit")
            has_dropped = True
            continue
        has_dropped = False
        if _is_command(turn):
            if not chat.run_command(turn):
                return 0
        elif turn:
            chat.answer_turn(turn)


def _is_command(turn: str) -> bool:
    """Whether a turn is for the chat and not for the model.

    Text of several lines that only begins with a slash, such as a pasted path, is for the model.
    """
    return turn.startswith("/") and ("\n" not in turn or turn.split()[0] in COMMANDS)


def _print_help() -> None:
    """Print the commands on standard error, folded to a terminal's width."""
    width = terminal_width(sys.stderr)
    for line in HELP.splitlines():
        print(fold_line(line, width, HELP_INDENT if line.startswith("/") else 0), file=sys.stderr)


class Chat:
    """A conversation, and how many answers and tokens it has had."""

    def __init__(
        self,
        session: EngineSession,
        params: SamplingParams,
        system: str | None,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> None:
        self.session = session
        self.options = options
        self.params = params
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.num_left_out = 0  # of the oldest turns, which the context no longer holds
        self.tokens = 0
        self.answers = 0
        self.last = "no answer yet"

    def list_messages(self, start: int = 0) -> list[dict[str, str]]:
        """The turns from `start` on, after the system message if there is one."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns[start:]]

    def leave(self) -> int:
        """Print that the chat has ended; its exit code."""
        print_note(f"chat ended: {self.summary}")
        return 0

    @property
    def summary(self) -> str:
        """How many answers and tokens the chat has had."""
        return f"{format_count(self.answers, 'answer')}, {format_count(self.tokens, 'token')}"

    def answer_turn(self, text: str) -> None:
        """Print the answer to `text` as it comes and remember both, unless the turn fails."""
        self.turns.append({"role": "user", "content": text})
        try:
            answer = self.stream_answer()
        except RequestError as error:
            # A turn that is refused, as one that is too long, would have every later one refused
            # too.
            self.turns.pop()
            print_note(f"headstock: {error}; /reset starts over")
        except KeyboardInterrupt:
            # Ctrl-C came before the answer began, or a second time while it was being stopped.
            self.turns.pop()
            print_note("stopped; the turn is dropped")
        else:
            self.turns.append({"role": "assistant", "content": answer})

    def stream_answer(self) -> str:
        """Print and return the answer, or as much of it as came before Ctrl-C.

        raises: RequestError, EngineDied
        """
        pieces: list[RequestOutput] = []
        stream = self.session.stream(self.fit_context(), self.params)
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece.outputs[0].text, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        finally:
            print(flush=True)
        if pieces and pieces[-1].outputs[0].error is not None:
            raise RequestError(pieces[-1].outputs[0].error)
        self.count_answer(pieces)
        if pieces and pieces[-1].outputs[0].finish_reason == "length":
            self.note_cut(pieces[-1])
        return "".join(piece.outputs[0].text for piece in pieces).strip()

    def fit_context(self) -> Prompt:
        """The prompt of the latest turns that leave room for an answer; says if it leaves some out.

        raises: RequestError when the last turn alone does not fit
        """
        most = self.session.engine.max_seq_len
        room = min(self.params.max_tokens or most, most // ROOM_SHARE)
        start = self.num_left_out
        while True:
            # An answer goes with its question: templates want a user's turn first.
            is_last = start + 2 >= len(self.turns)
            conversation = Conversation(messages=self.list_messages(start), **self.options)
            try:
                prompt = self.session.input_processor.render_chat(conversation)
            except RequestError:  # far longer than the context
                if is_last:
                    raise
            else:
                if len(prompt.tokens) + room <= most or is_last:
                    break
            start += 2
        if start > self.num_left_out and len(prompt.tokens) < most:
            self.num_left_out = start
            print_note(
                f"the context of {format_count(most, 'token')} is full: the model no longer sees "
                f"the {format_count(start, 'oldest turn')}; /reset starts over"
            )
        return prompt

    def note_cut(self, output: RequestOutput) -> None:
        """Print why an answer was cut."""
        if output.max_tokens == self.params.max_tokens:
            print_note(f"the answer was cut after {output.max_tokens} tokens (--max-tokens)")
        else:
            most = format_count(self.session.engine.max_seq_len, "token")
            print_note(f"the answer was cut: it fills the context of {most}")

    def count_answer(self, pieces: list[RequestOutput]) -> None:
        """Add an answer to the statistics."""
        tokens = sum(len(piece.outputs[0].token_ids) for piece in pieces)
        self.tokens += tokens
        self.answers += 1
        if pieces:
            self.last = format_footer(pieces[-1], tokens)

    def run_command(self, line: str) -> bool:
        """Carry out a line that begins with a slash; False when the chat ends."""
        word, _, rest = line.partition(" ")
        match word:
            case "/exit" | "/quit":
                return False
            case "/help":
                _print_help()
            case "/reset":  # the system message stays
                self.clear()
                print_note("conversation cleared")
            case "/system":
                self.system = rest.strip() or None
                self.clear()
                print_note("started over" + ("" if self.system else ", without a system message"))
            case "/stats":
                print_note(f"last answer: {self.last}")
                print_note(f"chat: {self.summary}")
            case "/save":
                self.save_conversation(rest.strip())
            case _:
                print_note(f"no command {word}; /help lists them")
        return True

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()
        self.num_left_out = 0

    def save_conversation(self, path: str) -> None:
        """Write the conversation to a new file, and print whether that worked."""
        if not path:
            print_note("/save needs the name of a file")
            return
        try:
            # "x": a slip of the name must not cost an earlier conversation, nor any other file.
            with open(path, "x", encoding="utf-8") as file:
                json.dump({"messages": self.list_messages()}, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except FileExistsError:
            print_note(f"{path} exists; choose another name")
        except (OSError, ValueError) as error:
            print_note(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")
        else:
            print_note(f"saved {format_count(len(self.turns), 'turn')} to {path}")
