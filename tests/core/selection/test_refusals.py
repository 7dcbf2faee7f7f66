"""Every kind of plugin can say that it cannot serve: one line with its name and its reason."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from broken_plugins import Dist, write_installed
from often import often

from headstock import LLM, CannotRun, PluginBroken, UsageError
from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.spi import PartQuery
from headstock.startup.host_memory import total_host_bytes

REASON = "it stays at home today"
ANSWERS = {
    "reason": f"(Rejection(code='home', message={REASON!r}, hint='Ask again tomorrow.'),)",
    "raised": f"refuse({REASON!r})",
    "fault": "{}['lost']",
    "nonsense": "'no'",
}
"""What `resolve` returns or raises; `refuse` raises CannotRun."""

WRAPPED = """
import attrs
from headstock.spi import CannotRun, Rejection
from {module} import {function} as shipped

def refuse(text):
    raise CannotRun(text)

def spec():
    return attrs.evolve(shipped(), name={name!r}, resolve={package!r} + ":resolve", {more})

def resolve(query, env):
    return {answer}
"""

SHIPPED = {
    "attention": "headstock_sdpa.plugin:spec",
    "cache": "headstock_radix_cache.plugin:spec",
    "scheduler": "headstock.builtin.specs:mixed",
    "runner": "headstock.builtin.specs:eager",
    "ops": "headstock.builtin.specs:torch_ops",
    "proposer": "headstock_ngram_proposer.plugin:spec",
    "model": "headstock_qwen.plugin:qwen3",
    "command": "headstock_replay_view.plugin:spec",
    "tools": "headstock_tool_parsers.plugin:hermes",
    "logits": "toy_processor:shift_spec",
    "grammar": "headstock_llguidance.plugin:spec",
}
"""The plugin that says no, but for its answer."""

RUN = ("run", "--prompt", "a", "--max-tokens", "1", "--num-pages", "64")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "attention": (*RUN, "--attn", "picky"),
    "cache": (*RUN, "--cache-type", "picky"),
    "scheduler": (*RUN, "--scheduler", "picky"),
    "runner": (*RUN, "--runner", "picky"),
    "ops": (*RUN, "--ops", "picky"),
    "proposer": (*RUN, "--proposer", "picky"),
    "model": (*RUN, "--model-family", "picky-model"),
    "command": ("picky",),
    "logits": (*RUN, "--logits-processors", "picky"),
    "grammar": (*RUN, "--grammar", "picky"),
    "checkpoint": (*RUN, "--model", "picky"),
}
"""The command line that names it. A tool parser is named by a conversation with tools."""

CHECKPOINT = f"""
from headstock.spi import CannotRun
def spec():
    raise CannotRun({REASON!r})
"""
MISPLACED = """
from headstock.spi import CheckpointSpec, SpiRange
def spec():
    return CheckpointSpec(
        name="picky", spi=SpiRange(0, 3), summary="lost", directory={directory}
    )
"""
ARCHITECTURE = "Qwen3ForCausalLM"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution on `sys.path`, whose plugin of a kind is a shipped one with an answer."""

    def write(kind: str, answer: str = "reason", more: str = "", module: str = "") -> None:
        package, name = f"picky_{kind}", ARCHITECTURE if kind == "model" else "picky"
        if kind != "checkpoint":
            home, _, function = SHIPPED[kind].partition(":")
            module = (
                WRAPPED.format(
                    module=home,
                    function=function,
                    package=package,
                    name=name,
                    answer=ANSWERS.get(answer, answer),
                    more=more,
                )
                + module
            )
        dist = Dist(name=f"picky-{kind}", plugin=name, kind=kind, module=module or CHECKPOINT)
        write_installed(tmp_path, (dist,))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return write


def one_line(text: str) -> str:
    """The only line of standard error, which is short enough to be read."""
    (line,) = text.splitlines()
    assert len(line) <= 400, line
    return line


@pytest.mark.feature("R6")
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_plugin_that_says_no_is_named_with_its_reason(
    install: Install, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install(kind)

    assert main(list(ARGUMENTS[kind])) == CannotRun.exit_code == 5
    line = one_line(capsys.readouterr().err)
    assert REASON in line and ("picky" in line or ARCHITECTURE in line)
    assert kind == "checkpoint" or "Ask again tomorrow." in line


@pytest.mark.parametrize("directory", ["'/no/such/folder'", "5"])
def test_a_checkpoint_whose_directory_is_not_there_is_named(
    install: Install, directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    install("checkpoint", module=MISPLACED.format(directory=directory))

    assert main(list(ARGUMENTS["checkpoint"])) == PluginBroken.exit_code == 3
    line = one_line(capsys.readouterr().err)
    assert "checkpoint 'picky' (picky-checkpoint 1.0" in line
    assert f"names the directory {directory.strip(chr(39))}, which is not there" in line


@pytest.mark.feature("R6")
@pytest.mark.parametrize("kind", often(1, ARGUMENTS))
def test_a_real_process_ends_with_the_same_line_and_code(
    install: Install, kind: str, tmp_path: Path
) -> None:
    install(kind)
    paths = (str(tmp_path), *(os.environ.get("PYTHONPATH") or "").split(os.pathsep))
    process = subprocess.run(
        [sys.executable, "-m", "headstock", *ARGUMENTS[kind]],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )

    assert process.returncode == 5
    assert REASON in one_line(process.stderr) and not process.stdout


@pytest.mark.parametrize("kind", [kind for kind in SHIPPED if kind not in ("attention", "tools")])
@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ("raised", 5, REASON),
        ("fault", 3, "its resolve raised KeyError: 'lost'"),
        ("nonsense", 3, "resolve: expected None or a tuple of Rejections, got no"),
    ],
)
def test_what_resolve_raises_or_returns_is_told_apart(
    install: Install,
    kind: str,
    answer: str,
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(kind, answer)

    assert main(list(ARGUMENTS[kind])) == code
    line = one_line(capsys.readouterr().err)
    assert says in line and ("picky" in line or ARCHITECTURE in line)


def test_a_tool_parser_can_say_no(install: Install) -> None:
    install("tools")
    with pytest.raises(CannotRun, match=rf"\(--tool-parser\) picky cannot serve here: {REASON}"):
        LLM("demo", num_pages=64, tool_parser="picky")


@pytest.mark.feature("R6")
def test_auto_never_asks_a_plugin_that_is_not_in_its_list(install: Install) -> None:
    for kind in ("runner", "ops", "attention"):
        install(kind, "fault")
    with LLM("demo", num_pages=64) as llm:
        assert "picky" not in str(llm._session.engine.summary)


@pytest.mark.parametrize(
    ("kind", "module", "says"),
    [
        ("runner", "refuse('no room here')", "no room here"),
        ("ops", "refuse('no kernels here')", "no kernels here"),
        ("proposer", "refuse('no draft model')", "no draft model"),
    ],
)
def test_an_implementation_may_say_no_when_it_is_made(
    install: Install, kind: str, module: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = f"\ndef make(*parts):\n    {module}\n"
    install(kind, "None", f"options=None, implementation='picky_{kind}:make'", made)

    assert main(list(ARGUMENTS[kind])) == 5
    line = one_line(capsys.readouterr().err)
    assert says in line and "picky" in line


# what a part is told before weights load


SEEN = """
import json
def note(query, env):
    seen = {
        "model": query.model.architecture, "dtype": query.dtype, "kv_dtype": query.kv_dtype,
        "formats": [str(each) for each in query.formats], "contiguous": query.contiguous,
        "max_rows": query.max_rows, "max_batch_tokens": query.max_batch_tokens,
        "max_seq_len": query.max_seq_len, "parts": dict(query.parts), "device": env.device,
        "memory_bytes": env.memory_bytes,
    }
    raise CannotRun(json.dumps(seen))
"""


def seen_by(engine: Callable[[], object]) -> dict[str, Any]:
    """What a part that refuses by all that it is told was told."""
    with pytest.raises(CannotRun) as refusal:
        engine()
    text = str(refusal.value)
    seen: dict[str, Any] = json.loads(text[text.index("{") : text.rindex("}") + 1])
    return seen


def test_a_runner_is_asked_last_and_knows_the_other_parts(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock.selection.refusals._MAX_REASON", 1000)
    install("runner", "note(query, env)", module=SEEN)
    settings = {"num_pages": 64, "max_running_requests": 7, "max_batch_tokens": 99}
    changes: dict[str, Any] = {"max_seq_len": 200, "ops": "torch"}
    plain = seen_by(lambda: Engine(EngineConfig(runner="picky", **settings)))
    changed = seen_by(lambda: Engine(EngineConfig(runner="picky", **settings, **changes)))

    assert plain == {
        "model": ARCHITECTURE,
        "dtype": "float32",
        "kv_dtype": "float32",
        "formats": [],
        "contiguous": False,
        "max_rows": 7,
        "max_batch_tokens": 99,
        "max_seq_len": plain["max_seq_len"],
        "parts": {"attention": "sdpa", "ops": "fbgemm", "cache": "radix", "scheduler": "mixed"},
        "device": "cpu",
        # All of it: what is free would differ from start to start.
        "memory_bytes": total_host_bytes(),
    }
    assert changed["max_seq_len"] == 200 < plain["max_seq_len"]
    assert changed["parts"]["ops"] == "torch"


def test_operations_learn_what_they_compute_before_weights_load(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstock.selection.refusals._MAX_REASON", 1000)
    made = """
from headstock.ops.torch_ops import TorchOps
class Picky(TorchOps):
    def configure(self, query, env):
        note(query, env)
"""
    install("ops", "None", "implementation='picky_ops:Picky'", SEEN + made)
    seen = seen_by(lambda: Engine(EngineConfig(ops="picky", num_pages=64, paged_attn="off")))

    assert (seen["dtype"], seen["device"], seen["contiguous"]) == ("float32", "cpu", True)
    assert seen["parts"] == {"attention": "sdpa"}


@pytest.mark.parametrize(
    ("raised", "error", "says"),
    [
        ("ValueError('width 96 has no kernel')", CannotRun, "cannot serve here: width 96 has no"),
        ("KeyError('x')", PluginBroken, "its configure raised KeyError: 'x'"),
    ],
)
def test_operations_that_refuse_or_fail_when_configured(
    install: Install, raised: str, error: type[Exception], says: str
) -> None:
    made = f"""
from headstock.ops.torch_ops import TorchOps
class Picky(TorchOps):
    def configure(self, query, env):
        raise {raised}
"""
    install("ops", "None", "implementation='picky_ops:Picky'", made)
    with pytest.raises(error, match=rf"ops \(--ops\) picky.*{says}"):
        Engine(EngineConfig(ops="picky", num_pages=64))


# what a runner states


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        (
            "models=frozenset({'LlamaForCausalLM'})",
            r"\(--runner\) picky runs LlamaForCausalLM alone, and this is Qwen3ForCausalLM",
        ),
        ("ops=frozenset({'triton'})", r"picky runs over ops \(--ops\) triton alone, and this is"),
    ],
)
def test_a_runner_states_the_models_and_operations_that_it_takes(
    install: Install, claim: str, says: str
) -> None:
    more = f"capabilities=attrs.evolve(shipped().capabilities, {claim})"
    install("runner", "None", more)
    with pytest.raises(CannotRun, match=says):
        Engine(EngineConfig(runner="picky", num_pages=64))


# options for every kind


def options(kind: str, made: str) -> tuple[str, str]:
    """The fields of a spec with one option, `loud`, and the code that makes its part."""
    more = f"options='picky_{kind}:Options', implementation='picky_{kind}:make'"
    return (
        more,
        f"""
@attrs.frozen
class Options:
    loud: int = 0

def make(*parts):
    options = parts[-1]
    assert type(options) is Options, options
    if options.loud:
        refuse("it is too loud: " + str(options.loud))
    {made}
""",
    )


@pytest.mark.parametrize(
    ("kind", "settings", "made"),
    [
        (
            "runner",
            {"runner": "picky"},
            "from headstock.builtin.eager import EagerRunner\n    return EagerRunner(parts[0])",
        ),
        (
            "scheduler",
            {"scheduler": "picky"},
            "from headstock.builtin.mixed import schedule\n    return schedule",
        ),
        (
            "model",
            {"model_family": "picky-model"},
            "from headstock_qwen.families import QWEN3\n    return QWEN3",
        ),
    ],
)
def test_runners_schedulers_and_families_have_options(
    install: Install, kind: str, settings: dict[str, Any], made: str
) -> None:
    install(kind, "None", *options(kind, made))
    name = ARCHITECTURE if kind == "model" else "picky"
    with LLM("demo", num_pages=64, **settings) as llm:
        assert llm.generate("a")[0].sound
    with pytest.raises(CannotRun, match="it is too loud: 3"):
        LLM("demo", num_pages=64, **settings, opt=[f"{kind}:{name}.loud=3"])
    with pytest.raises(UsageError, match="no such option"):
        LLM("demo", num_pages=64, **settings, opt=[f"{kind}:{name}.lod=3"])


def test_a_command_that_declares_options_is_refused(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("command", "None", "options='picky_command:Options'")

    assert main(["picky"]) == PluginBroken.exit_code == 3
    line = one_line(capsys.readouterr().err)
    assert "declares options, but commands and tool parsers are not given any" in line


def test_a_family_that_two_distributions_provide_is_picked_by_name(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("model", "None")

    assert main(list(RUN)) == 2
    line = one_line(capsys.readouterr().err)
    assert "(--model-family) headstock-qwen" in line and "(--model-family) picky-model" in line
    assert main([*RUN, "--model-family", "headstock-qwen", "--quiet"]) == 0
    assert main([*RUN, "--model-family", "picky-model", "--quiet"]) == 0
    capsys.readouterr()
    assert main([*RUN, "--model-family", "nobody"]) == 2
    line = one_line(capsys.readouterr().err)
    assert "(--model-family): expected" in line and "for Qwen3ForCausalLM, got nobody" in line


def test_every_field_of_the_query_is_told() -> None:
    names = {field.name for field in attrs.fields(PartQuery)}
    assert names == {
        "model",
        "dtype",
        "kv_dtype",
        "formats",
        "contiguous",
        "max_rows",
        "max_batch_tokens",
        "max_seq_len",
        "parts",
    }
