"""Tool parsers behind a detokenizer: what reaches them of an answer's tokens."""

from __future__ import annotations

import json
from pathlib import Path

from attrs import evolve
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers

from headstock import SamplingParams
from headstock.outputs import CompletionOutput, Update
from headstock.selection.tool_parsers import SelectedToolParser, select_tool_parser
from headstock.text import Tokenizer
from headstock.text.answer import AnswerFormat
from headstock.text.completion import CompletionBuilder


def make_tokenizer(folder: Path) -> Tokenizer:
    """Bytes, and the special tokens of Mistral as ids 0 and 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE({letter: i + 2 for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["[TOOL_CALLS]", "[OTHER]"])
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


def test_marks_that_are_special_tokens_reach_the_parser(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    tokens = tuple(tokenizer.encode('Hm. [OTHER][TOOL_CALLS]f{"a": 1}'))
    special = tokenizer.find_ids(["[TOOL_CALLS]", "[OTHER]"])
    assert special <= set(tokens)

    def answer(parser: SelectedToolParser) -> CompletionOutput:
        made = AnswerFormat(
            make_parser=lambda: parser.make(()), special_tokens=parser.spec.special_tokens
        )
        builder = CompletionBuilder(0, SamplingParams(max_tokens=None), tokenizer, made)
        return builder.apply_update(Update(id="0", tokens=tokens, finish_reason="stop"))

    parser = select_tool_parser("mistral")
    output = answer(parser)
    assert (output.text, output.finish_reason) == ("Hm.", "tool_calls")
    (call,) = output.tool_calls
    assert (call.name, call.arguments) == ("f", '{"a": 1}')
    # A spec that names no special token gets none of them.
    blind = answer(evolve(parser, spec=evolve(parser.spec, special_tokens=())))
    assert (blind.text, blind.finish_reason) == ('Hm. f{"a": 1}', "stop")
