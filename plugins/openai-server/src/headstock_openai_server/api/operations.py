"""The routes: their paths, bodies, answers and statuses."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from attrs import frozen

from headstock_openai_server.api.answers import (
    Aborted,
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    Done,
    Health,
    LiveView,
    Load,
    Model,
    ModelInfo,
    ModelList,
    ServerInfo,
    TokenizeAnswer,
    TokenizerInfo,
    Version,
)
from headstock_openai_server.api.errors import (
    MESSAGES_PATH,
)
from headstock_openai_server.api.messages_answer import MessageAnswer, PromptTokens
from headstock_openai_server.api.messages_body import (
    MessagesBody,
    PromptBody,
)
from headstock_openai_server.api.ollama_answer import (
    EmbedReply,
    GenerateReply,
    OllamaChatReply,
    OllamaModelList,
    OllamaVersion,
    RunningModelList,
    ShownModel,
)
from headstock_openai_server.api.ollama_body import (
    EmbedBody,
    GenerateBody,
    OllamaChatBody,
    ShowBody,
)
from headstock_openai_server.api.pooling_answers import EmbeddingList, Reranking, ScoreList
from headstock_openai_server.api.responses_answer import InputTokens, ResponseObject
from headstock_openai_server.api.responses_body import (
    ResponsesBody,
)
from headstock_openai_server.api.schema import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)

OPEN_PATHS = ("/", "/docs", "/health", "/ping")
"""Paths that need no key. The pages have no secrets: one fetches its data with a key."""
ANY_HOST_PATHS = ("/health", "/metrics", "/ping")
"""Paths for probes, which call a server by names that it does not know."""

ERRORS: Mapping[int, str] = {
    400: "the request is wrong",
    401: "no valid key",
    403: "the server has no key and is not called so",
    404: "there is no such model or request",
    410: "the request was aborted",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "the queue is full",
    431: "the headers are too large",
    500: "the step of this request failed",
    503: "the model is being loaded, or the server ends",
}
"""Error status -> its meaning."""

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


@frozen(kw_only=True)
class Operation:
    """One route: its request body, its response and its possible statuses.

    stream_type: the media type of the response as a stream, if there is one
    """

    summary: str
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    statuses: tuple[int, ...] = ()
    stream_type: str = ""
    path_parameter: str | None = None


RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE_PATHS = ("/v1/score", "/score")
"""Each route has these names: clients of Cohere, Jina and vLLM differ."""

ANSWERING = (400, 404, 413, 415, 429, 500, 503)
RESET_PATHS = ("/reset_prefix_cache", "/flush_cache")
"""vLLM's path and SGLang's."""
READING = (400, 404, 413, 415, 500, 503)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation(
        summary="Answer a conversation",
        body=ChatBody,
        answer=ChatCompletion,
        statuses=ANSWERING,
        stream_type=EVENTS,
    ),
    ("post", "/v1/completions"): Operation(
        summary="Complete prompts",
        body=CompletionBody,
        answer=Completion,
        statuses=ANSWERING,
        stream_type=EVENTS,
    ),
    ("post", "/v1/responses"): Operation(
        summary="Answer a conversation, as the Responses API does; nothing is stored",
        body=ResponsesBody,
        answer=ResponseObject,
        statuses=ANSWERING,
        stream_type=EVENTS,
    ),
    ("post", "/v1/responses/input_tokens"): Operation(
        summary="Count the tokens of a conversation, as the Responses API does",
        body=ResponsesBody,
        answer=InputTokens,
        statuses=READING,
    ),
    ("post", MESSAGES_PATH): Operation(
        summary="Answer a conversation, as Anthropic's API does",
        body=MessagesBody,
        answer=MessageAnswer,
        statuses=ANSWERING,
        stream_type=EVENTS,
    ),
    ("post", f"{MESSAGES_PATH}/count_tokens"): Operation(
        summary="Count the tokens of a conversation, as Anthropic's API does",
        body=PromptBody,
        answer=PromptTokens,
        statuses=READING,
    ),
    ("post", "/v1/embeddings"): Operation(
        summary="Make vectors of texts",
        body=EmbeddingBody,
        answer=EmbeddingList,
        statuses=ANSWERING,
    ),
    **{
        ("post", path): Operation(
            summary="Order documents by what they have to do with a query",
            body=RerankBody,
            answer=Reranking,
            statuses=ANSWERING,
        )
        for path in RERANK_PATHS
    },
    **{
        ("post", path): Operation(
            summary="Score pairs of texts", body=ScoreBody, answer=ScoreList, statuses=ANSWERING
        )
        for path in SCORE_PATHS
    },
    ("get", "/v1/models"): Operation(summary="List the models", answer=ModelList, statuses=(503,)),
    ("get", "/v1/models/{id}"): Operation(
        summary="Describe a model", answer=Model, statuses=(404, 503), path_parameter="id"
    ),
    ("post", "/api/chat"): Operation(
        summary="Answer a conversation, as Ollama does",
        body=OllamaChatBody,
        answer=OllamaChatReply,
        statuses=ANSWERING,
        stream_type=LINES,
    ),
    ("post", "/api/generate"): Operation(
        summary="Answer a message or complete a text, as Ollama does",
        body=GenerateBody,
        answer=GenerateReply,
        statuses=ANSWERING,
        stream_type=LINES,
    ),
    ("post", "/api/embed"): Operation(
        summary="Make vectors of texts, as Ollama does",
        body=EmbedBody,
        answer=EmbedReply,
        statuses=ANSWERING,
    ),
    ("post", "/api/show"): Operation(
        summary="Describe a model, as Ollama does",
        body=ShowBody,
        answer=ShownModel,
        statuses=READING,
    ),
    ("get", "/api/tags"): Operation(
        summary="List the models, as Ollama does", answer=OllamaModelList, statuses=(503,)
    ),
    ("get", "/api/ps"): Operation(
        summary="List the loaded models, as Ollama does", answer=RunningModelList, statuses=(503,)
    ),
    ("get", "/api/version"): Operation(
        summary="Show the version of Ollama's API", answer=OllamaVersion
    ),
    ("post", "/tokenize"): Operation(
        summary="Tokenize a prompt or a conversation",
        body=TokenizeBody,
        answer=TokenizeAnswer,
        statuses=READING,
    ),
    ("post", "/detokenize"): Operation(
        summary="Write token ids as text",
        body=DetokenizeBody,
        answer=DetokenizeAnswer,
        statuses=READING,
    ),
    ("get", "/tokenizer_info"): Operation(
        summary="Show the tokenizer's configuration and the chat template",
        answer=TokenizerInfo,
        statuses=(400, 503),
    ),
    ("get", "/health"): Operation(summary="Say whether requests are served", answer=Health),
    **{
        (method, "/ping"): Operation(summary="Say what /health does, to SageMaker", answer=Health)
        for method in ("get", "post")
    },
    ("get", "/load"): Operation(summary="Count the requests in progress", answer=Load),
    ("get", "/version"): Operation(summary="Show the version", answer=Version),
    **{
        ("get", path): Operation(
            summary="Describe the model, for routers", answer=ModelInfo, statuses=(503,)
        )
        for path in ("/model_info", "/get_model_info")
    },
    **{
        ("get", path): Operation(
            summary="Describe the server, for routers", answer=ServerInfo, statuses=(503,)
        )
        for path in ("/server_info", "/get_server_info")
    },
    ("get", "/metrics"): Operation(summary="Show counts and times", answer="text/plain"),
    ("get", "/openapi.json"): Operation(summary="Show this document", answer="application/json"),
    ("get", "/docs"): Operation(summary="Show this document as a page", answer="text/html"),
    ("get", "/live"): Operation(
        summary="Show what runs, waits and is cached", answer=LiveView, statuses=(503,)
    ),
    ("get", "/"): Operation(summary="Show a page for people", answer="text/html"),
}
"""Method and path -> the operation."""

ADMINISTRATION: Mapping[tuple[str, str], Operation] = {
    ("post", "/abort_request"): Operation(
        summary="Abort a request by the id of its chunks, or by that of /live",
        body=AbortBody,
        answer=Aborted,
        statuses=(*READING, 404),
    ),
    **{
        ("post", path): Operation(summary="Empty the prefix cache", answer=Done, statuses=(503,))
        for path in RESET_PATHS
    },
}
"""The operations of servers with a key."""
