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

import numpy as np

from headstock import registry
from headstock.errors import HeadstockError, describe_error, shorten
from headstock.spi import GrammarEngine, GrammarKind, GrammarSpec, Matcher, Vocabulary

NUM_ANSWERS = 2
NUM_TOKENS = 16
"""Answers of a grammar that are begun, and tokens of each."""


def main() -> None:
    """Answer until the input ends."""
    # Ctrl-C reaches the whole group; it is the program that decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):  # no such thing on this system
        os.nice(10)  # a step of the engine goes before a grammar that takes its time
    answers = sys.stdout
    # Output printed by a library is not an answer.
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
        vocabulary = _read_vocabulary(start)
        for line in sys.stdin:
            _answer(answers, try_grammar(engine, vocabulary, json.loads(line)))


def make_engine(start: Mapping[str, Any]) -> GrammarEngine:
    """Make the plugin's engine.   raises: HeadstockError, ValueError"""
    spec: GrammarSpec = registry.load_spec("grammar", start["plugin"])
    options = () if spec.options is None else (registry.make_options(spec, start["options"]),)
    engine: GrammarEngine = registry.make_part(
        spec, GrammarEngine, _read_vocabulary(start), *options
    )
    return engine


def _read_vocabulary(start: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that the first line names."""
    values = start["vocabulary"]
    return Vocabulary(**{**values, "end_ids": tuple(values["end_ids"])})


def try_grammar(
    engine: GrammarEngine, vocabulary: Vocabulary, question: Mapping[str, str]
) -> dict[str, str]:
    """Compile a grammar and follow answers; what is wrong with it, or nothing."""
    try:
        compiled = engine.compile(GrammarKind(question["kind"]), question["text"])
        for seed in range(NUM_ANSWERS):
            follow_answer(compiled.start(), vocabulary, seed)
    except ValueError as error:
        return {"error": shorten(error, 400)}
    except MemoryError:
        return {"error": "it takes too much memory to compile; make it simpler"}
    except (Exception, SystemExit) as error:
        return {"broken": describe_error(error)}
    return {}


def follow_answer(matcher: Matcher, vocabulary: Vocabulary, seed: int) -> None:
    """Follow the beginning of an answer, of tokens drawn from those that are allowed.

    raises: ValueError when no answer can begin, or when it cannot be followed any further
    """
    # Many a limit is reached at the first tokens alone: a rule that has no end is compiled in no
    # time, and so are rows of thousands of rules.
    draws = np.random.default_rng(seed)
    mask = np.zeros((vocabulary.size + 31) // 32, np.int32)
    for count in range(NUM_TOKENS):
        mask.fill(0)
        may_end = matcher.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocabulary.size]
        bits[[token for token in vocabulary.end_ids if 0 <= token < vocabulary.size]] = 0
        allowed = bits.nonzero()[0]
        if not (len(allowed) or may_end or count):
            raise ValueError("no token may begin the answer, and it may not be empty")
        # Later ones may come to no end by themselves: a vocabulary may lack the bytes of a letter.
        if not len(allowed) or not matcher.advance(draws.choice(allowed, 1).astype(np.int32)):
            return


def _limit_memory(count: int) -> None:
    """Limit the growth of the process to this many bytes, if the system can."""
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
