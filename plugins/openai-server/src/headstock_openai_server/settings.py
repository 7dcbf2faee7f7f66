"""The settings of a server, besides those of its engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from attrs import Factory, field, fields, frozen

from headstock import SamplingParams
from headstock.config import FlagParser
from headstock.errors import UsageError, name_setting, shorten

API_KEY = "HEADSTOCK_API_KEY"
"""The variable with a key: flags of a process can be read by everyone on the machine."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@frozen
class Number:
    """How a flag's number is read: an integer or a number from `least` to `most`."""

    least: float
    most: float
    whole: bool = True

    def read(self, text: str) -> float:
        """The number.   raises: ValueError"""
        value = int(text) if self.whole else float(text)
        if not (isfinite(value) and self.least <= value <= self.most):
            raise ValueError(text)
        return value

    def __str__(self) -> str:
        kind = "an integer" if self.whole else "a number"
        return f"{kind} from {_spell(self.least)} to {_spell(self.most)}"


def _spell(number: float) -> str:
    """A whole number in digits, others in short."""
    return str(int(number)) if number == int(number) else f"{number:g}"


COUNT = Number(1, 2**31 - 1)
SECONDS = Number(0.1, 86_400.0, whole=False)


def _limit(default: Any, number: Number, text: str) -> Any:
    """A field that is a flag with a number."""
    return field(default=default, metadata={"number": number, "help": text})


@frozen(kw_only=True)
class ServerSettings:
    """Where a server listens, who may ask, and the limits that keep clients from one another."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    model_names: tuple[str, ...] = Factory(tuple)
    access_log: str = "-"
    metrics_prefix: str = "headstock"
    otlp_endpoint: str = ""
    max_body_bytes: int = _limit(32 << 20, COUNT, "bytes of a request's body at most (413)")
    max_header_bytes: int = _limit(64 << 10, COUNT, "bytes of a request's headers at most (431)")
    max_headers: int = _limit(100, COUNT, "headers of a request at most (431)")
    max_prompts: int = _limit(256, COUNT, "prompts of a request at most (400)")
    max_messages: int = _limit(4096, COUNT, "messages of a request at most (400)")
    max_n: int = _limit(128, Number(1, 128), "answers to a prompt at most (400)")
    max_body_values: int = _limit(
        4_000_000,
        COUNT,
        "values in a request's body at most, an eighth of them lists, objects or keys (400)",
    )
    max_stop_strings: int = _limit(16, Number(1, 16), "stop strings at most (400)")
    max_stop_chars: int = _limit(256, Number(1, 256), "characters of a stop string at most (400)")
    max_logit_bias: int = _limit(1024, Number(1, 1024), "biased tokens at most (400)")
    max_logprobs: int = _limit(20, Number(0, 20), "alternatives to a token at most (400)")
    max_tools: int = _limit(128, Number(1, 256), "tools of a request at most (400)")
    max_schema_bytes: int = _limit(
        256 << 10, Number(1, 256 << 10), "bytes of a JSON schema or a grammar at most (400)"
    )
    max_schema_depth: int = _limit(64, Number(1, 64), "levels of a JSON schema at most (400)")
    max_regex_bytes: int = _limit(
        16 << 10, Number(1, 16 << 10), "bytes of a regular expression at most (400)"
    )
    max_queued_tokens: int = _limit(
        0,
        Number(0, 2**40),
        "prompt tokens that may wait for their first answer (429); 0: four times the KV pool",
    )
    header_timeout: float = _limit(10, SECONDS, "seconds for a request's headers to arrive")
    body_timeout: float = _limit(30, SECONDS, "seconds without a byte of a request's body")
    keep_alive: int = _limit(5, Number(1, 86_400), "seconds that an idle connection stays open")
    template_timeout: float = _limit(5, SECONDS, "seconds that a chat template may take (400)")
    idle_timeout: float = _limit(300, SECONDS, "seconds that a stream may bring no token")
    request_timeout: float = _limit(
        0,
        Number(0, 86_400.0, whole=False),
        "seconds that a request may take in all; 0 for as long as it takes",
    )
    unread_timeout: float = _limit(60, SECONDS, "seconds that a client may read nothing")
    watchdog: float = _limit(60, SECONDS, "seconds of an engine's silence until /health is 503")
    watchdog_exit: float = _limit(300, SECONDS, "seconds of silence until the server ends with 70")
    drain_delay: float = _limit(
        0,
        Number(0, 3600.0, whole=False),
        "seconds between the end's announcement on /health and the last new connection",
    )
    drain_timeout: float = _limit(
        30, Number(0, 86_400.0, whole=False), "seconds that running requests have at the end"
    )

    @property
    def is_open(self) -> bool:
        """Whether other machines may send requests without a key."""
        return not self.api_keys and self.host not in LOOPBACK


def add_server_flags(parser: FlagParser) -> None:
    """Add the flags of the server."""
    section = parser.add_argument_group("server")
    section.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address (default: 127.0.0.1)"
    )
    section.add_argument(
        "--port",
        type=_make_reader("--port", Number(0, 65_535)),
        default=8000,
        metavar="PORT",
        help="TCP port, 0 for a free one (default: 8000)",
    )
    section.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="the model's name for clients; several times for several (default: --model)",
    )
    section.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"a key that clients must send; several times for several; {API_KEY} holds one too",
    )
    section.add_argument(
        "--access-log",
        default="-",
        metavar="FILE|off",
        help="a JSON line for each request; - is standard output (default: -)",
    )
    section.add_argument(
        "--metrics-prefix",
        default="headstock",
        metavar="NAME",
        help="prefix of metric names; vllm is for dashboards made for vLLM (default: headstock)",
    )
    section.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="where a span of each request goes, as OTLP over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces (default: nowhere)",
    )
    limits = parser.add_argument_group("limits")
    for name, number, text, default in list_limits():
        flag = f"--{name.replace('_', '-')}"
        limits.add_argument(
            flag,
            type=_make_reader(flag, number),
            default=default,
            metavar="N" if number.whole else "SECONDS",
            help=f"{text} (default: {_spell(default)})",
        )


def list_limits() -> list[tuple[str, Number, str, Any]]:
    """Name, number, help and default of each limit."""
    return [
        (each.name, each.metadata["number"], each.metadata["help"], each.default)
        for each in fields(ServerSettings)
        if "number" in each.metadata
    ]


def _make_reader(flag: str, number: Number) -> Callable[[str], float]:
    """Reads the value of a flag for argparse."""

    def read(text: str) -> float:
        try:
            return number.read(text)
        except ValueError:
            raise UsageError(f"{flag}: expected {number}, got {shorten(text)}") from None

    return read


def read_settings(
    options: argparse.Namespace, environ: Mapping[str, str], model: str
) -> ServerSettings:
    """The settings that parsed flags and the environment give.   raises: UsageError"""
    keys = [*options.api_key, *([environ[API_KEY]] if environ.get(API_KEY) else [])]
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError("--api-key must be printable ASCII without spaces, and not empty")
    names = tuple(options.served_model_name) or (model,)
    if not all(names):
        raise UsageError("--served-model-name must not be empty")
    if not options.metrics_prefix.isidentifier():
        raise UsageError(
            "--metrics-prefix: expected letters, digits and _, got "
            f"{shorten(options.metrics_prefix)}"
        )
    if options.otlp_endpoint and not options.otlp_endpoint.startswith(("http://", "https://")):
        raise UsageError(
            "--otlp-endpoint: expected an address that begins with http:// or https://, got "
            f"{shorten(options.otlp_endpoint)}"
        )
    return ServerSettings(
        host=options.host,
        port=options.port,
        api_keys=tuple(keys),
        model_names=names,
        access_log=options.access_log,
        metrics_prefix=options.metrics_prefix,
        otlp_endpoint=options.otlp_endpoint,
        **{name: getattr(options, name) for name, *_ in list_limits()},
    )


def check_defaults(sampling: Mapping[str, object]) -> None:
    """Raise UsageError for sampling flags that no request could want as defaults, and RequestError
    for bad values.

    The others are the defaults for requests.
    """
    for name, flag in (("n", "-n"), ("logprobs", ""), ("prompt_logprobs", "")):
        if sampling.get(name) not in (None, 1):
            raise UsageError(
                f"{name_setting(name, flag)} changes the form of an answer; only requests may set "
                "it"
            )
    SamplingParams(max_tokens=None).replace(sampling)
