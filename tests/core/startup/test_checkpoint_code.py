"""Python code that a checkpoint brings is never run, and is needed by no served architecture."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from headstock import LLM, SamplingParams
from headstock.errors import CannotRun, ModelError
from headstock.startup.model_loading import locate_model, read_model


def write_code(directory: Path, config: dict[str, object]) -> None:
    """Write a config.json whose auto_map names code that ends the process."""
    config["auto_map"] = {
        "AutoConfig": "configuration_evil.Config",
        "AutoModelForCausalLM": "modeling_evil.Model",
    }
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("configuration_evil", "modeling_evil"):
        (directory / f"{name}.py").write_text("raise SystemExit('ran')\n")


def answer(directory: Path) -> str:
    """What a model says, greedily."""
    with LLM(str(directory), num_pages=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=3)
        return llm.generate("12 + 30 =", params)[0].outputs[0].text


def test_code_is_left_out_where_a_family_serves_the_architecture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    demo = locate_model("demo")
    for file in demo.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    write_code(tmp_path, json.loads((demo / "config.json").read_text()))
    caplog.set_level(logging.INFO)

    assert answer(tmp_path) == answer(demo) != ""
    assert "Python code of the checkpoint is not run" in caplog.text
    assert "does not read all of config.json" not in caplog.text


def test_code_of_an_architecture_that_nobody_serves_is_named(tmp_path: Path) -> None:
    write_code(tmp_path, {"architectures": ["CohereForCausalLM"]})
    with pytest.raises(CannotRun, match="the checkpoint's own Python code is never run; '"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("fields", "inputs"),
    [
        ({"vision_config": {"hidden_size": 8}}, "images"),
        ({"mm_vision_tower": "clip"}, "images"),
        ({"audio_config": {}, "vision_config": {}}, "images and sound"),
    ],
)
def test_a_model_with_a_tower_is_told_that_its_inputs_are_not_served(
    tmp_path: Path, fields: dict[str, object], inputs: str
) -> None:
    config = {"architectures": ["SomeForConditionalGeneration"], "text_config": {}, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CannotRun, match=f"takes {inputs}, which headstock does not serve; choose"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "inputs"), [("vision_config", "images"), ("audio_config", "sound")]
)
def test_a_known_architecture_with_a_tower_is_refused_by_its_inputs(
    tmp_path: Path, name: str, inputs: str
) -> None:
    config = json.loads((locate_model("demo") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: {"hidden_size": 8}}))
    with pytest.raises(ModelError, match=f"{name} is set, so the model takes {inputs}"):
        read_model(tmp_path)
