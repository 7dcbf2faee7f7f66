"""Convert the pieces of an answer to messages of Ollama's API, in which calls are whole."""

from __future__ import annotations

from headstock.outputs import CompletionOutput, ToolCall
from headstock_openai_server.api.ollama_answer import (
    AnsweredOllamaCall,
    AnsweredOllamaFunction,
    AnsweredOllamaMessage,
)
from headstock_openai_server.convert.parts import read_arguments, split_piece


class MessageWriter:
    """Writes the messages of one answer; a call is held back until it is whole."""

    def __init__(self) -> None:
        self.num_chars = 0
        self._call: ToolCall | None = None
        self._arguments: list[str] = []

    def add_piece(self, piece: CompletionOutput) -> AnsweredOllamaMessage | None:
        """What new output adds to the message, if anything."""
        texts: list[str] = []
        calls: list[AnsweredOllamaCall] = []
        for part in split_piece(piece, self.num_chars):
            if isinstance(part, str):
                self._end_call(texts, calls)
                texts.append(part)
                continue
            if part.id:
                self._end_call(texts, calls)
                self._call = part
            self._arguments.append(part.arguments)
        self.num_chars += len(piece.text)
        # A call that is cut off is none, and the reason of the end says so.
        if piece.finish_reason not in (None, "length"):
            self._end_call(texts, calls)
        message = AnsweredOllamaMessage(content="".join(texts))
        if piece.reasoning:
            message.thinking = piece.reasoning
        if calls:
            message.tool_calls = calls
        return message if texts or calls or piece.reasoning else None

    def _end_call(self, texts: list[str], calls: list[AnsweredOllamaCall]) -> None:
        """End the open call, if there is one. What is no call, because the model slipped, is a text
        that no client runs.
        """
        call, arguments = self._call, "".join(self._arguments)
        self._call, self._arguments = None, []
        if call is None:
            return
        value = read_arguments(arguments)
        if value is not None:
            function = AnsweredOllamaFunction(index=call.index, name=call.name, arguments=value)
            calls.append(AnsweredOllamaCall(id=call.id, function=function))
        else:
            texts.append(f"{call.name}({arguments})")
