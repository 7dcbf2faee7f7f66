"""`/tokenize`, `/detokenize` and `/tokenizer_info`."""

from __future__ import annotations

import asyncio
import json

from starlette.requests import Request
from starlette.responses import Response

from headstock_openai_server.api.answers import DetokenizeAnswer, TokenizeAnswer
from headstock_openai_server.api.errors import ApiError
from headstock_openai_server.api.schema import DetokenizeBody, TokenizeBody
from headstock_openai_server.convert.conversations import make_conversation
from headstock_openai_server.convert.tokenizer_info import describe_tokenizer
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import read_body
from headstock_openai_server.routes.answering import json_response


async def tokenize(service: Service, request: Request) -> Response:
    """`POST /tokenize`."""
    body = await read_body(request, TokenizeBody, service.settings.max_body_bytes)
    session = service.session
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give one of prompt and messages", param="prompt")

    def encode() -> list[int]:
        if body.messages is not None:
            conversation = make_conversation(body, body.messages, service.settings.max_messages)
            return list(session.input_processor.render_chat(conversation).tokens)
        add_special = body.add_special_tokens is not False
        return session.tokenizer.encode(body.prompt or "", add_special_tokens=add_special)

    tokens = await service.run_limited(encode)
    strings = (
        [session.tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        if body.return_token_strs
        else None
    )
    return json_response(
        TokenizeAnswer(
            count=len(tokens),
            max_model_len=session.engine.max_seq_len,
            tokens=tokens,
            token_strs=strings,
        )
    )


async def detokenize(service: Service, request: Request) -> Response:
    """`POST /detokenize`."""
    body = await read_body(request, DetokenizeBody, service.settings.max_body_bytes)
    session = service.session
    service.check_model(body.model)
    for token in body.tokens:
        if not 0 <= token < session.engine.model.vocab:
            raise ApiError(
                400,
                f"tokens must be from 0 to {session.engine.model.vocab - 1}, got {token}",
                param="tokens",
            )
    decode = session.tokenizer.decode
    text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
    return json_response(DetokenizeAnswer(prompt=text))


async def show_tokenizer(service: Service, request: Request) -> Response:
    """`GET /tokenizer_info`."""
    session = service.session
    config = await asyncio.to_thread(
        describe_tokenizer,
        session.tokenizer,
        session.input_processor.template,
        session.engine.directory,
    )
    # The standard library writes integers of any size; many checkpoints have a length of 10^30.
    return Response(json.dumps(config), media_type="application/json")
