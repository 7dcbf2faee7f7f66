"""Limits of a server, which may be lower than those of the parameters."""

from __future__ import annotations

from headstock import RequestError, SamplingParams
from headstock_openai_server.api.errors import refuse
from headstock_openai_server.settings import ServerSettings

WHOLE_CONTEXT = -1
"""The `truncate_prompt_tokens` of a prompt that leaves room for the answer."""


def find_num_kept(given: int | None, params: SamplingParams, max_seq_len: int) -> int | None:
    """How many tokens of a prompt are kept at most; None for all.   raises: ApiError"""
    if given is None:
        return None
    if given == WHOLE_CONTEXT:
        room = params.max_tokens or 1
        return max_seq_len - (room if room < max_seq_len else 1)
    if given < 1:
        raise refuse(
            f"truncate_prompt_tokens: expected -1 or a number from 1, got {given}",
            "truncate_prompt_tokens",
        )
    return given


def check_limits(params: SamplingParams, settings: ServerSettings) -> None:
    """Raise RequestError for parameters beyond the server's limits."""
    structure = params.structured_outputs
    longest = max(map(len, params.stop), default=0)
    counts = [
        ("stop", "strings", len(params.stop), settings.max_stop_strings),
        ("stop", "characters in a string", longest, settings.max_stop_chars),
        ("logit_bias", "entries", len(params.logit_bias or ()), settings.max_logit_bias),
        ("logprobs", "alternatives", params.logprobs or 0, settings.max_logprobs),
        ("prompt_logprobs", "alternatives", params.prompt_logprobs or 0, settings.max_logprobs),
    ]
    if structure is not None:
        most = settings.max_schema_bytes if structure.regex is None else settings.max_regex_bytes
        counts += [
            ("structured_outputs", "bytes", len(structure.text.encode()), most),
            ("structured_outputs", "levels", structure.depth, settings.max_schema_depth),
        ]
    for name, unit, count, most in counts:
        if count > most:
            raise RequestError(f"{name} has {count} {unit}; at most {most} are taken here", name)
