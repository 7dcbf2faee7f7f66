"""Structured output: grammars compiled in safety, and the matchers of running requests."""

from headstock.grammar.compiler import GrammarCompiler
from headstock.grammar.rows import NO_REQUESTS, AdmittedRequests, FollowedRequest, GrammarRows

__all__ = ["NO_REQUESTS", "AdmittedRequests", "FollowedRequest", "GrammarCompiler", "GrammarRows"]
