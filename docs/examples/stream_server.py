"""Stream text over HTTP: python stream_server.py [PORT], then
curl -N 'http://127.0.0.1:8000/?prompt=Once+upon+a+time'
"""

import asyncio
import sys
from functools import partial
from urllib.parse import parse_qs, urlsplit

from headstock import LLM, SamplingParams


async def answer(llm: LLM, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Write the text as it comes. A client that leaves ends its request with its connection."""
    target = (await reader.readline()).decode().split()[1]
    prompt = parse_qs(urlsplit(target).query).get("prompt", ["Once upon a time"])[0]
    writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n")
    try:
        async for piece in llm.astream(prompt, SamplingParams(temperature=0, max_tokens=64)):
            writer.write(piece.outputs[0].text.encode())
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def main(port: int = 8000) -> None:
    """Serve until Ctrl-C; all clients share one engine, and its batches."""
    with LLM("demo") as llm:
        server = await asyncio.start_server(partial(answer, llm), "127.0.0.1", port)
        print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
