"""guidellm, unchanged, measures a server with the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from served import CHECKPOINT, OFFLINE, serve

COUNT = 20


@pytest.mark.feature("W1")
def test_twenty_requests_are_answered_in_full_and_without_an_error(tmp_path: Path) -> None:
    with serve("--num-pages", "256") as server:
        command = [
            *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target=http://127.0.0.1:{server.port}"),
            *("--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={COUNT}"),
            *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        ]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **OFFLINE},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        server.wait_for("headstock_kv_pages_live", 0)
        served = server.metric("headstock_requests_total")
        tokens = server.metric("headstock_output_tokens_total")
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    ends = ("successful", "errored", "incomplete")
    assert [len(benchmark["requests"][end] or []) for end in ends] == [COUNT, 0, 0]
    # it tries the server with requests of its own before
    assert served >= COUNT and tokens >= 8 * COUNT
    assert not any("level=error" in line for line in server.errors)
