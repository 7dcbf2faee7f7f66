"""The settings of a server, besides those of its engine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from attrs import Attribute, Factory, field, fields, frozen

from headstock import SamplingParams
from headstock.config import FlagParser
from headstock.errors import UsageError, name_setting, shorten

API_KEY = "HEADSTOCK_API_KEY"
"""The environment variable with a key: a process's flags are visible to all users."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
HOST_NAME = re.compile(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.IGNORECASE)
ROOT_PATH = re.compile(r"(/[\w.~-]+)+")


@frozen
class Number:
    """How to parse a flag's number: an integer or a float from `least` to `most`."""

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
    """Integers in full, other numbers in short form."""
    return str(int(number)) if number == int(number) else f"{number:g}"


COUNT = Number(1, 2**31 - 1)
SECONDS = Number(0.1, 86_400.0, whole=False)


def _limit(default: Any, number: Number, text: str) -> Any:
    """A field that is a numeric flag."""
    return field(default=default, metadata={"number": number, "help": text})


def _text(metavar: str, text: str, default: str = "") -> Any:
    """A field that is a flag with text."""
    return field(default=default, metadata={"metavar": metavar, "help": text})


def _texts(metavar: str, text: str) -> Any:
    """A field that is a flag with text, which may be given several times."""
    return field(default=(), metadata={"metavar": metavar, "help": text})


@frozen(kw_only=True)
class ServerSettings:
    """A server's address, its API keys, and the limits that protect clients from each other."""

    host: str = _text("ADDRESS", "address", "127.0.0.1")
    port: int = 8000
    uds: str = _text("PATH", "a Unix socket to listen on instead of an address")
    root_path: str = _text("PATH", "the path under which a proxy shows the server, such as /llm")
    ssl_certfile: str = _text("FILE", "certificates as PEM, for https")
    ssl_keyfile: str = _text("FILE", "the certificate's private key (default: in --ssl-certfile)")
    ssl_keyfile_password: str = _text("TEXT", "the password of the private key")
    ssl_ca_certs: str = _text("FILE", "certificates as PEM; clients need one that these signed")
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = _texts(
        "ORIGIN",
        "an origin whose pages may call the server from a browser, such as "
        "https://app.example.com; * for all, which needs --api-key; several times for several",
    )
    allowed_hosts: tuple[str, ...] = _texts(
        "NAME",
        "a name in addresses by which clients may call a server without a key, such as "
        "llm.example.com, or .example.com for all below it; several times for several (default: "
        "localhost and numeric addresses)",
    )
    model_names: tuple[str, ...] = Factory(tuple)
    access_log: str = _text("FILE|off", "a JSON line for each request; - is standard output", "-")
    metrics_prefix: str = _text(
        "NAME", "prefix of metric names; vllm is for dashboards made for vLLM", "headstock"
    )
    otlp_endpoint: str = _text(
        "URL",
        "where a span of each request goes, as OTLP over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces",
    )
    unknown_fields: str = "warn"
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
        return not (self.api_keys or self.uds or self.host in LOOPBACK)


def add_server_flags(parser: FlagParser) -> None:
    """Add the flags of the server."""
    section = parser.add_argument_group("server")
    for each in _list_texts():
        text, default = each.metadata["help"], each.default
        section.add_argument(
            _flag(each.name),
            action="store" if isinstance(default, str) else "append",
            default=default if isinstance(default, str) else [],
            metavar=each.metadata["metavar"],
            help=f"{text} (default: {default})" if default else text,
        )
        if each.name == "host":
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
        "--unknown-fields",
        choices=("warn", "refuse"),
        default="warn",
        help="what happens to fields of other servers that change no token, such as metadata: warn "
        "accepts them, with a log line for each name and the header X-Ignored-Fields (default: "
        "warn)",
    )
    limits = parser.add_argument_group("limits")
    for name, number, text, default in list_limits():
        flag = _flag(name)
        limits.add_argument(
            flag,
            type=_make_reader(flag, number),
            default=default,
            metavar="N" if number.whole else "SECONDS",
            help=f"{text} (default: {_spell(default)})",
        )


def _list_texts() -> list[Attribute[Any]]:
    """The fields that are flags with text."""
    return [each for each in fields(ServerSettings) if "metavar" in each.metadata]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
    """The settings from parsed flags and the environment.   raises: UsageError"""
    keys = [*options.api_key, *([environ[API_KEY]] if environ.get(API_KEY) else [])]
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                "--api-key: expected one or more printable ASCII characters without spaces"
            )
    names = tuple(options.served_model_name) or (model,)
    if not all(names):
        raise UsageError("--served-model-name: expected one or more characters, got none")
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
    texts: dict[str, Any] = {
        each.name: tuple(value) if isinstance(value := getattr(options, each.name), list) else value
        for each in _list_texts()
    }
    settings = ServerSettings(
        port=options.port,
        api_keys=tuple(keys),
        model_names=names,
        unknown_fields=options.unknown_fields,
        **texts,
        **{name: getattr(options, name) for name, *_ in list_limits()},
    )
    _check_callers(settings)
    return settings


def _check_callers(settings: ServerSettings) -> None:
    """Raise UsageError for values that say wrongly who may call the server, and how."""
    for origin in settings.allow_origins:
        if origin == "*" and not settings.api_keys:
            raise UsageError(
                "--allow-origins: expected the origins of pages, got * without a key, with which "
                "every page that anybody opens could use the model; set --api-key or name them"
            )
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            raise UsageError(
                "--allow-origins: expected * or an origin such as https://app.example.com, without "
                f"a path, got {shorten(origin)}"
            )
    for name in settings.allowed_hosts:
        if HOST_NAME.fullmatch(name) is None:
            raise UsageError(
                "--allowed-hosts: expected a name such as llm.example.com, without a port, or "
                f".example.com for all below it, got {shorten(name)}"
            )
    path = settings.root_path
    if path and ROOT_PATH.fullmatch(path) is None:
        raise UsageError(
            "--root-path: expected a path such as /llm, without a / at its end, got "
            f"{shorten(path)}"
        )
    for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
        if getattr(settings, name) and not settings.ssl_certfile:
            raise UsageError(f"{_flag(name)} needs --ssl-certfile")


def check_defaults(sampling: Mapping[str, object]) -> None:
    """Raise UsageError for sampling flags that make no sense as defaults, and RequestError for bad
    values.

    The others are the defaults for requests.
    """
    for name, flag in (("n", "-n"), ("logprobs", ""), ("prompt_logprobs", "")):
        if sampling.get(name) not in (None, 1):
            raise UsageError(
                f"{name_setting(name, flag)} changes the form of an answer; only requests may set "
                "it"
            )
    SamplingParams(max_tokens=None).replace(sampling)
