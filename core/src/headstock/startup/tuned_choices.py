"""What 'headstock tune' measured, kept on disk: a file for each model, device and software."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from headstock.config import EngineConfig
from headstock.errors import ModelError, UsageError, shorten
from headstock.logs import log_event
from headstock.selection.auto_choices import FastestChoices
from headstock.selection.model_needs import AttentionNeeds
from headstock.spi import DeviceEnv
from headstock.startup.tuning_subject import TuningSubject, describe_subject, read_subject

LOG = logging.getLogger(__name__)

FORMAT = 1
"""The version of the files; those of another version are not read."""


@frozen(kw_only=True)
class TunedCandidate:
    """One pair of choices.

    milliseconds: of each step; None where the pool cannot hold it, a busy machine hid it, or an
        earlier one was hopeless; empty where the pair cannot run, for the reason in `refusal`
    options: of the ops, each as `--opt` has it
    runner: whose graphs there are of steps with prompts; empty without
    """

    attn: str
    ops: str
    milliseconds: tuple[float | None, ...] = ()
    refusal: str = ""
    options: tuple[str, ...] = ()
    runner: str = ""


@frozen(kw_only=True)
class ArrivalTimes:
    """How long a prompt takes that arrives while rows decode, in milliseconds.

    first_token: from the arrival to the prompt's first token
    gap: the longest between two tokens of a row meanwhile
    """

    first_token: float
    gap: float


@frozen(kw_only=True)
class TunedBucket:
    """A size of steps with a prompt and rows that decode, in tokens.

    replayed: where the step is padded to a graph    launched: where its operations are launched
    refusal: why it has no times; empty where it has both
    """

    tokens: int
    replayed: ArrivalTimes | None = None
    launched: ArrivalTimes | None = None
    refusal: str = ""


@frozen(kw_only=True)
class TunedChoices:
    """The measured choices, starting with that of `auto`, and the fastest of them.

    buckets: the steps with prompts for which a graph was measured, smallest first
    """

    subject: TuningSubject
    date: str
    steps: tuple[str, ...]
    candidates: tuple[TunedCandidate, ...]
    fastest: FastestChoices
    buckets: tuple[TunedBucket, ...] = ()


def find_tuned_choices(
    config: EngineConfig, env: DeviceEnv, directory: Path, needs: AttentionNeeds
) -> tuple[TunedChoices | None, str]:
    """Find what was measured for this model, device and software, and a note on it.

    The note says what `auto` takes, or that other software was measured; it may be empty.

    raises: UsageError for a folder that is none
    """
    # Most machines were never tuned, and start without a look at versions.
    if config.tuned_choices is None or not os.path.exists(_find_folder(config.tuned_choices)):
        return None, ""
    subject = describe_subject(env, directory, needs.dtype, needs.kv_dtype)
    choices = _read_choices_of(config.tuned_choices, subject)
    if choices is not None:
        return choices, _describe_choices(config, choices)
    return None, _explain_stale_choices(config.tuned_choices, subject)


def load_tuned_choices(config: EngineConfig, env: DeviceEnv) -> tuple[TunedChoices | None, str]:
    """The choices that an engine of this configuration would take, or the reason for none.

    raises: UsageError, ModelError
    """
    if config.tuned_choices is None:
        return (
            None,
            "tuned_choices (--tuned-choices): expected a directory, got off, which keeps nothing",
        )
    subject = read_subject(config, env)
    path = _find_folder(config.tuned_choices) / subject.file_name
    choices = _read_choices_of(config.tuned_choices, subject)
    if choices is not None:
        return choices, ""
    if path.exists():
        return None, f"{path} cannot be read; run 'headstock tune' again, which writes it anew"
    return None, (
        _explain_stale_choices(config.tuned_choices, subject)
        or f"tuned_choices (--tuned-choices) {config.tuned_choices} has no choices for this "
        "model, device and software; run 'headstock tune' without --show"
    )


def read_tuned_choices(path: Path) -> TunedChoices | None:
    """Read a file; None, with a line in the log, for one that is damaged or of another format."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
        if content.pop("format") != FORMAT:
            return None
        return TunedChoices(
            subject=TuningSubject(**content.pop("subject")),
            steps=tuple(content.pop("steps")),
            candidates=tuple(map(_read_candidate, content.pop("candidates"))),
            buckets=tuple(map(_read_bucket, content.pop("buckets", ()))),
            fastest=_read_fastest(content.pop("fastest")),
            **content,
        )
    except (OSError, ValueError) as error:
        reason = str(error)
    except (KeyError, TypeError, AttributeError):
        reason = "its fields are not those that 'headstock tune' writes"
    LOG.warning(
        log_event(
            "tuned choices are not read",
            file=path,
            reason=reason,
            next="run 'headstock tune' again, which writes it anew",
        )
    )
    return None


def create_choices_folder(folder: str) -> Path:
    """Create the folder if it is missing, and return its path.

    raises: UsageError if the path is not a folder, ModelError if it cannot be written
    """
    path = _find_folder(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise _cannot_write(folder, error) from error


def write_tuned_choices(folder: str, choices: TunedChoices) -> Path:
    """Write the file whole or not at all, and return its path.   raises: UsageError, ModelError"""
    path = create_choices_folder(folder) / choices.subject.file_name
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"format": FORMAT} | attrs.asdict(choices), file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return path


def _find_folder(folder: str) -> Path:
    """The path of a folder that may be missing.   raises: UsageError for what is not a directory"""
    # os.path functions do not raise, not even for a missing home or an unreadable directory.
    path = Path(os.path.expanduser(folder))
    if str(path).startswith("~"):
        raise UsageError(
            "tuned_choices (--tuned-choices): expected a directory or off, got "
            f"{shorten(folder, 300)}, of a user that does not exist"
        )
    if os.path.exists(path) and not os.path.isdir(path):
        raise UsageError(
            "tuned_choices (--tuned-choices): expected a directory or off, got the file "
            f"{shorten(folder, 300)}"
        )
    return path


def _cannot_write(folder: str, error: OSError) -> ModelError:
    return ModelError(
        f"tuned_choices (--tuned-choices) {shorten(folder, 300)}: cannot be written: "
        f"{error.strerror}; pass a directory that can"
    )


def _describe_choices(config: EngineConfig, tuned: TunedChoices) -> str:
    """A note on what `auto` takes because it was measured; empty where nothing is `auto`."""
    fastest = tuned.fastest
    settings = (
        ("attn (--attn)", config.attn, fastest.attn),
        ("ops (--ops)", config.ops, fastest.ops),
    )
    taken = [f"{flag} {name}" for flag, value, name in settings if value == "auto"]
    notes = []
    if taken:
        notes.append(
            f"auto begins with {' and '.join(taken)}, the fastest that 'headstock tune' measured "
            f"on {tuned.date}"
        )
    if fastest.options and config.ops in ("auto", fastest.ops):
        names = ", ".join(each.partition("=")[0] for each in fastest.options)
        notes.append(f"'headstock tune' measured {names} on {tuned.date}")
    return "; ".join(notes)


def _read_choices_of(folder: str, subject: TuningSubject) -> TunedChoices | None:
    """The choices of a subject; None where it was not measured."""
    path = _find_folder(folder) / subject.file_name
    return read_tuned_choices(path) if path.exists() else None


def _explain_stale_choices(folder: str, subject: TuningSubject) -> str:
    """Which versions have changed since this model was measured; empty where it never was."""
    for path in sorted(_find_folder(folder).glob("*.json")):
        # The subject's own file was damaged, which the log already says.
        choices = None if path.name == subject.file_name else read_tuned_choices(path)
        if choices is None:
            continue
        measured = choices.subject
        if (measured.device, measured.model) == (subject.device, subject.model):
            before, now = measured.software, subject.software
            changed = sorted(name for name in {*now, *before} if before.get(name) != now.get(name))
            return (
                f"'headstock tune' measured this model on {choices.date} with another version of "
                f"{', '.join(changed)}: its choices are not taken until it has run again"
            )
    return ""


def _read_candidate(fields: Mapping[str, Any]) -> TunedCandidate:
    return TunedCandidate(**_make_tuples(fields, "milliseconds", "options"))


def _read_bucket(fields: Mapping[str, Any]) -> TunedBucket:
    times = {name: fields[name] for name in ("replayed", "launched") if fields[name] is not None}
    return TunedBucket(
        tokens=fields["tokens"],
        refusal=fields["refusal"],
        **{name: ArrivalTimes(**each) for name, each in times.items()},
    )


def _read_fastest(fields: Mapping[str, Any]) -> FastestChoices:
    fastest = FastestChoices(**_make_tuples(fields, "options"))
    most = fastest.graph_tokens
    if most is not None and (type(most) is not int or most < 0):
        raise ValueError(f"graph_tokens: expected a number of tokens, got {most!r}")
    return fastest


def _make_tuples(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The fields of a record, those of these names as tuples; a file may lack one."""
    return dict(fields) | {name: tuple(fields.get(name, ())) for name in names}
