"""Time a model's steps with each choice that `auto` could make, and choose the fastest."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import date
from statistics import median

import torch
from attrs import evolve, frozen

from headstock import LLM, CannotRun, EngineConfig, EngineDied, SamplingParams
from headstock.errors import describe_error
from headstock.llm import get_session
from headstock.logs import log_event
from headstock.selection import auto_choices
from headstock.startup import device, operation_tuning, tuned_choices, tuning_subject
from headstock_bench import bucket_tuning
from headstock_bench.workloads import Prompts

LOG = logging.getLogger("headstock.bench")

MARGIN = 0.03
"""The speed-up that a candidate needs to replace the default.

The time of a kernel varies by up to 6 % between machines, and by 1 to 2 % on one machine.
"""
RUNS = 3
"""Measurements of each step; the figure is the median."""
HOPELESS = 3.0
"""Multiple of the default's time at which a candidate's other steps are skipped."""
DECODE_CONTEXT = 512
"""Prompt tokens of the rows in timed decode steps."""
DECODE_STEPS = 24
"""Decode steps in a measurement."""


@frozen(kw_only=True)
class Step:
    """A timed step: a prompt of `tokens`, or the next token of each of `rows`."""

    tokens: int = 0
    rows: int = 0

    def __str__(self) -> str:
        return f"prompt {self.tokens}" if self.tokens else f"decode {self.rows}"


STEPS = {
    "cuda": (*(Step(tokens=n) for n in (128, 2048)), *(Step(rows=n) for n in (1, 8, 32, 128))),
    "cpu": (*(Step(tokens=n) for n in (128, 512)), *(Step(rows=n) for n in (1, 8, 32))),
}
"""Kind of device -> the timed steps."""

OnCandidate = Callable[[str], None]
"""Called with a description of the next measurement."""


def tune(
    config: EngineConfig,
    on_candidate: OnCandidate | None = None,
    open_llm: bucket_tuning.OpenLLM = bucket_tuning.open_llm,
) -> tuned_choices.TunedChoices:
    """Measure each choice of `--attn` and `--ops` that `auto` could make here.

    A setting other than `auto` does not change. The ops are measured with the fastest attention,
    and the fastest ops once more with the options that they found best here, if any. With these,
    steps with prompts are measured with and without graphs.

    raises: UsageError, ModelError; CannotRun when no choice can run here
    """
    env = device.describe_device(config.device)
    steps = STEPS[env.device]
    config = evolve(
        config,
        tuned_choices=None,
        record=None,
        defer_graphs=False,
        max_running_requests=min(config.max_running_requests, max(step.rows for step in steps)),
    )
    candidates: list[tuned_choices.TunedCandidate] = []

    def report(what: str) -> None:
        if on_candidate is not None:
            on_candidate(what)

    def measure(
        attn: str, ops: str, options: tuple[str, ...] = ()
    ) -> tuned_choices.TunedCandidate | None:
        """Measure a pair; None if it cannot run here."""
        report(f"--attn {attn} --ops {ops}{describe_options(options)}")
        asked = evolve(config, attn=attn, ops=ops, opt=(*options, *config.opt))
        try:
            default = next((each for each in candidates if each.milliseconds), None)
            candidate = evolve(_measure_candidate(asked, steps, default, open_llm), options=options)
        except CannotRun as error:
            candidates.append(tuned_choices.TunedCandidate(attn=attn, ops=ops, refusal=str(error)))
            return None
        finally:
            _free_memory()
        candidates.append(candidate)
        return candidate

    backends = operation_tuning.list_attention_candidates(config, env)
    by_attention = [each for name in backends if (each := measure(name, config.ops))]
    if not by_attention:
        raise CannotRun(
            "nothing that could be measured runs here: "
            + "; ".join(candidate.refusal for candidate in candidates)
        )
    fastest = choose_fastest(by_attention)
    others = [name for name in auto_choices.OPS if name != fastest.ops]
    if config.ops == "auto":
        by_ops = [each for name in others if (each := measure(fastest.attn, name))]
        fastest = choose_fastest([fastest, *by_ops])
    report(f"the options of --ops {fastest.ops}, if it has any to measure")
    named = evolve(config, attn=fastest.attn, ops=fastest.ops)
    options = operation_tuning.tune_operations(named, env)
    _free_memory()
    if options and (tuned := measure(fastest.attn, fastest.ops, options)):
        # No margin: each option was measured by itself and is a small part of most steps.
        fastest = tuned if compare_times(tuned, fastest) < 1 else fastest
    buckets: tuple[tuned_choices.TunedBucket, ...] = ()
    # User settings stay; without graphs there is no choice, and without a KV cache no step
    # combines a prompt with rows of one token.
    if fastest.runner and config.cuda_graph_max_tokens is None and config.kv_cache:
        report(f"steps with prompts, with and without graphs of --runner {fastest.runner}")
        try:
            chosen = evolve(named, opt=(*fastest.options, *config.opt))
            buckets = bucket_tuning.measure_buckets(chosen, _free_memory, open_llm)
        except (CannotRun, EngineDied) as error:
            # Keep the choices measured so far, which took minutes.
            LOG.warning(log_event("graphs are not measured", because=describe_error(error)))
            _free_memory()
    return tuned_choices.TunedChoices(
        subject=tuning_subject.read_subject(config, env),
        date=date.today().isoformat(),
        steps=tuple(map(str, steps)),
        candidates=tuple(candidates),
        fastest=auto_choices.FastestChoices(
            attn=fastest.attn,
            ops=fastest.ops,
            options=fastest.options,
            runner=fastest.runner,
            graph_tokens=bucket_tuning.choose_graph_tokens(buckets),
        ),
        buckets=buckets,
    )


def describe_options(options: Sequence[str]) -> str:
    """The names of the options, for a label; their values may be long."""
    return "".join(f" --opt {each.partition('=')[0]}=..." for each in options)


def choose_fastest(
    candidates: Sequence[tuned_choices.TunedCandidate],
) -> tuned_choices.TunedCandidate:
    """The fastest candidate, or the first unless another is faster by the margin."""
    default = candidates[0]
    fastest = min(candidates, key=lambda each: compare_times(each, default))
    return fastest if compare_times(fastest, default) < 1 - MARGIN else default


def compare_times(
    candidate: tuned_choices.TunedCandidate, other: tuned_choices.TunedCandidate
) -> float:
    """The candidate's time divided by the other's: the geometric mean over common steps."""
    pairs = zip(candidate.milliseconds, other.milliseconds, strict=True)
    logs = [math.log(one / two) for one, two in pairs if one is not None and two is not None]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def _measure_candidate(
    config: EngineConfig,
    steps: Sequence[Step],
    default: tuned_choices.TunedCandidate | None = None,
    open_llm: bucket_tuning.OpenLLM = bucket_tuning.open_llm,
) -> tuned_choices.TunedCandidate:
    """Measure the steps in an engine with this configuration, until one is hopelessly slow.

    raises: CannotRun, UsageError, ModelError
    """
    with open_llm(config) as llm:
        times: list[float | None] = []
        for at, step in enumerate(steps):
            times.append(_time_step(llm, step))
            if default and _is_hopeless(times[at], default.milliseconds[at]):
                break
        summary = get_session(llm).engine.summary
        return tuned_choices.TunedCandidate(
            attn=summary.attention,
            ops=summary.ops,
            milliseconds=(*times, *[None] * (len(steps) - len(times))),
            runner=summary.runner if summary.prompt_graphs else "",
        )


def _is_hopeless(time: float | None, default: float | None) -> bool:
    """Whether a candidate is so much slower than the default that it cannot win."""
    return time is not None and default is not None and time > HOPELESS * default


def _time_step(llm: LLM, step: Step) -> float | None:
    """The step's median milliseconds; None if a request or the pool cannot hold it, or if other
    load hides it.
    """
    engine = get_session(llm).engine
    length = step.tokens or DECODE_CONTEXT
    needed = length + 2 * DECODE_STEPS
    rows = max(step.rows, 1)
    pages = rows * -(-needed // engine.summary.page_size)
    fits = (
        needed <= engine.max_seq_len
        and rows <= engine.summary.max_running_requests
        and pages * engine.summary.page_size <= engine.summary.kv_tokens
    )
    if not fits:
        return None
    prompts = Prompts(engine.model.vocab)
    if step.tokens:
        _time_answers(
            llm, [prompts.draw(length)], 1
        )  # the first run of a size may compile or capture
        return 1e3 * median(_time_answers(llm, [prompts.draw(length)], 1) for _ in range(RUNS))
    held = [prompts.draw(length) for _ in range(step.rows)]
    _time_answers(llm, held, 2 * DECODE_STEPS)
    # Both have the same prompt steps, so the difference is only decode steps.
    differences = [
        _time_answers(llm, held, 2 * DECODE_STEPS) - _time_answers(llm, held, DECODE_STEPS)
        for _ in range(RUNS)
    ]
    difference = median(differences)
    # It may be negative if other load slowed down the shorter answers.
    return 1e3 * difference / DECODE_STEPS if difference > 0 else None


def _time_answers(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> float:
    """The seconds for answers of this many tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - begin


def _free_memory() -> None:
    """Free the memory of the engine that has just ended."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
