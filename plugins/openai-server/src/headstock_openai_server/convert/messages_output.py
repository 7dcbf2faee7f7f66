"""Convert the pieces of an answer to the blocks of a message and to stream events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headstock.outputs import CompletionOutput
from headstock_openai_server.api.messages_answer import (
    SIGNATURE,
    AnswerBlock,
    BlockDelta,
    BlockEvent,
    BlockStart,
    BlockStop,
    InputAddition,
    SignatureAddition,
    TextAddition,
    TextBlock,
    ThinkingAddition,
    ThinkingBlock,
    ToolUseBlock,
)
from headstock_openai_server.convert.parts import read_arguments, split_piece


class BlockWriter:
    """Writes the blocks of one answer: thinking, texts and calls, in the model's order.

    The blocks do not depend on how an answer is divided into pieces. The last block grows until
    another begins or the answer ends.

    blocks: those that have begun
    """

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self.num_chars = 0
        self._texts: list[str] = []

    def add_piece(self, piece: CompletionOutput) -> Iterator[BlockEvent]:
        """The events of new output, and of the end if the answer ends."""
        if piece.reasoning:
            yield from self._begin_unless(ThinkingBlock)
            yield self._extend(piece.reasoning, ThinkingAddition(thinking=piece.reasoning))
        for part in split_piece(piece, self.num_chars):
            if isinstance(part, str):
                yield from self._begin_unless(TextBlock)
                yield self._extend(part, TextAddition(text=part))
                continue
            if part.id:
                yield from self._begin(ToolUseBlock(id=part.id, name=part.name))
            if part.arguments:
                yield self._extend(part.arguments, InputAddition(partial_json=part.arguments))
        self.num_chars += len(piece.text)
        if piece.finish_reason is not None:
            yield from self._end(is_cut=piece.finish_reason == "length")

    def _begin_unless(self, kind: type[TextBlock | ThinkingBlock]) -> Iterator[BlockEvent]:
        """Begin a block, unless the last one is of this kind."""
        if not (self.blocks and isinstance(self.blocks[-1], kind)):
            yield from self._begin(kind())

    def _begin(self, block: AnswerBlock) -> Iterator[BlockEvent]:
        """Begin a block, after the end of the one before it."""
        yield from self._end(is_cut=False)
        self.blocks.append(block)
        yield BlockStart(index=len(self.blocks) - 1, content_block=block)

    def _extend(self, text: str, addition: Any) -> BlockEvent:
        self._texts.append(text)
        return BlockDelta(index=len(self.blocks) - 1, delta=addition)

    def _end(self, *, is_cut: bool) -> Iterator[BlockEvent]:
        """End the last block, if there is one."""
        if not self.blocks:
            return
        text, self._texts = "".join(self._texts), []
        last = len(self.blocks) - 1
        # A new object: events that were not sent yet refer to the old one.
        match self.blocks[-1]:
            case ToolUseBlock() as call:
                self.blocks[-1] = finish_call(call, text, is_cut=is_cut)
            case ThinkingBlock():
                self.blocks[-1] = ThinkingBlock(thinking=text, signature=SIGNATURE)
                yield BlockDelta(index=last, delta=SignatureAddition())
            case TextBlock():
                self.blocks[-1] = TextBlock(text=text)
        yield BlockStop(index=last)


def finish_call(call: ToolUseBlock, arguments: str, *, is_cut: bool) -> AnswerBlock:
    """The whole call. Its input is empty if the answer `is_cut` within it; what is not a call's
    input otherwise, because the model slipped, is a text that no client runs.
    """
    value = read_arguments(arguments)
    if value is not None:
        return ToolUseBlock(id=call.id, name=call.name, input=value)
    return call if is_cut else TextBlock(text=f"{call.name}({arguments})")
