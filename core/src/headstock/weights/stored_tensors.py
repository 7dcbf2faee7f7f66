"""The tensors that a model directory stores, under the names that a model declares."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from attrs import frozen

from headstock.errors import ModelError, shorten
from headstock.logs import LogEvent, log_event
from headstock.spi import ParamSpec
from headstock.weights.directory import read_json, resolve_file, weight_files
from headstock.weights.gguf import INDEX, LINK, GgufFile, parse_index
from headstock.weights.safetensors_header import TensorEntry, read_header
from headstock.weights.tensor_files import SafetensorsFile, TensorFile


@frozen
class StoredTensors:
    """What files hold, by the names that they have there.

    place: the directory, or the one file that all come from, as errors name it
    entries: each tensor
    paths: the file that it is read from
    lost: names in the index that no file holds, with the file that it names for them
    remarks: what is odd about the directory, for the log
    open_file: opens one of the files
    """

    place: Path
    entries: Mapping[str, TensorEntry]
    paths: Mapping[str, Path]
    lost: Mapping[str, str]
    remarks: tuple[LogEvent, ...]
    open_file: Callable[[Path], TensorFile] = SafetensorsFile.open


def read_stored(directory: Path) -> StoredTensors:
    """Read the headers of a directory's files.

    Of several files with a tensor, the index decides.

    raises: ModelError when a file does not match its header, or nothing decides
    """
    if os.path.lexists(directory / INDEX):
        return _read_gguf(directory)
    files = weight_files(directory)
    headers = {name: read_header(path) for name, path in files.paths.items()}
    holders: dict[str, list[str]] = {}
    for file, header in headers.items():
        for name in header:
            holders.setdefault(name, []).append(file)
    owners: dict[str, str] = {}
    stale: list[str] = []
    for name, held_by in holders.items():
        assigned = files.assigned.get(name)
        if assigned not in held_by and len(held_by) > 1:
            raise ModelError(
                f"{shorten(name)} is in both {held_by[0]} and {held_by[1]} of {directory}, and the "
                "index chooses neither; remove the one that is out of date"
            )
        owners[name] = assigned if assigned in held_by else held_by[0]
        if assigned is not None and held_by != [assigned]:
            stale.append(name)
    remarks = list(files.remarks)
    if stale:
        name = stale[0]
        other = next(file for file in holders[name] if file != files.assigned[name])
        facts = {"tensor": name, "read": owners[name], "other": other, "tensors": len(stale)}
        remarks.append(log_event("files hold tensors that the index assigns elsewhere", **facts))
    return StoredTensors(
        place=directory,
        entries={name: headers[owner][name] for name, owner in owners.items()},
        paths={name: files.paths[owner] for name, owner in owners.items()},
        lost={name: file for name, file in files.assigned.items() if name not in owners},
        remarks=tuple(remarks),
    )


def _read_gguf(directory: Path) -> StoredTensors:
    """Read the index of a GGUF file's tensors, which have their published names there.

    raises: ModelError
    """
    path = resolve_file(directory, LINK)
    size, tensors = parse_index(directory / INDEX, read_json(directory, INDEX))
    entries = {
        name: TensorEntry(
            each.stored, each.shape, each.tensor.start, each.tensor.start + each.nbytes
        )
        for name, each in tensors.items()
    }
    return StoredTensors(
        place=path,
        entries=entries,
        paths=dict.fromkeys(entries, path),
        lost={},
        remarks=(),
        open_file=partial(GgufFile, tensors=tensors, size=size),
    )


def find_block_types(directory: Path) -> tuple[str, ...]:
    """Find the types of blocks that a directory's GGUF file has, those of most bytes first.

    raises: ModelError
    """
    if not os.path.lexists(directory / INDEX):
        return ()
    _, tensors = parse_index(directory / INDEX, read_json(directory, INDEX))
    counts: Counter[str] = Counter()
    for each in tensors.values():
        for part in each.tensors:
            if part.type.is_packed:
                counts[part.type.name] += part.nbytes
    return tuple(name for name, _ in counts.most_common())


def find_stored_names(
    stored: Collection[str], specs: Mapping[str, ParamSpec], directory: Path
) -> dict[str, str]:
    """The stored name of each tensor, by the name that the parameters have for it.

    A base model saves its tensors without the beginning that most names have: "layers.0..." for
    "model.layers.0...". A model that takes more than text keeps the decoder's under a longer
    beginning. A copy stands for the tensor that it copies where that is not stored.

    raises: ModelError where some names have that beginning and others lack it
    """
    known = set(_list_names(specs.values()))
    names = _rename(stored, specs.values(), directory)
    base, others = _find_beginnings(_list_sources(specs.values()), known)
    bare = [name for name in names if name not in known and base + name in known]
    whole = [name for name in names if name.startswith(base)]
    if base and bare and whole:
        raise ModelError(
            f"the weights in {directory} have names with {base!r} ({shorten(whole[0])}) and "
            f"without ({shorten(bare[0])}); rename them alike"
        )
    if base and bare:
        names = {
            name if name in known or name.startswith(others) else base + name: stored_name
            for name, stored_name in names.items()
        }
    for spec in specs.values():
        copy = next((name for name in spec.copies if name in names), None)
        if copy is not None and spec.sources[0][0] not in names:
            names[spec.sources[0][0]] = names.pop(copy)
    return names


def _rename(
    stored: Collection[str], specs: Collection[ParamSpec], directory: Path
) -> dict[str, str]:
    """The stored name of each tensor, by its name after the declared renames.

    raises: ModelError where two tensors get one name
    """
    renames = sorted({pair for spec in specs for pair in spec.renames}, key=lambda p: -len(p[0]))
    names: dict[str, str] = {}
    for name in stored:
        old, new = next((pair for pair in renames if name.startswith(pair[0])), ("", ""))
        other = names.setdefault(new + name.removeprefix(old), name)
        if other != name:
            raise ModelError(
                f"the weights in {directory} have {shorten(name)} and {shorten(other)}, two names "
                "of one tensor; remove the one that is out of date"
            )
    return names


def find_parts_left_out(names: Iterable[str], specs: Collection[ParamSpec]) -> dict[str, str]:
    """The tensors that are declared as left out, each with its tower, or "" without one."""
    parts = {beginning: tower for spec in specs for beginning, tower in spec.towers}
    parts |= {beginning: "" for spec in specs for beginning in spec.left_out}
    beginnings = tuple(parts)
    return {
        name: next(part for beginning, part in parts.items() if name.startswith(beginning))
        for name in names
        if name.startswith(beginnings)
    }


def _find_beginnings(sources: Iterable[str], known: set[str]) -> tuple[str, tuple[str, ...]]:
    """The beginning that most sources have, to the first dot, and those of other names."""
    counts = Counter(name.partition(".")[0] + "." for name in sources if "." in name)
    base = counts.most_common(1)[0][0] if counts else ""
    return base, tuple({name.partition(".")[0] + "." for name in known} - {base})


def _list_sources(specs: Iterable[ParamSpec]) -> Iterator[str]:
    """The names of the tensors that parameters are made of."""
    for spec in specs:
        for row in spec.sources:
            yield from row


def _list_names(specs: Iterable[ParamSpec]) -> Iterator[str]:
    """All names that a declaration has, and beginnings of names."""
    specs = list(specs)
    yield from _list_sources(specs)
    for spec in specs:
        yield from (*spec.ignored, *spec.copies, *spec.left_out)
        yield from (beginning for beginning, _ in spec.towers)
        if spec.whole is not None:
            yield spec.whole
