"""The prompt of a query and a document, on which a model's next token says whether they match."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from headstock.errors import RequestError, UsageError, shorten
from headstock.text.chat import explain_failure
from headstock.text.scoring_config import ScoringConfig
from headstock.text.tokenizer import Tokenizer

WritePair = Callable[[str, str, str], str]
"""Writes the prompt of an instruction, which may be empty, a query and a document."""

YES, NO = "yes", "no"
ROLES = ("query", "document")
"""The roles of a pair's messages, as sentence-transformers and vLLM have them."""
MARKS = ("\ue000", "\ue001")
"""A query and a document that no template writes by itself."""

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def write_qwen3_pair(instruction: str, query: str, document: str) -> str:
    """The prompt that Qwen3-Reranker was trained on."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        f"<|im_start|>user\n<Instruct>: {instruction or INSTRUCTION}\n"
        f"<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def choose_pair_prompt(
    tokenizer: Tokenizer, template: str | None, config: ScoringConfig, *, is_yes_no: bool
) -> WritePair:
    """What writes the prompts of pairs: `template`, the model's own, or Qwen3-Reranker's.

    template: of `--chat-template`
    is_yes_no: the tokens are those that Qwen3-Reranker's prompt asks for
    raises: UsageError where no template writes a query and a document, ModelError
    """
    own = _find_own_template(tokenizer, config) if template is None else template
    if own is not None:
        for is_structured in (False, True):
            write = _make_writer(
                tokenizer, own, config, is_users=template is not None, is_structured=is_structured
            )
            if _writes_pairs(write):
                return write
    if template is None and is_yes_no:
        return write_qwen3_pair
    whose = "the model's chat template" if template is None else "chat_template (--chat-template)"
    raise UsageError(
        f"{whose} writes no messages of the roles query and document; set chat_template "
        "(--chat-template) to one that does"
    )


def _find_own_template(tokenizer: Tokenizer, config: ScoringConfig) -> str | None:
    """The text of the model's template if it names both roles.   raises: ModelError"""
    templates = tokenizer.hf_tokenizer.chat_template
    if isinstance(templates, dict):
        templates = templates.get(config.template_name or "default")
    # A template of chats may write messages of any role, in a form that no model was trained on.
    is_for_pairs = templates is not None and all(role in templates for role in ROLES)
    return str(templates) if is_for_pairs else None


def _make_writer(
    tokenizer: Tokenizer,
    template: str,
    config: ScoringConfig,
    *,
    is_users: bool,
    is_structured: bool,
) -> WritePair:
    """What renders pairs by a template, whose contents are lists of parts if `is_structured`."""
    render = tokenizer.hf_tokenizer.apply_chat_template
    taken = inspect.signature(render).parameters
    variables = {
        name: value for name, value in config.template_variables.items() if name not in taken
    }

    def write(instruction: str, query: str, document: str) -> str:
        turns = [("system", instruction)] if instruction else []
        turns += zip(ROLES, (query, document), strict=True)
        messages: list[dict[str, Any]] = [
            {"role": role, "content": [{"type": "text", "text": text}] if is_structured else text}
            for role, text in turns
        ]
        try:
            return str(
                render(
                    messages,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=config.add_generation_prompt,
                    **variables,
                )
            )
        except Exception as error:  # a template is a program
            raise explain_failure(error, is_users=is_users) from error

    return write


def _writes_pairs(write: WritePair) -> bool:
    """Whether the prompt has both the query and the document."""
    try:
        text = write("", *MARKS)
    except Exception:  # whatever a template raises that expects other roles
        return False
    return all(mark in text for mark in MARKS)


def find_yes_no(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens of "yes" and "no".   raises: RequestError where one is not a single token"""
    ids = []
    for word in (YES, NO):
        tokens = tokenizer.encode(word, add_special_tokens=False)
        if len(tokens) != 1:
            raise RequestError(
                f"--scoring yes-no needs a tokenizer with a token {word!r}, and this one writes "
                f"{shorten(word)} as {len(tokens)} tokens; choose a model that was trained for it"
            )
        ids += tokens
    return ids[0], ids[1]
