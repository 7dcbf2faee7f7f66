"""Debug flags in the engine: no false alarm, and words that name the layer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from broken_parts.outcome import DEBUG, make_config, make_request
from broken_parts.specs import install
from families import Case
from family_cases import CASES
from fault_injection import FaultInjector

from headstock import SamplingParams
from headstock.config import EngineConfig
from headstock.debug.watch import DebugWatch
from headstock.engine.engine import Engine
from headstock.scheduler import Request

SMALL = {"attn": "sdpa", "ops": "torch", "page_size": 4, "num_pages": 60, "max_seq_len": 48}
BY_DEFAULT = ("gemma2", "lfm2", "deepseek_v3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The metadata of broken plugins."""
    path = tmp_path_factory.mktemp("broken")
    install(path)
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))


def run(folder: Path, case: Case, **settings: Any) -> tuple[dict[str, list[int]], Engine]:
    """Tokens of four requests that share steps, and the engine, closed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.hf))
    engine = Engine(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            dtype="float32",
            max_batch_tokens=9,
            max_running_requests=3,
            **(SMALL | settings),
        )
    )
    tokens: dict[str, list[int]] = {}
    for number, length in enumerate((3, 14, 23, 14)):
        prompt = np.random.default_rng(length).integers(3, 60, length).astype(np.int32)
        params = SamplingParams(temperature=0.7 * (number % 2), seed=number)
        request = Request(id=str(number), prompt=prompt, max_tokens=6, params=params)
        engine.submit(request)
        tokens[request.id] = []
    while engine.has_work:
        for update in engine.step():
            assert update.error is None, update.error
            tokens[update.id] += update.tokens
    engine.close()
    return tokens, engine


def check_family(folder: Path, case: Case) -> None:
    """A sound family runs under all flags, and every call of attention is compared."""
    plain, _ = run(folder, case)
    calls: list[int] = []

    def close(watch: DebugWatch) -> None:
        calls.append(watch.num_calls)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DebugWatch, "close", close)
        debug, engine = run(folder, case, **DEBUG)
    assert debug == plain
    layers = sum(layer.state is None for layer in engine.model.layers)
    # A step has one call a layer for its decode rows, one for the others, or both.
    assert calls[0] >= layers * engine.state.num_steps // 2


@pytest.mark.parametrize("model_type", BY_DEFAULT)
def test_windows_caps_latent_vectors_and_states_raise_no_alarm(
    tmp_path: Path, model_type: str
) -> None:
    check_family(tmp_path / "model", next(c for c in CASES if c.model_type == model_type))


@pytest.mark.feature("R8")
@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_family_raises_an_alarm(tmp_path: Path, case: Case) -> None:
    check_family(tmp_path / "model", case)


@pytest.mark.parametrize(
    ("setting", "name", "words"),
    [
        ("attn", "overflows", "not finite: first attention of layer 2 was not"),
        ("ops", "overflows", "not finite: first mlp of layer 0 by 'overflows' was not"),
    ],
)
def test_what_was_first_not_finite_is_told_under_invariants(
    folder: Path, setting: str, name: str, words: str
) -> None:
    config = make_config(None, folder, debug=False)
    engine = Engine(evolve(config, **{setting: name, "debug_invariants": True}))
    engine.submit(make_request(("a", 3, 21, "")))
    errors = [update.error for update in drain(engine) if update.error]
    engine.close()
    assert len(errors) == 1
    assert words in str(errors[0])


def test_a_row_that_is_not_finite_fails_alone_under_all_flags(folder: Path) -> None:
    config = make_config(None, folder, debug=True)
    engine = Engine(config, hooks=FaultInjector.parse(("nan@3:1",)))
    for one in (("a", 3, 9, ""), ("b", 4, 11, "")):
        engine.submit(make_request(one))
    reasons = {u.id: (u.finish_reason, u.error) for u in drain(engine) if u.finish_reason}
    engine.close()
    assert reasons["a"] == ("length", None)
    assert reasons["b"][0] == "error"
    assert "first attention of layer 0 was not" in str(reasons["b"][1])


@pytest.mark.feature("R8")
def test_each_flag_is_enough_for_what_it_is_for(folder: Path) -> None:
    config = make_config(None, folder, debug=False)
    for setting, name, flag in (
        ("attn", "wrong-scale", "debug_attention"),
        ("ops", "wrong-eps", "debug_ops"),
    ):
        engine = Engine(evolve(config, **{setting: name, flag: True}))
        engine.submit(make_request(("a", 3, 21, "")))
        errors = [str(update.error) for update in drain(engine) if update.error]
        engine.close()
        assert len(errors) == 1
        assert f"plugin '{name}' is off by" in errors[0]


def drain(engine: Engine) -> list[Any]:
    """All updates."""
    updates: list[Any] = []
    while engine.has_work:
        updates += engine.step()
    return updates
