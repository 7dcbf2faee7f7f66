"""Between text and tokens: tokenizer, chat template, incremental detokenizer, stop strings.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstock.text.chat import find_template
    from headstock.text.completion import join_pieces
    from headstock.text.conversation import CONVERSATION_OPTIONS, Conversation
    from headstock.text.detokenizer import Detokenizer
    from headstock.text.prompt import Prompt, is_far_longer, tokenize_prompt
    from headstock.text.reasoning import ReasoningMarks
    from headstock.text.template_variables import list_variables
    from headstock.text.tokenizer import NoTokenizer, Tokenizer, import_transformers

__all__ = [
    "CONVERSATION_OPTIONS",
    "Conversation",
    "Detokenizer",
    "NoTokenizer",
    "Prompt",
    "ReasoningMarks",
    "Tokenizer",
    "find_template",
    "import_transformers",
    "is_far_longer",
    "join_pieces",
    "list_variables",
    "tokenize_prompt",
]

_HOMES = {
    "CONVERSATION_OPTIONS": "headstock.text.conversation",
    "Conversation": "headstock.text.conversation",
    "Detokenizer": "headstock.text.detokenizer",
    "NoTokenizer": "headstock.text.tokenizer",
    "Prompt": "headstock.text.prompt",
    "ReasoningMarks": "headstock.text.reasoning",
    "Tokenizer": "headstock.text.tokenizer",
    "find_template": "headstock.text.chat",
    "import_transformers": "headstock.text.tokenizer",
    "is_far_longer": "headstock.text.prompt",
    "join_pieces": "headstock.text.completion",
    "list_variables": "headstock.text.template_variables",
    "tokenize_prompt": "headstock.text.prompt",
}


def __getattr__(name: str) -> object:
    """The exported name, from the module where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headstock.text' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
