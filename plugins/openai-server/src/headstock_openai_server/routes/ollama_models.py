"""`/api/tags`, `/api/ps`, `/api/show`, `/api/version` and `/api/embed` of Ollama's API."""

from __future__ import annotations

import asyncio
import hashlib
import time
from datetime import UTC, datetime
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from headstock import HeadstockError
from headstock.requests import EngineSession
from headstock.text import Conversation, find_template
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.api.ollama_answer import (
    EmbedReply,
    OllamaDetails,
    OllamaModel,
    OllamaModelList,
    OllamaVersion,
    RunningModel,
    RunningModelList,
    ShownModel,
)
from headstock_openai_server.api.ollama_body import EmbedBody, ShowBody
from headstock_openai_server.convert.ollama_input import SAMPLING_NAMES
from headstock_openai_server.convert.sampling import name_fields
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import read_body
from headstock_openai_server.http.event_stream import run_for_client
from headstock_openai_server.http.middleware import RECORD
from headstock_openai_server.routes.answering import json_response
from headstock_openai_server.routes.completions import list_prompts
from headstock_openai_server.routes.embeddings import NAMES, run_embeddings
from headstock_openai_server.routes.ollama import find_model, write_time

TOOL = {"type": "function", "function": {"name": "tool", "parameters": {"type": "object"}}}
"""A tool that shows whether the model's calls would be found."""


async def show_ollama_version(service: Service, request: Request) -> Response:
    """`GET /api/version`."""
    return json_response(OllamaVersion())


async def list_ollama_models(service: Service, request: Request) -> Response:
    """`GET /api/tags`."""
    models = await asyncio.to_thread(describe_models, service)
    return json_response(OllamaModelList(models=models))


async def list_running_models(service: Service, request: Request) -> Response:
    """`GET /api/ps`: all served models, since they are loaded."""
    engine = service.session.engine
    models = await asyncio.to_thread(describe_models, service)
    return json_response(
        RunningModelList(
            models=[
                RunningModel(
                    name=each.name,
                    model=each.model,
                    modified_at=each.modified_at,
                    size=each.size,
                    digest=each.digest,
                    details=each.details,
                    size_vram=0 if engine.summary.device == "cpu" else each.size,
                    context_length=engine.max_seq_len,
                )
                for each in models
            ]
        )
    )


def describe_models(service: Service) -> list[OllamaModel]:
    """A model by each of its names.   raises: ApiError while it loads"""
    directory = service.session.engine.directory
    files = [*directory.glob("*.safetensors"), *directory.glob("*.gguf")]
    size = sum(path.stat().st_size for path in files)
    digest = hashlib.sha256(read_config(directory)).hexdigest()
    return [
        OllamaModel(
            name=name,
            model=name,
            modified_at=find_time(directory),
            size=size,
            digest=digest,
            details=describe_kind(service.session),
        )
        for name in service.settings.model_names
    ]


def read_config(directory: Path) -> bytes:
    """The bytes of config.json; none where the file is gone."""
    try:
        return (directory / "config.json").read_bytes()
    except OSError:
        return b""


def find_time(directory: Path) -> str:
    """When the model's directory changed last."""
    try:
        seconds = directory.stat().st_mtime
    except OSError:
        seconds = 0.0
    return write_time(datetime.fromtimestamp(seconds, UTC))


def describe_kind(session: EngineSession) -> OllamaDetails:
    """What kind of model is served."""
    summary = session.engine.summary
    return OllamaDetails(
        family=summary.architecture,
        families=[summary.architecture],
        quantization_level=summary.dtype,
    )


async def show_ollama_model(service: Service, request: Request) -> Response:
    """`POST /api/show`."""
    body = await read_body(request, ShowBody, service.settings)
    session = service.session
    name = body.model or body.name
    if name is None:
        raise refuse("model is missing", "model", "missing_required_parameter")
    find_model(service, name)
    kind = describe_kind(session)
    template = session.input_processor.template
    shown = ShownModel(
        parameters=list_defaults(service),
        template=await asyncio.to_thread(read_template, session, template),
        details=kind,
        model_info={
            "general.architecture": kind.family,
            f"{kind.family}.context_length": session.engine.max_seq_len,
        },
        capabilities=await service.run_limited(lambda: list_capabilities(session)),
        modified_at=find_time(session.engine.directory),
    )
    return json_response(shown)


def read_template(session: EngineSession, template: str | None) -> str:
    """The chat template; empty if the model has none."""
    try:
        return find_template(session.tokenizer, template, has_tools=False)
    except HeadstockError:
        return ""


def list_defaults(service: Service) -> str:
    """The server's own defaults of `options`, one a line."""
    params = service.default_params
    values = {name: getattr(params, field) for field, name in SAMPLING_NAMES.items()}
    stops = [("stop", f'"{text}"') for text in values.pop("stop")]
    lines = [(name, value) for name, value in values.items() if value is not None]
    return "\n".join(f"{name:<30} {value}" for name, value in (*lines, *stops))


def list_capabilities(session: EngineSession) -> list[str]:
    """What the model can do: complete texts, call tools, think."""
    found = ["completion"]
    message = {"role": "user", "content": "Hello"}
    for tools, capability in (((TOOL,), "tools"), ((), "thinking")):
        try:
            conversation = Conversation(messages=[message], tools=tools)
            # With a seed, or it would take one from the requests.
            request = session.input_processor.process_chat(
                conversation, {"seed": 0, "max_tokens": 1}, divides=True
            )
        except HeadstockError:
            continue
        if tools or (request.answer_format and request.answer_format.reasoning):
            found.append(capability)
    return found


async def answer_embed(service: Service, request: Request) -> Response:
    """Answer `/api/embed`.   raises: ApiError, HeadstockError, ClientGoneError"""
    began = time.monotonic()
    body = await read_body(request, EmbedBody, service.settings)
    service.check_serving()
    record = request.scope[RECORD]
    record["model"] = find_model(service, body.model)
    texts = [body.input] if isinstance(body.input, str) else body.input
    processor = service.session.input_processor

    async def embed() -> Response:
        prompts = list_prompts([*texts], service.settings.max_prompts, "input")
        # Long texts take milliseconds to tokenize.
        requests = await asyncio.to_thread(processor.process_embeddings, prompts, normalize=True)
        count = await run_embeddings(service, requests, record)
        return json_response(
            EmbedReply(
                model=body.model,
                embeddings=[each.final_output().outputs.embedding for each in requests],
                total_duration=round(1e9 * (time.monotonic() - began)),
                prompt_eval_count=count,
            )
        )

    with name_fields(NAMES):
        return await run_for_client(request, embed())
