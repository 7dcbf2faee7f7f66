"""Run a broken plugin; the exit code and the error that a user sees."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, frozen

import headstock_demo
from headstock import LLM, SamplingParams
from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import EngineDied, HeadstockError, RequestError
from headstock.scheduler import Request
from headstock.structured_outputs import StructuredOutputsParams

from .cases import CASES, Broken

CHECKPOINT = Path(headstock_demo.__file__).parent / "checkpoint"
DEBUG = {"debug_invariants": True, "debug_attention": True, "debug_ops": True}
SETTINGS = {
    "attention": "attn",
    "cache": "cache_type",
    "checkpoint": "model",
    "grammar": "grammar",
    "logits": "logits_processors",
    "ops": "ops",
    "proposer": "proposer",
    "runner": "runner",
    "scheduler": "scheduler",
    "tools": "tool_parser",
}
FORMS = {case.name for case in CASES if case.kind == "grammar"}
"""Engines of grammars, under which all answers have one."""
TEMPLATE = "{% if tools %}{% endif %}{{ messages[0].content }}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
WAVES = (
    (("a", 3, 21, "red"), ("b", 4, 11, "red")),
    (("c", 3, 21, "blue"), ("d", 5, 9, "blue")),
    (("e", 3, 26, "red"), ("f", 3, 21, "blue"), ("g", 7, 15, "red")),
)
"""Requests that run together: id, seed and length of the prompt, namespace. Prompts of one seed
begin alike, so that prefixes are shared within a namespace.
"""


@frozen
class Outcome:
    """How a run ended; `error` is empty for exit code 0."""

    exit_code: int
    error: str
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()


def run_case(case: Broken | None, folder: Path, *, debug: bool) -> Outcome:
    """Run a broken plugin, or the sound ones where there is none."""
    if case is not None and case.kind == "command":
        return run_command(case)
    if case is not None and case.kind == "tools":
        return run_conversation(make_config(case, folder, debug=debug))
    try:
        engine = Engine(make_config(case, folder, debug=debug))
    except HeadstockError as error:
        return Outcome(error.exit_code, check_error(str(error)))
    try:
        form = StructuredOutputsParams(regex="[a-z ]+") if engine.config.grammar in FORMS else None
        return run_requests(engine, form, clears=case is not None and case.clears)
    finally:
        engine.close()


def make_config(case: Broken | None, folder: Path, *, debug: bool) -> EngineConfig:
    """A small engine with the case's plugin."""
    settings: dict[str, Any] = {"model": str(CHECKPOINT), "grammar": "off"}
    settings |= DEBUG if debug else {}
    if case is not None and case.kind == "model":
        model = str(write_checkpoint(folder, case.name))
        settings |= {"model": model, "load_format": "dummy"}
    elif case is not None:
        name: Any = (case.name,) if case.kind == "logits" else case.name
        settings |= {SETTINGS[case.kind]: name}
    return EngineConfig(
        **({"attn": "sdpa", "ops": "torch", "runner": "eager"} | settings),
        num_pages=60,
        page_size=4,
        max_seq_len=48,
        max_running_requests=4,
        max_batch_tokens=16,
    )


def write_checkpoint(folder: Path, architecture: str) -> Path:
    """A config.json of the demo model's, for another architecture."""
    path = folder / architecture
    path.mkdir(exist_ok=True)
    fields = json.loads((CHECKPOINT / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"architectures": [architecture]}))
    return path


def run_requests(
    engine: Engine, form: StructuredOutputsParams | None = None, *, clears: bool
) -> Outcome:
    """Run the waves of requests, up to the first thing that is said.

    form: of the answers; any if there is none
    """
    tokens: dict[str, list[int]] = {}
    try:
        for wave in WAVES:
            for request in map(make_request, wave):
                engine.submit(with_form(request, form))
                tokens[request.id] = []
            while engine.has_work:
                for update in engine.step():
                    tokens[update.id] += update.tokens
                    if update.finish_reason == "error":
                        return Outcome(RequestError.exit_code, check_error(str(update.error)))
        if clears:
            engine.reset_prefix_cache()
            engine.step()
    except RequestError as error:
        return Outcome(error.exit_code, check_error(str(error)))
    except HeadstockError as error:
        # The loop ends the engine with it, whatever it is.
        return Outcome(EngineDied.exit_code, check_error(str(error)))
    return Outcome(0, "", tuple((name, tuple(found)) for name, found in tokens.items()))


def make_request(one: Sequence[Any]) -> Request:
    """A request: "b" has a temperature, "c" wants log-probabilities, others are greedy."""
    name, seed, length, namespace = one
    prompt = np.random.default_rng(seed).integers(3, 700, 40)[:length].astype(np.int32)
    params = SamplingParams(
        temperature=0.9 if name == "b" else 0.0, seed=0, logprobs=1 if name == "c" else None
    )
    return Request(id=name, prompt=prompt, max_tokens=6, namespace=namespace, params=params)


def with_form(request: Request, form: StructuredOutputsParams | None) -> Request:
    """The request, for an answer of this form."""
    if form is None:
        return request
    return evolve(request, params=evolve(request.params, structured_outputs=form), stop_ids=(0,))


def run_conversation(config: EngineConfig) -> Outcome:
    """Ask one thing with a tool at hand."""
    try:
        with LLM(config=evolve(config, chat_template=TEMPLATE)) as llm:
            (output,) = llm.chat(
                [{"role": "user", "content": "12 + 30 ="}],
                SamplingParams(temperature=0.0, max_tokens=5),
                tools=[TOOL],
                split_answers=True,
            )
    except HeadstockError as error:
        return Outcome(error.exit_code, check_error(str(error)))
    (answer,) = output.outputs
    if answer.error is not None:
        return Outcome(RequestError.exit_code, check_error(answer.error))
    return Outcome(0, "", (("chat", tuple(answer.token_ids)),))


def run_command(case: Broken) -> Outcome:
    """Run a verb in this process."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = main([case.name, "--port"])
    return Outcome(code, check_error(errors.getvalue()))


def check_error(text: str) -> str:
    """An error's text, which is one line of 400 characters at most."""
    text = text.strip()
    assert len(text) <= 400, f"an error of {len(text)} characters: {text}"
    assert "\n" not in text, f"an error of several lines: {text}"
    return text
