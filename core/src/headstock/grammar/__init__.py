"""Structured output: grammars compiled in safety, and the matchers of running requests."""

from headstock.grammar.compiler import GrammarCompiler
from headstock.grammar.rows import GrammarRows

__all__ = ["GrammarCompiler", "GrammarRows"]
