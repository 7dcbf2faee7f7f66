"""What rows with a grammar cost the host in a step, with a vocabulary as large as real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grammar_times
import pytest


@pytest.mark.feature("R4", "W14")
@pytest.mark.full
def test_32_rows_with_a_grammar_cost_a_step_2_ms_and_256_cost_16(tmp_path: Path) -> None:
    found = {}
    for num_rows in (32, 256):
        directory = tmp_path / str(num_rows)
        directory.mkdir()
        # A process of its own: behind thousands of tests this one has gigabytes of other objects.
        done = subprocess.run(
            [sys.executable, grammar_times.__file__, str(directory), str(num_rows)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found[num_rows], num_steps = json.loads(done.stdout)
        assert num_steps > 20
    assert (found[32] < 2, found[256] < 16) == (True, True), found
