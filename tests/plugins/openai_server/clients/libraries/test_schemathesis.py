"""schemathesis sends what the published document allows, and much that it does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from served import serve

from headstock_openai_server.api.operations import OPERATIONS

CHECKS = (
    "not_a_server_error,status_code_conformance,response_schema_conformance,"
    "content_type_conformance"
)


@pytest.mark.feature("W2")
def test_no_request_is_a_server_error_or_has_an_undocumented_status(tmp_path: Path) -> None:
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = shutil.which("schemathesis", path=folders)
    assert program is not None
    limits = ("--num-pages", "256", "--max-seq-len", "512", "--max-tokens", "8")
    with serve(*limits) as server:
        url = f"http://127.0.0.1:{server.port}/openapi.json"
        done = subprocess.run(
            [program, "run", url, "--checks", CHECKS, "--max-examples", "60", "--seed", "1"],
            cwd=tmp_path,  # it leaves a cache
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        # all but the document itself
        count = len(OPERATIONS) - 1
        assert f"{count} selected / {count} total" in done.stdout
        assert server.get("/health").json == {"status": "ok"}
        server.wait_for("headstock_kv_pages_live", 0)
    assert not any("level=error" in line for line in server.errors)
