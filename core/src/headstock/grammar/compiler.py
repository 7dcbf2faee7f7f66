"""Compiles grammars of requests: each new one is tried in a process that may be killed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from headstock.errors import HeadstockError, RequestError, describe_error, shorten
from headstock.spi import CompiledGrammar, GrammarEngine, GrammarKind
from headstock.structured_outputs import PARAMETER, StructuredOutputsParams

MAX_CACHED = 256
"""Compiled grammars that are kept, the latest used ones."""
MAX_REFUSED = 64
"""Refused grammars that are remembered, the latest ones."""
MAX_CACHED_BYTES = 16 << 20
"""Bytes that the texts of all kept grammars may have: what is compiled grows with them."""


class Trial(Protocol):
    """Tries grammars where a crash or a hang does no harm."""

    def check(self, kind: GrammarKind, text: str) -> None:
        """Compile a grammar and throw it away.

        raises: ValueError with what is wrong; PluginBroken
        """

    def close(self) -> None:
        """End what was started."""


class GrammarCompiler:
    """Compiled grammars by their texts. Any thread may call `compile`.

    name: of the plugin, for errors
    make_engine: makes the plugin's engine, at the first grammar
    """

    def __init__(self, name: str, make_engine: Callable[[], GrammarEngine], trial: Trial) -> None:
        self.name = name
        self.make_engine = make_engine
        self.trial = trial
        self.lock = threading.Lock()
        self.has_ended = threading.Condition(self.lock)
        # What some thread compiles now: many requests may bring one new grammar at once.
        self.compiling: set[tuple[GrammarKind, str]] = set()
        self.engine_lock = threading.Lock()
        self.made_engine: GrammarEngine | None = None
        self.compiled: OrderedDict[tuple[GrammarKind, str], CompiledGrammar] = OrderedDict()
        self.refused: OrderedDict[tuple[GrammarKind, str], str] = OrderedDict()
        self.num_bytes = 0

    @property
    def engine(self) -> GrammarEngine:
        """The plugin's engine.   raises: PluginBroken, CannotRun"""
        # A vocabulary of 150,000 tokens takes half a second, which only those pay who need it.
        with self.engine_lock:
            if self.made_engine is None:
                self.made_engine = self.make_engine()
            return self.made_engine

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile the grammar of an answer, or return what was compiled of the same one before.

        raises: RequestError with what is wrong or not supported
        """
        kind, text = params.kind, params.text
        with self.has_ended:
            self.has_ended.wait_for(lambda: (kind, text) not in self.compiling)
            if (kind, text) in self.compiled:
                self.compiled.move_to_end((kind, text))
                return self.compiled[kind, text]
            refusal = self.refused.get((kind, text))
            if refusal is not None:
                raise RequestError(refusal, PARAMETER)
            self.compiling.add((kind, text))
        try:
            return self._compile(kind, text)
        finally:
            with self.has_ended:
                self.compiling.discard((kind, text))
                self.has_ended.notify_all()

    def _compile(self, kind: GrammarKind, text: str) -> CompiledGrammar:
        """Try a new grammar, compile and keep it.   raises: RequestError"""
        try:
            self.trial.check(kind, text)
            compiled = self.engine.compile(kind, text)
            compiled.start()
        except ValueError as error:
            refusal = (
                f"{PARAMETER}: {describe_kind(kind)} cannot be served by {self.name}: "
                f"{shorten(error, 300)}"
            )
            with self.lock:
                self._note_refusal(kind, text, refusal)
            raise RequestError(refusal, PARAMETER) from error
        # A plugin that is broken costs those alone who ask for it.
        except HeadstockError as error:
            raise RequestError(f"{PARAMETER}: {error}", PARAMETER) from error
        except (Exception, SystemExit) as error:
            raise RequestError(
                f"{PARAMETER}: the grammar plugin {self.name!r} raised {describe_error(error)}; "
                "report it to its author",
                PARAMETER,
            ) from error
        with self.lock:
            self._keep(kind, text, compiled)
        return compiled

    def has_compiled(self, params: StructuredOutputsParams) -> bool:
        """Whether the grammar is compiled, or was refused before."""
        with self.lock:
            key = (params.kind, params.text)
            return key in self.compiled or key in self.refused

    def _note_refusal(self, kind: GrammarKind, text: str, refusal: str) -> None:
        """Remember a refusal: compiled again, it would take the time of other requests again."""
        self.refused[kind, text] = refusal
        while len(self.refused) > MAX_REFUSED or sum(map(_count, self.refused)) > MAX_CACHED_BYTES:
            self.refused.popitem(last=False)

    def _keep(self, kind: GrammarKind, text: str, compiled: CompiledGrammar) -> None:
        """Keep a compiled grammar, and no more than the limits allow."""
        if (kind, text) not in self.compiled:
            self.num_bytes += len(text)
        self.compiled[kind, text] = compiled
        while len(self.compiled) > MAX_CACHED or self.num_bytes > MAX_CACHED_BYTES:
            (_, dropped), _ = self.compiled.popitem(last=False)
            self.num_bytes -= len(dropped)

    def close(self) -> None:
        """End the process of trials."""
        self.trial.close()


def describe_kind(kind: GrammarKind) -> str:
    """What errors call a grammar of this kind."""
    return "strict tools" if kind is GrammarKind.TEXT_OR_CALLS else f"this {kind.value}"


def _count(key: tuple[GrammarKind, str]) -> int:
    """The characters of a grammar."""
    return len(key[1])
