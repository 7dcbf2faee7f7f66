"""Queries and documents, checked against one engine and made into requests that score them."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Final, cast

import numpy as np
from attrs import evolve, frozen

from headstock.errors import ModelError, RequestError
from headstock.outputs import ScoreOutput
from headstock.requests.embedding_request import EmbeddingRequest
from headstock.requests.input_processor import InputProcessor
from headstock.requests.score_request import ScoreRequest
from headstock.sampling_checks import check_priority
from headstock.text.pair_prompt import NO, YES, choose_pair_prompt, find_yes_no
from headstock.text.prompt import Prompt, TextPrompt, check_salt, check_unicode
from headstock.text.scoring_config import ScoringConfig, read_scoring_config

DOCUMENT_NAMES: Final = ("document", "passage", "corpus")
"""The names of instructions before documents, by sentence-transformers' precedence."""


@frozen(kw_only=True)
class ScoreOptions:
    """What a request for scores says beside its texts.

    instruction: what a document must do for a query; empty for the checkpoint's
    prompt_name: of one of the checkpoint's instructions
    max_document_tokens: what documents are cut to; None for whole ones
    query_field, document_field: what errors call the texts
    """

    instruction: str = ""
    prompt_name: str | None = None
    max_document_tokens: int | None = None
    priority: int = 0
    user: str = ""
    cache_salt: str | None = None
    query_field: str = "queries"
    document_field: str = "documents"


class ScoreBatch(ABC):
    """The requests for scores, and their outputs once they have finished."""

    requests: Sequence[ScoreRequest] | Sequence[EmbeddingRequest]

    @abstractmethod
    def list_outputs(self) -> list[ScoreOutput]:
        """The score of each pair, in their order."""


@frozen
class TokenBatch(ScoreBatch):
    """One request a pair."""

    requests: Sequence[ScoreRequest]

    def list_outputs(self) -> list[ScoreOutput]:
        """The score of each pair, in their order."""
        return [request.output for request in self.requests]


@frozen
class VectorBatch(ScoreBatch):
    """One request a text. `pairs` are indices of requests: a query's and a document's."""

    requests: Sequence[EmbeddingRequest]
    pairs: Sequence[tuple[int, int]]

    def list_outputs(self) -> list[ScoreOutput]:
        """The cosine of each pair's vectors, in their order."""
        outputs = [request.final_output().outputs for request in self.requests]
        vectors = [np.array(output.embedding, np.float64) for output in outputs]
        scores = []
        for query, document in self.pairs:
            error = outputs[query].error or outputs[document].error
            score = math.nan if error else float(vectors[query] @ vectors[document])
            scores.append(ScoreOutput(score=score, error=error))
        return scores


class Scorer:
    """Makes requests that score documents against queries.

    scoring: how, as `--scoring` says
    """

    def __init__(self, processor: InputProcessor, scoring: str = "auto") -> None:
        self.processor = processor
        self.scoring = scoring

    def process(
        self, queries: Sequence[str], documents: Sequence[str], options: ScoreOptions
    ) -> ScoreBatch:
        """The requests for the score of each document against its query, or against the only one.

        raises: RequestError, which names the text at fault; UsageError, ModelError
        """
        names = options.query_field, options.document_field
        for name, texts in zip(names, (queries, documents), strict=True):
            _check_texts(texts, name)
        if len(queries) not in (1, len(documents)):
            raise RequestError(
                f"{names[0]}: expected one, or as many as {names[1]} ({len(documents)}), got "
                f"{len(queries)}",
                names[0],
            )
        most = options.max_document_tokens
        if most is not None:
            cut_text = self.processor.tokenizer.cut_text
            documents = [cut_text(document, most) for document in documents]
        return self.method.process(queries, documents, options)

    @cached_property
    def method(self) -> TokenMethod | VectorMethod:
        """How this model scores.   raises: RequestError if it does not; UsageError, ModelError"""
        processor, scoring = self.processor, self.scoring
        config, no_text = (
            read_scoring_config(processor.engine.directory),
            processor.engine.summary.no_text,
        )
        if scoring == "auto":
            scoring = config.method or ("cosine" if no_text else "")
        if scoring == "cosine":
            return VectorMethod(processor)
        if not scoring:
            raise RequestError(
                "no score is known for this model: it has no modules.json that says one; start "
                "with --scoring yes-no for a model like Qwen3-Reranker, or --scoring cosine to "
                "compare vectors"
            )
        if no_text:
            raise RequestError(
                f"scores need the model's next token, and it gives none: {no_text}; start with "
                "--scoring cosine to compare vectors"
            )
        if scoring == "yes-no" and config.method != "tokens":
            true_id, false_id = find_yes_no(processor.tokenizer)
            config = evolve(config, true_id=true_id, false_id=false_id)
        return TokenMethod(processor, config)


class TokenMethod:
    """Scores by the probability of one next token against that of another.

    raises: RequestError, UsageError, ModelError where the checkpoint cannot be scored so
    """

    def __init__(self, processor: InputProcessor, config: ScoringConfig) -> None:
        if config.unserved:
            raise RequestError(
                f"scores by {config.unserved} are not supported, which the checkpoint's LogitScore "
                "asks for; choose one with a true_token_id and a false_token_id"
            )
        most = max(config.true_id, config.false_id)
        if most >= processor.engine.model.vocab:
            raise ModelError(
                f"the checkpoint's LogitScore has token {most}, and the model knows "
                f"{processor.engine.model.vocab}; correct its config.json"
            )
        words = processor.tokenizer.find_ids((YES,)), processor.tokenizer.find_ids((NO,))
        self.processor = processor
        self.config = config
        self.write = choose_pair_prompt(
            processor.tokenizer,
            processor.template,
            config,
            is_yes_no=config.true_id in words[0] and config.false_id in words[1],
        )

    def process(
        self, queries: Sequence[str], documents: Sequence[str], options: ScoreOptions
    ) -> TokenBatch:
        """One prompt a pair.   raises: RequestError"""
        processor = self.processor
        instruction = options.instruction or processor.embedding_config.find_instruction(
            options.prompt_name
        )
        priority, salt = -check_priority(options.priority), check_salt(options.cache_salt)
        requests = []
        pairs = zip(itertools.cycle(queries), documents)
        for index, (query, document) in enumerate(pairs):
            try:
                with _name_text(options.document_field, index, len(documents)):
                    prompt = self._make_prompt(instruction, query, document)
            except RequestError:
                # A query that fits beside no document is at fault itself.
                with _name_text(options.query_field, index % len(queries), len(queries)):
                    self._make_prompt(instruction, query, "")
                raise
            prompt = evolve(prompt, cache_salt=salt)
            requests.append(
                ScoreRequest(
                    str(next(processor.request_numbers)),
                    prompt,
                    self.config.true_id,
                    self.config.false_id,
                    priority=priority,
                    user=options.user,
                )
            )
        return TokenBatch(requests)

    def _make_prompt(self, instruction: str, query: str, document: str) -> Prompt:
        """The prompt that asks for the score of a pair.   raises: RequestError"""
        text = self.write(instruction, query, document)
        # The template has written the special tokens out already.
        prompt = self.processor.tokenize(text, add_special_tokens=False)
        self.processor.check_prompt(prompt, num_outputs=1)
        return prompt


class VectorMethod:
    """Scores by the cosine of vectors.   raises: RequestError where there are none"""

    def __init__(self, processor: InputProcessor) -> None:
        self.processor = processor
        # What the files ask for may not be served, and a request for scores cannot say otherwise.
        processor.embedding_config.find_pooling(None)
        names = processor.embedding_config.instructions
        self.query_name = "query" if "query" in names else None
        self.document_name = next((name for name in DOCUMENT_NAMES if name in names), None)

    def process(
        self, queries: Sequence[str], documents: Sequence[str], options: ScoreOptions
    ) -> VectorBatch:
        """One prompt a text.   raises: RequestError"""
        if options.instruction:
            raise RequestError(
                "instruction is not supported where vectors are compared; give prompt_name, or put "
                "it before the query",
                "instruction",
            )
        named = options.prompt_name or self.query_name
        requests = [
            *self._embed(queries, named, options.query_field, options),
            *self._embed(documents, self.document_name, options.document_field, options),
        ]
        count = len(queries)
        pairs = [(index % count, count + index) for index in range(len(documents))]
        return VectorBatch(requests, pairs)

    def _embed(
        self, texts: Sequence[str], name: str | None, field: str, options: ScoreOptions
    ) -> list[EmbeddingRequest]:
        """The request for the vector of length 1 of each text."""
        salt = {} if options.cache_salt is None else {"cache_salt": options.cache_salt}
        requests = []
        for index, text in enumerate(texts):
            with _name_text(field, index, len(texts)):
                request = self.processor.process_embedding(
                    cast("TextPrompt", {"prompt": text, **salt}),
                    normalize=True,
                    prompt_name=name,
                    priority=options.priority,
                    user=options.user,
                )
            requests.append(request)
        return requests


def _check_texts(texts: Sequence[str], field: str) -> None:
    """Raise RequestError unless these are texts with characters, at least one."""
    if not texts:
        raise RequestError(f"{field} is an empty list; give it at least one text", field)
    for index, text in enumerate(texts):
        if not text:
            place = _name_place(field, index, len(texts))
            raise RequestError(f"{place} is empty; give it at least one character", field)
        with _name_text(field, index, len(texts)):
            check_unicode(text, "prompt")


def _name_place(field: str, index: int, count: int) -> str:
    """What errors call text `index` of `count` in a field."""
    return field if count == 1 else f"{field}[{index}]"


@contextmanager
def _name_text(field: str, index: int, count: int) -> Iterator[None]:
    """A RequestError about a prompt that leaves this block says which text is at fault."""
    try:
        yield
    except RequestError as error:
        if error.parameter not in ("prompt", "messages"):
            raise
        place = _name_place(field, index, count)
        raise type(error)(f"{place}: {error}", parameter=field) from error
