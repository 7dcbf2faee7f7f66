"""What only holders of a key may do: abort a request, and empty the prefix cache.

A server without a key has none of these routes.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headstock_openai_server.api.answers import Aborted, Done
from headstock_openai_server.api.errors import not_found
from headstock_openai_server.api.schema import AbortBody
from headstock_openai_server.engine.service import Service
from headstock_openai_server.http.decoding import read_body
from headstock_openai_server.routes.answering import json_response


async def abort_request(service: Service, request: Request) -> Response:
    """`POST /abort_request`: end what a stream's chunks, or `/live`, know by this id.

    raises: ApiError
    """
    body = await read_body(request, AbortBody, service.settings)
    service.check_serving()
    count = service.abort(body.rid)
    if not count:
        raise not_found("no request with this id runs; /live has the ids of all that run", "rid")
    return json_response(Aborted(aborted=count))


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """`POST /reset_prefix_cache`: later requests find no prefix of earlier ones.

    raises: ApiError, EngineDied
    """
    service.check_serving()
    service.loop.reset_prefix_cache()
    return json_response(Done(status="ok"))
