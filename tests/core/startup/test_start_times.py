"""How long the parts of a start take, as its summary says."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from headstock import LLM
from headstock.llm import get_session
from headstock.startup.start_times import StartTimes, format_parts

PARTS = ["plugins", "weights", "memory", "graphs"]


@pytest.mark.feature("V7")
def test_the_summary_has_the_time_of_each_part_and_their_sum() -> None:
    begin = time.monotonic()
    with LLM(num_pages=16) as llm:
        taken = time.monotonic() - begin
        summary = get_session(llm).engine.summary
        lines = get_session(llm).list_summary()

    assert [name for name, _ in summary.start] == PARTS
    assert all(seconds >= 0 for _, seconds in summary.start)
    assert 0 < sum(seconds for _, seconds in summary.start) <= taken
    assert f"start     {format_parts(summary.start)}" in summary.lines()
    (line,) = (line for line in lines if line.startswith("start "))
    assert re.search(r" \+ graphs \d+\.\d \+ tokenizer \d+\.\d = ", line)


def test_a_part_is_what_went_on_since_the_one_before() -> None:
    began = time.monotonic() - 5
    times = StartTimes(last=began)
    times.end_part("first")
    between = time.monotonic()
    times.end_part("second")
    ended = time.monotonic()

    (_, first), (_, second) = times.parts
    assert 5 <= first <= between - began
    assert second >= 0 and first + second <= ended - began
    assert format_parts((("a", 1.24), ("b", 0.5))) == "a 1.2 + b 0.5 = 1.7 s"


@pytest.mark.skipif(sys.platform != "linux", reason="the age is read from /proc")
def test_the_age_of_a_process_counts_from_its_start() -> None:
    program = (
        "import time; time.sleep(0.5); from headstock.startup.start_times import read_process_age;"
        "print(read_process_age())"
    )
    begin = time.monotonic()
    printed = subprocess.check_output([sys.executable, "-c", program], text=True)

    assert 0.5 <= float(printed) <= time.monotonic() - begin + 0.1
