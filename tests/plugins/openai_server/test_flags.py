"""Flags of a server: each limit at its edges, and what is refused before a model is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headstock import UsageError
from headstock_openai_server.command import main, make_parser
from headstock_openai_server.server import describe_address
from headstock_openai_server.settings import ServerSettings, list_limits, read_settings


def settings_of(*flags: str, environ: dict[str, str] | None = None) -> ServerSettings:
    return read_settings(make_parser().parse_args(list(flags)), environ or {}, "demo")


def test_the_defaults_are_those_of_the_settings() -> None:
    assert settings_of() == ServerSettings(model_names=("demo",))


@pytest.mark.feature("W10")
@pytest.mark.parametrize("limit", list_limits(), ids=lambda each: each[0])
def test_each_limit_is_a_flag_with_two_edges(limit: tuple[str, ...]) -> None:
    name, number, *_ = limit
    flag = f"--{name.replace('_', '-')}"
    for edge in (number.least, number.most):  # type: ignore[attr-defined]
        assert getattr(settings_of(flag, f"{edge:.0f}" if edge > 1 else str(edge)), name) == edge
    below, above = number.least - 1, number.most + 1  # type: ignore[attr-defined]
    for wrong in (f"{below:.1f}" if below % 1 else f"{below:.0f}", f"{above:.0f}", "nan", "x", ""):
        with pytest.raises(UsageError, match=f"{flag}: expected a"):
            settings_of(flag, wrong)


def test_keys_come_from_flags_and_the_environment() -> None:
    found = settings_of("--api-key", "a", "--api-key", "b", environ={"HEADSTOCK_API_KEY": "c"})
    assert found.api_keys == ("a", "b", "c")
    for wrong in ("", "a b", "ké", "a\n"):
        with pytest.raises(UsageError, match=r"--api-key: expected .* printable ASCII"):
            settings_of("--api-key", wrong)


def test_a_server_is_open_when_others_reach_it_without_a_key() -> None:
    assert not settings_of().is_open
    assert settings_of("--host", "0.0.0.0").is_open
    assert not settings_of("--host", "0.0.0.0", "--api-key", "a").is_open


def test_fields_without_effect_are_refused_only_when_a_flag_says_so() -> None:
    assert settings_of().unknown_fields == "warn"
    assert settings_of("--unknown-fields", "refuse").unknown_fields == "refuse"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--unknown-fields", "drop"), "--unknown-fields: invalid choice: 'drop'"),
        (("-n", "2"), "n (-n) changes the form of an answer"),
        (("--logprobs", "2"), "(--logprobs) changes the form"),
        (("--temperature", "9"), "(--temperature): expected a number between 0 and 2, got 9"),
        (("--port", "65536"), "--port: expected an integer from 0 to 65535, got 65536"),
        (("--metrics-prefix", "a-b"), "--metrics-prefix: expected letters"),
        (("--served-model-name", ""), "--served-model-name: expected"),
        (("--allow-origins", "*"), "got * without a key"),
        (("--allow-origins", "app.example.com"), "--allow-origins: expected * or an origin"),
        (("--allow-origins", "https://a.example/"), "--allow-origins: expected * or an origin"),
        (("--allowed-hosts", "a.example:80"), "--allowed-hosts: expected a name"),
        (("--allowed-hosts", "*"), "--allowed-hosts: expected a name"),
        (("--root-path", "llm"), "--root-path: expected a path"),
        (("--root-path", "/"), "--root-path: expected a path"),
        (("--ssl-keyfile", "key.pem"), "--ssl-keyfile needs --ssl-certfile"),
        (("--otlp-endpoint", "localhost"), "--otlp-endpoint: expected an address that begins"),
        (("--apikey", "x"), "did you mean --api-key?"),
    ],
)
def test_wrong_flags_are_refused_before_a_model_is_loaded(
    flags: tuple[str, ...], text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        main(list(flags))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "where", "text"),
    [
        ((), ("127.0.0.1", 80), "http://127.0.0.1:80"),
        ((), ("::1", 80, 0, 0), "http://[::1]:80"),
        (("--ssl-certfile", "x"), ("127.0.0.1", 80), "https://127.0.0.1:80"),
        (("--uds", "/run/h.sock"), "/run/h.sock", "unix:/run/h.sock"),
    ],
)
def test_addresses_are_written_as_clients_write_them(
    flags: tuple[str, ...], where: object, text: str
) -> None:
    listener: Any = SimpleNamespace(getsockname=lambda: where)
    assert describe_address(settings_of(*flags), listener) == text
