"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

import asyncio
import json

from starlette.requests import Request
from starlette.responses import Response

from headstock.requests import EngineSession
from headstock.text import is_far_longer
from headstock_openai_server.api.answers import DetokenizeAnswer, TokenizeAnswer
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.schema import DetokenizeBody, TokenizeBody
from headstock_openai_server.convert.conversations import make_conversation
from headstock_openai_server.convert.sampling import name_fields
from headstock_openai_server.convert.tokenizer_info import describe_tokenizer
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import IGNORED, read_body
from headstock_openai_server.routes.answering import json_response

MAX_COUNTED = 1 << 18
"""`/tokenize` refuses texts that have more tokens, unless a sequence can be longer."""
CHAT_FIELDS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)
"""The fields of a conversation that a prompt does not have."""


async def tokenize(service: Service, request: Request) -> Response:
    """`POST /tokenize`."""
    body = await read_body(request, TokenizeBody, service.settings)
    ignored = request.scope[IGNORED]
    session = service.session
    service.check_model(body.model)
    check_fields(body)

    def encode() -> TokenizeAnswer:
        tokens = encode_prompt(session, body) if body.messages is None else render_messages()
        decode = session.tokenizer.decode
        return TokenizeAnswer(
            count=len(tokens),
            max_model_len=session.engine.max_seq_len,
            tokens=tokens,
            token_strs=[decode([token], skip_special_tokens=False) for token in tokens]
            if body.return_token_strs
            else None,
        )

    def render_messages() -> list[int]:
        conversation = make_conversation(body, body.messages or (), service.settings, ignored)
        return list(session.input_processor.render_chat(conversation).tokens)

    if body.messages is None:
        return json_response(await asyncio.to_thread(encode))
    with name_fields({"prompt": "messages"}):
        return json_response(await service.run_limited(encode))


def check_fields(body: TokenizeBody) -> None:
    """Raise ApiError unless the body has a prompt or a conversation, and no field of the other."""
    if (body.prompt is None) == (body.messages is None):
        raise refuse("give one of prompt and messages", "prompt")
    for name in CHAT_FIELDS if body.messages is None else ():
        if getattr(body, name) not in (None, [], {}):
            raise refuse(f"{name} is of conversations; give messages or leave it out", name)
    if body.messages is not None and body.add_special_tokens:
        raise refuse(
            "add_special_tokens is of prompts: the chat template writes special tokens; leave it "
            "out",
            "add_special_tokens",
        )


def encode_prompt(session: EngineSession, body: TokenizeBody) -> list[int]:
    """The tokens of the prompt.   raises: ApiError, RequestError"""
    text = body.prompt or ""
    if is_far_longer(text, session.tokenizer, max(MAX_COUNTED, session.engine.max_seq_len)):
        raise refuse(
            f"prompt has {len(text)} characters, and more than {MAX_COUNTED} tokens; send it in "
            "parts",
            "prompt",
        )
    return session.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)


async def detokenize(service: Service, request: Request) -> Response:
    """`POST /detokenize`."""
    body = await read_body(request, DetokenizeBody, service.settings)
    session = service.session
    service.check_model(body.model)
    vocab = session.engine.model.vocab

    def decode() -> str:
        for token in (min(body.tokens, default=0), max(body.tokens, default=0)):
            if not 0 <= token < vocab:
                raise refuse(f"tokens: expected ids from 0 to {vocab - 1}, got {token}", "tokens")
        return session.tokenizer.decode(body.tokens, skip_special_tokens=False)

    return json_response(DetokenizeAnswer(prompt=await asyncio.to_thread(decode)))


async def show_tokenizer(service: Service, request: Request) -> Response:
    """`GET /tokenizer_info`."""
    session = service.session
    config = await asyncio.to_thread(
        describe_tokenizer,
        session.tokenizer,
        session.input_processor.template,
        session.engine.directory,
    )
    # The standard library encodes any integer; many checkpoints have a length of 10^30.
    return Response(json.dumps(config), media_type="application/json")
