"""The file of a recording: a line with the version, a header as JSON, blocks of steps, an end mark.

Each part but the first line is a frame: four letters, the length of the data, a checksum over all
of it, the data. No block refers to an earlier one, so whole blocks can be read after the engine was
killed. Blocks are compressed one by one at zlib's fastest level: the thread that writes shares the
interpreter with the engine, and differences between steps pack well at any level.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from attrs import define

from headstock.errors import ModelError, UsageError, shorten
from headstock.record.anonymize import TokenAnonymizer
from headstock.record.block import BlockReader, BlockWriter
from headstock.record.header_rules import check_header
from headstock.record.recorded_step import PendingRecord, RecordedStep
from headstock.record.step_codec import Fields, can_read, list_fields, read_step, write_step

VERSION = 4
OLDEST_VERSION = 3
"""The first version that is still read: it has no clock and no users."""
FIRST = b"headstock recording "
FRAME_HEADER = struct.Struct("<4sII")
HEADER, BLOCK, END = b"head", b"step", b"end."

MAX_BLOCK_BYTES = 1 << 30
"""Most bytes of a block, packed or unpacked: a damaged length allocates no more."""


def write_header(file: BinaryIO, header: Mapping[str, Any]) -> None:
    """Write the version and the header, which come before the steps."""
    file.write(FIRST + b"%d\n" % VERSION)
    write_frame(file, HEADER, json.dumps({**header, "fields": list_fields()}).encode())


def write_frame(file: BinaryIO, kind: bytes, data: bytes) -> None:
    """Write one frame."""
    file.write(FRAME_HEADER.pack(kind, len(data), _checksum(kind, data)))
    file.write(data)


def write_block(file: BinaryIO, block: BlockWriter, count: int) -> None:
    """Write a block of `count` steps."""
    write_frame(file, BLOCK, zlib.compress(count.to_bytes(4, "little") + block.to_bytes(), 1))


def write_end_mark(file: BinaryIO) -> None:
    """Write the mark of a recording that was closed."""
    write_frame(file, END, b"")


def write_recording(
    file: BinaryIO,
    header: Mapping[str, Any],
    steps: Sequence[PendingRecord],
    anonymizer: TokenAnonymizer | None,
) -> None:
    """Write a whole recording."""
    write_header(file, header)
    block = BlockWriter()
    for pending in steps:
        write_step(block, pending, anonymizer)
    write_block(file, block, len(steps))
    write_end_mark(file)


def _checksum(kind: bytes, data: bytes) -> int:
    """CRC-32 over a frame's kind, length and data."""
    # the head too: a damaged length would shift all that follows
    return zlib.crc32(data, zlib.crc32(kind + len(data).to_bytes(4, "little")))


def open_for_writing(path: str | Path, mode: Literal["wb", "ab"] = "wb") -> BinaryIO:
    """Open the file to record into, emptied unless the mode says otherwise.   raises: ModelError"""
    try:
        return open(path, mode)
    except OSError as error:
        raise ModelError(
            f"record (--record) {shorten(path)}: cannot be written: {error.strerror}"
        ) from error


def _check_writable(path: str | None, *, overwrite: bool = False) -> bool:
    """Raise when a recording cannot be written to `path`; what the file holds stays as it is.

    returns: whether the file was made here
    raises: UsageError when the file is not empty and may not be overwritten, ModelError
    """
    # A pipe is not opened: its reader would take the closing for the end of the recording.
    if path is None or Path(path).is_fifo():
        return False
    try:
        open(path, "xb").close()
    except OSError:  # it is there, or `open_for_writing` says why it cannot be
        open_for_writing(path, "ab").close()
    else:
        return True
    if not overwrite and Path(path).is_file() and Path(path).stat().st_size > 0:
        raise UsageError(
            f"record (--record) {shorten(path)}: the file exists and is not empty; name another "
            "file, or replace it with record_overwrite (--record-overwrite)"
        )
    return False


@contextlib.contextmanager
def reserve_file(path: str | None, *, overwrite: bool = False) -> Iterator[None]:
    """Check that `path` can be written; while the block runs, an error removes a new empty file.

    raises: as `_check_writable`
    """
    # An engine takes seconds to load weights: a wrong path is found before that, and a start that
    # fails leaves no empty file behind.
    is_new = _check_writable(path, overwrite=overwrite)
    try:
        yield
    except BaseException:
        if is_new and path is not None:
            with contextlib.suppress(OSError):  # the failure that is being raised matters more
                if Path(path).stat().st_size == 0:
                    Path(path).unlink()
        raise


@define
class Recording:
    """A recording being read; its steps begin at byte `start`.

    `is_complete` turns False when `partial` is set and the file breaks off.
    """

    name: str
    file: BinaryIO
    partial: bool
    header: Mapping[str, Any]
    start: int
    is_complete: bool = True

    @property
    def first_step(self) -> int:
        """The number of its first step; not 0 when it holds only the steps before a crash."""
        return int(self.header["first"])

    def read_steps(self) -> Iterator[RecordedStep]:
        """Yield all steps in order; each call begins with the first.   raises: ModelError"""
        self.file.seek(self.start)
        self.is_complete, number = True, self.first_step
        while True:
            try:
                kind, data = read_frame(self.file, self.name, number)
            except _Truncated as error:
                if self.partial:
                    self.is_complete = False
                    return
                raise ModelError(f"{error}; --partial replays the steps before it") from None
            if kind == END:
                self._check_end()
                return
            for step in _decode_block(data, self.name, number, self.header["fields"]):
                yield step
                number += 1

    def _check_end(self) -> None:
        """Raise ModelError when something follows the end mark."""
        at = self.file.tell()
        more = self.file.seek(0, io.SEEK_END) - at
        if more:
            raise ModelError(
                f"{self.name} goes on for {more} bytes after its end mark, at byte {at}; cut them "
                "off"
            )


class _Truncated(Exception):
    """The file ends in the middle."""


def read_recording(path: str | Path, *, partial: bool = False) -> Recording:
    """Open a recording and check its header.   raises: ModelError"""
    name = shorten(path)
    try:
        # whole, because the steps may be read twice, and from a pipe
        file = io.BytesIO(Path(path).read_bytes())
    except OSError as error:
        raise ModelError(f"{name}: cannot be read: {error.strerror}") from error
    line = file.readline(64)
    if not line.startswith(FIRST) or not line.endswith(b"\n"):
        raise ModelError(f"{name} is not a recording; headstock run --record FILE makes one")
    if line not in [FIRST + b"%d\n" % each for each in range(OLDEST_VERSION, VERSION + 1)]:
        version = shorten(line.removeprefix(FIRST).decode(errors="replace"))
        raise ModelError(
            f"{name} is a recording of version {version} and this headstock reads versions "
            f"{OLDEST_VERSION} to {VERSION}; replay it with the headstock that wrote it"
        )
    try:
        kind, data = read_frame(file, name, 0)
    except _Truncated as error:
        raise ModelError(str(error)) from None
    header = _parse_header(data, name) if kind == HEADER else {}
    if not can_read(header.get("fields")):
        maker = shorten(header.get("headstock", "another"))
        raise ModelError(
            f"{name} was made by headstock {maker}, whose steps consist of other fields; replay it "
            "there"
        )
    try:
        check_header(header)
    except ValueError as error:
        raise ModelError(f"{name}: its header is not as this version writes it: {error}") from None
    return Recording(name, file, partial, header, file.tell())


def _parse_header(data: bytes, name: str) -> dict[str, Any]:
    """Return the header of a recording.   raises: ModelError"""
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}: its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(
            f"{name}: its header is not a JSON object; headstock run --record FILE writes one"
        )
    return header


def read_frame(file: BinaryIO, name: str, number: int) -> tuple[bytes, bytes]:
    """Return the next frame's kind and data; it begins with step `number`.

    raises: ModelError, _Truncated
    """
    at = file.tell()
    head = file.read(FRAME_HEADER.size)
    kind, length, checksum = (
        FRAME_HEADER.unpack(head) if len(head) == FRAME_HEADER.size else (b"", 0, 0)
    )
    data = file.read(min(length, MAX_BLOCK_BYTES))
    if len(head) < FRAME_HEADER.size or len(data) < length:
        raise _Truncated(
            f"{name} breaks off in the part at byte {at}, which begins with step {number}"
        )
    if _checksum(kind, data) != checksum:
        raise ModelError(
            f"{name} is damaged in the part at byte {at}, which begins with step {number}"
        )
    return kind, data


def _decode_block(data: bytes, name: str, number: int, fields: Fields) -> Iterator[RecordedStep]:
    """Yield the steps of a block, which begins with step `number`.   raises: ModelError"""
    try:
        # with a limit: a small block may unpack to any size
        unpacked = zlib.decompressobj().decompress(data, MAX_BLOCK_BYTES)
        count, block = int.from_bytes(unpacked[:4], "little"), BlockReader(unpacked[4:])
        for offset in range(count):
            yield read_step(block, number + offset, fields)
        if not block.is_at_end:
            raise ValueError("more data than steps")
    except (ValueError, TypeError, LookupError, zlib.error) as error:
        raise ModelError(
            f"{name}: a block after step {number} is not as this version writes it: {error}"
        ) from error
