"""inspect-ai, unchanged, evaluates a server with the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from served import OFFLINE, serve

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import generate


@task
def sums():
    pairs = [(2, 3), (14, 25), (40, 17), (61, 8)]
    samples = [Sample(input=f"What is {a} + {b}?", target=str(a + b)) for a, b in pairs]
    return Task(dataset=samples, solver=[generate()], scorer=match(numeric=True))
"""


def test_sums_are_scored(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(TASK)
    program = str(Path(sys.executable).parent / "inspect")
    with serve("--num-pages", "256", key="secret") as server:
        done = subprocess.run(
            [
                *(program, "eval", "sums.py", "--model", "openai-api/local/demo"),
                *("--display", "none", "--temperature", "0", "--max-retries", "0"),
                *("--log-format", "json", "--log-dir", str(tmp_path / "logs")),
            ],
            cwd=tmp_path,
            env={
                **os.environ,
                **OFFLINE,
                "LOCAL_BASE_URL": f"http://127.0.0.1:{server.port}/v1",
                "LOCAL_API_KEY": "secret",
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert server.metric("headstock_requests_total") == 4
    (file,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(file.read_text())
    assert log["status"] == "success"
    assert len(log["samples"]) == 4 and not any(each.get("error") for each in log["samples"])
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] >= 0.75
