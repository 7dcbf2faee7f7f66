"""From a request as it is submitted to one that a sampler can serve."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from headstock.engine.request_checks import check_served
from headstock.errors import RequestError
from headstock.grammar import FollowedRequest, GrammarRows
from headstock.scheduler import Outcome, Request
from headstock.selection.grammars import explain_no_grammar
from headstock.selection.processors import SelectedProcessor, digest_forward_values
from headstock.selection.request_args import RequestArgs
from headstock.spi import RunnerSpec
from headstock.startup.build import EngineBuild
from headstock.structured_outputs import StructuredOutputsParams


@frozen(eq=False)
class RequestPreparation:
    """Checks what requests ask of sampling, and adds what the sampler needs for it.

    Any thread may check and prepare requests.
    grammars: None where no answer can follow one, as `why_no_grammar` says
    """

    vocab: int
    runner: RunnerSpec
    request_args: RequestArgs
    processors: Sequence[SelectedProcessor]
    grammars: GrammarRows | None
    why_no_grammar: str

    def check(self, request: Request) -> None:
        """Raise RequestError when sampling cannot do what the request asks.

        The grammar of an answer is compiled here, which may take seconds.
        """
        check_served(request, self.vocab, self.runner)
        self.request_args.make(request.extra_args)
        if request.params.structured_outputs is None:
            return
        if self.grammars is None:
            raise RequestError(
                f"{request.params.structured_outputs.label} cannot be served: "
                f"{self.why_no_grammar}",
                "structured_outputs",
            )
        self.grammars.check_request(request)

    def prepare(self, request: Request) -> Request:
        """Return the request as the scheduler and the sampler take it."""
        # What is pooled is not sampled, but operations may read what it gives plugins.
        if any(not request.pooling or each.is_in_forward for each in self.processors):
            args = self.request_args.make(request.extra_args)
            values = tuple(
                each.make_values(args.get(each.spec.name), request.prompt, self.vocab)
                if not request.pooling or each.is_in_forward
                else None
                for each in self.processors
            )
            variant = digest_forward_values(self.processors, values)
            request = evolve(request, processor_values=values, variant=variant)
        if self.grammars is not None and request.params.structured_outputs is not None:
            # What may come next is known once the token before it is.
            request = evolve(request, wait_for_sample=True)
        return request

    def start_grammar(self, request: Request) -> FollowedRequest | None:
        """Begin to follow the answer of a request; None where no grammar rules it.

        raises: RequestError
        """
        if self.grammars is None or request.params.structured_outputs is None:
            return None
        return self.grammars.start(request)

    def follow(self, outcome: Outcome) -> None:
        """Follow the tokens that a step accepted, before other admissions replace theirs."""
        if self.grammars is not None:
            self.grammars.advance(outcome)

    def explain_failure(self, admission_id: int) -> str:
        """Explain why an answer cannot follow its grammar any further; empty while it can."""
        return "" if self.grammars is None else self.grammars.explain_failure(admission_id)

    def has_compiled(self, params: StructuredOutputsParams) -> bool:
        """Whether the grammar of an answer is compiled, so that a request with it need not wait."""
        return self.grammars is not None and self.grammars.compiler.has_compiled(params)

    def close(self) -> None:
        """End what compiles grammars."""
        if self.grammars is not None:
            self.grammars.close()


def make_preparation(parts: EngineBuild) -> RequestPreparation:
    """Make the preparation of an engine's requests."""
    why = explain_no_grammar(parts.config, parts.parts.grammar)
    return RequestPreparation(
        parts.model.vocab,
        parts.parts.runner,
        parts.request_args,
        parts.parts.processors,
        parts.grammars,
        why,
    )
