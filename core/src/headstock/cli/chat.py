"""The chat that `headstock run` begins on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from headstock.cli.answers import footer, note
from headstock.errors import RequestError
from headstock.outputs import RequestOutput
from headstock.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headstock.llm import LLM

HELP = """/reset        forget what was said
/system TEXT  begin anew with TEXT as the system message; without TEXT, with none
/stats        tokens and times of the last answer and of the whole chat
/save FILE    write the conversation to a new file, as JSON
/exit         leave (so do Ctrl-D, and Ctrl-C at the prompt)
Ctrl-C stops an answer."""


def converse(llm: LLM, params: SamplingParams, system: str | None, read: Callable[[str], str] = input) -> int:
    """Talk until the user leaves; the exit code.   raises: UsageError without a chat template, KeyboardInterrupt"""
    llm.chat_prompt([{"role": "user", "content": "hello"}])
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` editing and a history, kept in memory

    note("/help lists the commands; /exit leaves")
    chat = Chat(llm, params, system)
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            print()
            return 0
        if line.startswith("/"):
            if not chat.command(line):
                return 0
        elif line:
            chat.say(line)


class Chat:
    """A conversation and what it cost."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.tokens = 0
        self.answers = 0
        self.last = "no answer yet"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation, with the system message if there is one."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def say(self, text: str) -> None:
        """Print the answer to `text` as it comes and remember both; a turn that fails is forgotten."""
        self.turns.append({"role": "user", "content": text})
        try:
            answer = self.answer()
        except RequestError as error:
            self.turns.pop()
            note(f"headstock: {error}; /reset begins anew")
            return
        self.turns.append({"role": "assistant", "content": answer})

    def answer(self) -> str:
        """The answer to the conversation, or as much of it as came before Ctrl-C.   raises: RequestError, EngineDied"""
        pieces: list[RequestOutput] = []
        stream = self.llm.stream(self.llm.chat_prompt(self.messages), self.params)
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
        self.count(pieces)
        return "".join(piece.outputs[0].text for piece in pieces).strip()

    def count(self, pieces: list[RequestOutput]) -> None:
        """Add an answer to the statistics."""
        tokens = sum(len(piece.outputs[0].token_ids) for piece in pieces)
        self.tokens += tokens
        self.answers += 1
        if pieces:
            self.last = footer(pieces[-1], tokens)

    def command(self, line: str) -> bool:
        """Do what a line beginning with a slash says; False when that is to leave."""
        word, _, rest = line.partition(" ")
        match word:
            case "/exit" | "/quit":
                return False
            case "/help":
                print(HELP, file=sys.stderr)
            case "/reset":
                self.turns.clear()
                note("forgotten")
            case "/system":
                self.system = rest.strip() or None
                self.turns.clear()
                note("begun anew" + ("" if self.system else ", without a system message"))
            case "/stats":
                note(f"last answer: {self.last}")
                note(f"chat: {self.answers} answers, {self.tokens} tokens")
            case "/save":
                self.save(rest.strip())
            case _:
                note(f"no command {word}; /help lists them")
        return True

    def save(self, path: str) -> None:
        """Write the conversation to a new file; say what came of it."""
        if not path:
            note("/save needs the name of a file")
            return
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump({"messages": self.messages}, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except FileExistsError:
            note(f"{path} exists; choose another name")
        except (OSError, ValueError) as error:
            note(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")
        else:
            note(f"saved {len(self.turns)} turns to {path}")
