"""The answers of Ollama's API. A stream has one a line, of which the last is `done`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from headstock_openai_server.api.answers import Answer, TokenLogprobs

VERSION = "0.13.0"
"""The version of Ollama whose API this is. Clients look for features by it."""


class AnsweredOllamaFunction(Answer, kw_only=True):
    """The function of a call."""

    index: int
    name: str
    arguments: dict[str, Any]


class AnsweredOllamaCall(Answer, kw_only=True):
    """A call of a tool."""

    id: str
    function: AnsweredOllamaFunction


class AnsweredOllamaMessage(Answer, kw_only=True):
    """The message of a chat, or what is new of it; calls come whole."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnsweredOllamaCall] | UnsetType = UNSET


class OllamaReply(Answer, kw_only=True):
    """The common fields of answers. The second half is in the last line of a stream: its times are
    measured, in nanoseconds.

    load_duration: none, since the model is loaded before the server answers
    prompt_eval_duration: from the row to the first token
    eval_duration: from the first token to the last
    """

    model: str
    created_at: str
    logprobs: list[TokenLogprobs] | UnsetType = UNSET
    done: bool = False

    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatReply(OllamaReply, kw_only=True):
    """The answer of `/api/chat`, or what is new of it."""

    message: AnsweredOllamaMessage


class GenerateReply(OllamaReply, kw_only=True):
    """The answer of `/api/generate`, or what is new of it."""

    response: str
    thinking: str | UnsetType = UNSET


class EmbedReply(Answer, kw_only=True):
    """The answer of `/api/embed`."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: Literal[0] = 0
    prompt_eval_count: int


class OllamaDetails(Answer, kw_only=True):
    """What kind of model this is; the sizes of parameters are unknown."""

    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str


class OllamaModel(Answer, kw_only=True):
    """A served model.

    size: bytes of its weights on disk
    digest: SHA-256 of its config.json
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModelList(Answer, kw_only=True):
    """The answer of `/api/tags`."""

    models: list[OllamaModel]


class RunningModel(OllamaModel, kw_only=True):
    """A loaded model; it stays loaded.

    size_vram: `size` on a GPU, else 0
    """

    expires_at: str = "9999-12-31T23:59:59Z"
    size_vram: int
    context_length: int


class RunningModelList(Answer, kw_only=True):
    """The answer of `/api/ps`."""

    models: list[RunningModel]


class ShownModel(Answer, kw_only=True):
    """The answer of `/api/show`.

    parameters: the server's defaults of `options`, one a line
    template: the chat template, in Jinja
    """

    modelfile: str = ""
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Answer, kw_only=True):
    """The answer of `/api/version`."""

    version: str = VERSION
