"""The bodies of Ollama's API."""

from __future__ import annotations

from typing import Any

from headstock_openai_server.api.bodies import Body, NoEffect
from headstock_openai_server.api.schema import ToolBody


class OllamaOptions(Body, kw_only=True):
    """Sampling parameters by Ollama's names, and settings of its runner."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    embedding_only: NoEffect = None
    f16_kv: NoEffect = None
    logits_all: NoEffect = None
    low_vram: NoEffect = None
    main_gpu: NoEffect = None
    mirostat_eta: NoEffect = None
    mirostat_tau: NoEffect = None
    num_batch: NoEffect = None
    num_ctx: NoEffect = None
    num_gpu: NoEffect = None
    num_keep: NoEffect = None
    num_thread: NoEffect = None
    numa: NoEffect = None
    use_mlock: NoEffect = None
    use_mmap: NoEffect = None
    vocab_only: NoEffect = None

    mirostat: Any = None
    penalize_newline: Any = None
    repeat_last_n: Any = None
    tfs_z: Any = None
    typical_p: Any = None


class GeneratingBody(Body, kw_only=True):
    """The common fields of chats and completions. Without `stream` there is one."""

    model: str
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    keep_alive: NoEffect = None


class CalledOllamaFunction(Body, kw_only=True):
    """A function call in a message."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(Body, kw_only=True):
    """A call of a tool that the model made."""

    function: CalledOllamaFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(Body, kw_only=True):
    """One message of a conversation. A tool has the result of the call with `tool_call_id`,
    or else of the first one of `tool_name` without a result.
    """

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None

    images: Any = None


class OllamaChatBody(GeneratingBody, kw_only=True):
    """The body of `/api/chat`; without messages, the answer says that the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[ToolBody] | None = None


class GenerateBody(GeneratingBody, kw_only=True):
    """The body of `/api/generate`: a message, or with `raw` a text to complete. Without a prompt,
    the answer says that the model is loaded.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    context: Any = None
    images: Any = None
    suffix: Any = None
    template: Any = None


class EmbedBody(Body, kw_only=True):
    """The body of `/api/embed`. An input that is too long is refused, whatever `truncate` says."""

    model: str
    input: str | list[str]
    truncate: bool | None = None

    keep_alive: NoEffect = None
    options: NoEffect = None

    dimensions: Any = None


class ShowBody(Body, kw_only=True):
    """The body of `/api/show`; `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None

    verbose: NoEffect = None
