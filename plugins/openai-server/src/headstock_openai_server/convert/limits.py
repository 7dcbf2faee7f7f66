"""Limits of a server, which may be below those of the parameters themselves."""

from __future__ import annotations

from headstock import RequestError, SamplingParams
from headstock_openai_server.settings import ServerSettings


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
