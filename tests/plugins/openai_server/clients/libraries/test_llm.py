"""The command line `llm`, unchanged, asks a server with the demo model that its file names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from served import Served

SCHEMA = '{"type": "object", "properties": {"sum": {"enum": [4, 5]}}, "required": ["sum"]}'


def ask(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "llm"), *arguments],
        env=os.environ | {"LLM_USER_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.feature("W1", "W5")
def test_prompts_are_answered_and_schemas_followed(
    tmp_path: Path, chooser: Served, base_url: str
) -> None:
    model = {
        "model_id": "local",
        "model_name": "demo",
        "api_base": base_url,
        "api_key_name": "local",
        "supports_schema": True,
    }
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    (tmp_path / "keys.json").write_text(json.dumps({"local": chooser.key}))
    question = ("-m", "local", "-o", "temperature", "0", "What is 2 + 3?")
    assert ask(tmp_path, *question) == ask(tmp_path, "--no-stream", *question) == "5"
    assert json.loads(ask(tmp_path, "--schema", SCHEMA, *question)).keys() == {"sum"}
    assert ask(tmp_path, "-c", "What is 4 + 4?")  # the conversation goes on
