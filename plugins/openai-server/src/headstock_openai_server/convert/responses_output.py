"""Convert the pieces of an answer to the items of a response and to stream events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from headstock.outputs import CompletionOutput, ToolCall
from headstock_openai_server.api.responses_answer import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentDelta,
    ContentDone,
    FunctionCallItem,
    ItemEvent,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    Status,
    TextDelta,
    TextDone,
)
from headstock_openai_server.convert.parts import split_piece
from headstock_openai_server.convert.responses_tools import FunctionName


class ItemWriter:
    """Writes the items of one answer: reasoning, messages and calls, in the model's order.

    The items do not depend on how an answer is divided into pieces. The last item grows until
    another begins or the answer ends.

    names: the functions' names for clients, by those that the model sees
    items: those that have begun
    numbers: the sequence numbers of events
    """

    def __init__(self, names: Mapping[str, FunctionName]) -> None:
        self.names = names
        self.items: list[OutputItem] = []
        self.numbers = count()
        self.num_chars = 0
        self._texts: list[str] = []

    @property
    def has_answer(self) -> bool:
        """Whether the answer has anything besides reasoning."""
        return len(self.items) > bool(self.items and isinstance(self.items[0], ReasoningItem))

    @property
    def reasoning(self) -> str:
        """The reasoning, once it has ended; empty if there is none."""
        first = self.items[0] if self.items else None
        return first.content[0].text if isinstance(first, ReasoningItem) and first.content else ""

    def add_piece(self, piece: CompletionOutput) -> Iterator[ResponseEvent]:
        """The events of new output, and of the end if the answer ends."""
        if piece.reasoning:
            yield from self._add_reasoning(piece.reasoning)
        for part in split_piece(piece, self.num_chars):
            if isinstance(part, str):
                yield from self._add_text(part)
                continue
            if part.id:
                yield from self._begin_call(part)
            if part.arguments:
                yield from self._add_arguments(part.arguments)
        self.num_chars += len(piece.text)
        if piece.finish_reason is not None:
            if piece.finish_reason == "stop" and not self.has_answer:
                # Agents assume that a turn continues if the response has no message.
                yield from self._begin(OutputMessage(id=_make_id("msg")))
            is_cut = piece.finish_reason == "length"
            yield from self._end(is_cut=is_cut)

    def _add_reasoning(self, text: str) -> Iterator[ResponseEvent]:
        if not (self.items and isinstance(self.items[-1], ReasoningItem)):
            yield from self._begin(ReasoningItem(id=_make_id("rs")))
        self._texts.append(text)
        yield ContentDelta(type="response.reasoning_text.delta", delta=text, **self._place())

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        if not (self.items and isinstance(self.items[-1], OutputMessage)):
            yield from self._begin(OutputMessage(id=_make_id("msg")))
        self._texts.append(text)
        yield TextDelta(type="response.output_text.delta", delta=text, **self._place())

    def _begin_call(self, call: ToolCall) -> Iterator[ResponseEvent]:
        function = self.names.get(call.name, FunctionName(call.name))
        item = FunctionCallItem(id=_make_id("fc"), call_id=call.id, name=function.name)
        if function.namespace is not None:
            item.namespace = function.namespace
        yield from self._begin(item)

    def _add_arguments(self, text: str) -> Iterator[ResponseEvent]:
        self._texts.append(text)
        place = self._place()
        yield ArgumentsDelta(type="response.function_call_arguments.delta", delta=text, **place)

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        """Begin an item, after the end of the one before it."""
        yield from self._end(is_cut=False)
        self.items.append(item)
        yield ItemEvent(
            type="response.output_item.added",
            sequence_number=next(self.numbers),
            output_index=len(self.items) - 1,
            item=item,
        )
        if not isinstance(item, FunctionCallItem):
            empty = ReasoningText if isinstance(item, ReasoningItem) else OutputText
            part = empty(text="")
            yield PartEvent(type="response.content_part.added", part=part, **self._place())

    def _end(self, *, is_cut: bool) -> Iterator[ResponseEvent]:
        """End the last item, if there is one."""
        if not self.items:
            return
        text, self._texts = "".join(self._texts), []
        status: Status = "incomplete" if is_cut else "completed"
        # A new object: events that were not sent yet refer to the old one.
        match self.items[-1]:
            case FunctionCallItem() as call:
                self.items[-1] = replace(call, arguments=text, status=status)
                yield ArgumentsDone(
                    type="response.function_call_arguments.done",
                    name=call.name,
                    arguments=text,
                    **self._place(),
                )
            case ReasoningItem() as reasoning:
                content = ReasoningText(text=text)
                self.items[-1] = replace(reasoning, content=[content], status=status)
                done = "response.reasoning_text.done"
                yield ContentDone(type=done, text=text, **self._place())
                yield PartEvent(type="response.content_part.done", part=content, **self._place())
            case OutputMessage() as message:
                part = OutputText(text=text)
                self.items[-1] = replace(message, content=[part], status=status)
                yield TextDone(type="response.output_text.done", text=text, **self._place())
                yield PartEvent(type="response.content_part.done", part=part, **self._place())
        yield ItemEvent(
            type="response.output_item.done",
            sequence_number=next(self.numbers),
            output_index=len(self.items) - 1,
            item=self.items[-1],
        )

    def _place(self) -> dict[str, Any]:
        """The number of the next event, and the id and the index of its item."""
        return {
            "sequence_number": next(self.numbers),
            "item_id": self.items[-1].id,
            "output_index": len(self.items) - 1,
        }


def _make_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"
