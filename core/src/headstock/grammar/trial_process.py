"""The process in which grammars are tried: `python -m headstock.grammar.trial_process`.

It reads lines of JSON from its standard input and answers each with a line. The first one names
plugin and vocabulary, each of the others has a grammar. It ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from headstock import registry
from headstock.errors import HeadstockError, describe_error, shorten
from headstock.spi import GrammarEngine, GrammarKind, GrammarSpec, Vocabulary


def main() -> None:
    """Answer until the input ends."""
    # Ctrl-C reaches the whole group; it is the program that decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):  # no such thing on this system
        os.nice(10)  # a step of the engine goes before a grammar that takes its time
    answers = sys.stdout
    # What a library prints is no answer.
    with contextlib.redirect_stdout(sys.stderr):
        start = json.loads(sys.stdin.readline())
        try:
            engine = make_engine(start)
        except HeadstockError as error:
            _answer(answers, {"broken": str(error)})
            return
        except Exception as error:
            _answer(answers, {"broken": describe_error(error)})
            return
        _limit_memory(start["bytes"])
        _answer(answers, {})
        for line in sys.stdin:
            _answer(answers, try_grammar(engine, json.loads(line)))


def make_engine(start: Mapping[str, Any]) -> GrammarEngine:
    """Make the plugin's engine.   raises: HeadstockError, ValueError"""
    spec: GrammarSpec = registry.load_spec("grammar", start["plugin"])
    options = () if spec.options is None else (registry.make_options(spec, start["options"]),)
    values = start["vocabulary"]
    vocabulary = Vocabulary(**{**values, "end_ids": tuple(values["end_ids"])})
    engine: GrammarEngine = registry.make_part(spec, GrammarEngine, vocabulary, *options)
    return engine


def try_grammar(engine: GrammarEngine, question: Mapping[str, str]) -> dict[str, str]:
    """Compile a grammar and start an answer; what is wrong with it, or nothing."""
    try:
        engine.compile(GrammarKind(question["kind"]), question["text"]).start()
    except ValueError as error:
        return {"error": shorten(error, 400)}
    except MemoryError:
        return {"error": "it takes too much memory to compile; make it simpler"}
    except (Exception, SystemExit) as error:
        return {"broken": describe_error(error)}
    return {}


def _limit_memory(count: int) -> None:
    """Let the process grow by so many bytes at most, where the system can."""
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (size + count, size + count))


def _answer(answers: Any, answer: Mapping[str, str]) -> None:
    """Write an answer."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
