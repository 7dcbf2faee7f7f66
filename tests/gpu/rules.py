"""Masks and logits processors on the GPU: right, and what they cost the rows without one.

    PYTHONPATH=tests:tests/support python -m gpu.rules

It prints one JSON object. `ok` is False where a kernel or a bound fails. Sampling of 256 rows is
replayed as a graph in every kind, at the vocabulary of the 0.6B shape, with all that a captured
step makes for it out of the tables. Shares are of the device's time of a step of this shape at
`CONTEXT`, as `step_time.py` measures it in the same run; what is judged is `MOST_US`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import near_processor
import sampling_cases
import torch
from attrs import evolve
from gpu.op_times import DEVICE, VOCAB
from gpu.step_time import attempt
from near_processor import Near
from sampling_cases import SETTINGS, Lift
from torch import Tensor

from headstock import LLM, SamplingParams
from headstock.execution.processor_columns import ALL, FEW
from headstock.execution.sampling_inputs import SamplingTable
from headstock.execution.token_masks import MASK
from headstock.nn.noise import gumbel
from headstock.spi import LogitsProcessor, Processing
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory
from headstock_triton.sampling.sampler import fused_sample

ROWS, NUM_RULED = 256, 8
MOST_US = 40.0
"""What 8 rows with a rule may add to a step of 256: 1 % of one of 4 ms, a short one."""
CONTEXT = 840
"""About the mean of `offline256`, and what other steps of so many rows are measured at."""
FLAT = "top_p of 100,000 tokens"
"""Sampling that is measured and not judged: no model is so unsure, and random weights are."""
RULES: Mapping[str, frozenset[str]] = {
    "plain": frozenset(),
    "mask": frozenset({MASK}),
    "few processed": frozenset({FEW}),
    "mask, few processed": frozenset({MASK, FEW}),
    "all processed": frozenset({ALL}),
}
"""What the kinds of sampling name beside settings."""


def make_masks(rows: int, ruled: int, vocab: int) -> Tensor:
    """Masks of which the first few ban half of the tokens."""
    mask = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, device=DEVICE)
    mask[:ruled] = 0x55555555
    return mask


def check_kernels() -> dict[str, str]:
    """Masked sampling is torch's, in every type and shape; and so are processed rows."""
    failed = {}
    for name, settings in SETTINGS.items():
        for rows, vocab in ((1, VOCAB), (9, 4099), (64, VOCAB), (17, 37)):
            for dtype in (torch.bfloat16, torch.float32):
                mask = make_masks(rows, max(rows // 2, 1), vocab)
                try:
                    share = sampling_cases.sampling_case(
                        rows, vocab, dtype, DEVICE, settings, mask=mask
                    )
                    assert share < 0.05
                except AssertionError as error:
                    failed[f"{name}, {rows} rows of {vocab}, {dtype}"] = str(error)[:300]
    return failed


def check_processed() -> dict[str, str]:
    """In replays, rows with a processor get the tokens that they get alone, and the others those
    of a step without processors.
    """
    failed = {}
    which = torch.arange(NUM_RULED, device=DEVICE) * 7
    # The last one twice, as rows that pad do.
    which[-1] = which[-2]
    made: dict[str, tuple[tuple[LogitsProcessor, Mapping[str, Tensor]], ...]] = {
        "near": ((Near(), {"reach": torch.full((NUM_RULED,), 3.0, device=DEVICE)}),),
        "lift": ((Lift(), {"lift": torch.full((NUM_RULED,), 4.0, device=DEVICE)}),),
    }
    made["both"] = made["near"] + made["lift"]
    for name, settings in SETTINGS.items():
        for label, parts in made.items():
            for mask in (None, make_masks(ROWS, NUM_RULED, VOCAB)):
                wrong = count_wrong_tokens(settings, which, parts, mask)
                if wrong:
                    case = f"{name}, {label}{'' if mask is None else ', masked'}"
                    failed[case] = f"{wrong} of {ROWS} tokens differ"
    return failed


def count_wrong_tokens(
    settings: Mapping[str, Any],
    which: Tensor,
    parts: tuple[tuple[LogitsProcessor, Mapping[str, Tensor]], ...],
    mask: Tensor | None,
) -> int:
    """How many tokens of three replays are not those of rows that are sampled apart."""
    held = torch.zeros(ROWS, VOCAB, device=DEVICE, dtype=torch.bfloat16)
    more: dict[str, Any] = {} if mask is None else {"mask": mask}
    if not settings:
        more["positions"] = torch.arange(ROWS, device=DEVICE) * 1009
    plain = sampling_cases.sampling_of(ROWS, DEVICE, dict(settings), **more)
    beside = evolve(plain, processing=Processing(rows=which, parts=parts))
    graph, sample = capture(lambda: fused_sample(held, beside, pdl=True).tokens)
    wrong = 0
    for _ in range(3):
        logits = torch.randn(ROWS, VOCAB, device=DEVICE).mul_(3).to(torch.bfloat16)
        wanted = fused_sample(logits.clone(), plain).tokens
        # Of all rows, which kernels of torch process.
        alone = evolve(plain.take(which), processing=Processing(rows=None, parts=parts))
        wanted[which] = fused_sample(logits[which], alone).tokens
        held.copy_(logits)
        sample.fill_(-1)
        graph.replay()
        wrong += int((sample != wanted).sum())
    return wrong


def capture(work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the work, and what its replays fill."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            result = work()
    return graph, result


def replay_microseconds(work: Callable[[], Tensor]) -> float:
    """Median microseconds of the work as a graph."""
    graph, _ = capture(work)
    times = []
    for _ in range(30):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(10):
            graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 100)
    return statistics.median(times)


class NoSource:
    """Stands for what knows which logits are masked."""

    def plan_masks(self, plan: object) -> None:
        """Never called."""


def make_table() -> SamplingTable:
    """The settings of 256 rows, 8 of which have a mask and a processor."""
    table = SamplingTable(ROWS + 1, VOCAB, DEVICE, {"near": Near()}, NoSource())
    table.columns.floats[:] = torch.tensor([[0.6], [0.9], [0.02]], device=DEVICE)
    table.columns.integers[1] = torch.arange(ROWS + 1, device=DEVICE) * 77_777
    ruled = torch.arange(NUM_RULED, device=DEVICE) * 7
    table.processors.chosen[:] = ruled
    table.processors.device[0]["reach"][ruled] = 3.0
    table.processors.gather_few_()
    table.masks.table[ruled, 0] = 0x55555555
    return table


def make_peaked() -> Tensor:
    """Logits as models have them: in each row 50 tokens above the rest, at other places."""
    places = torch.arange(50, device=DEVICE) * 2999 + torch.arange(ROWS, device=DEVICE)[:, None]
    heights = torch.linspace(18, 8, 50, device=DEVICE).expand(ROWS, -1)
    flat = torch.randn(ROWS, VOCAB, device=DEVICE).mul_(2.5)
    return flat.scatter_add_(1, places, heights.contiguous()).to(torch.bfloat16)


def time_sampling() -> dict[str, float]:
    """Microseconds of sampling 256 rows, plain and with rules for 8 of them, and of parts of it."""
    table = make_table()
    flat = torch.randn(ROWS, VOCAB, device=DEVICE).to(torch.bfloat16)
    logits = flat.clone()
    row_ids = torch.arange(ROWS, device=DEVICE)
    positions = row_ids * 1009

    def sample(kind: frozenset[str]) -> Tensor:
        sampling = table.gather(row_ids, positions, kind)
        return fused_sample(logits, sampling, pdl=True).tokens

    kinds = {
        "greedy": (flat, frozenset[str]()),
        "temperature": (flat, frozenset({"temperature"})),
        "top_p": (make_peaked(), frozenset({"temperature", "top_p"})),
        FLAT: (flat, frozenset({"temperature", "top_p"})),
    }
    found = {}
    for name, (source, kind) in kinds.items():
        for rule, names in RULES.items():
            # `Near` leaves the best token in its place.
            if name != "greedy" or "process" not in rule:
                logits.copy_(source)
                found[f"{name}, {rule}"] = replay_microseconds(partial(sample, kind | names))
    taken = torch.randn(NUM_RULED, VOCAB, device=DEVICE)
    reach = {"reach": torch.full((NUM_RULED,), 3.0, device=DEVICE)}
    found["part: the processor's own operations"] = replay_microseconds(
        lambda: Near().apply(taken, positions, reach)
    )
    return found


def count_kernels() -> dict[str, int]:
    """How many kernels each kind of sampling launches."""
    table, found = make_table(), {}
    logits = torch.randn(ROWS, VOCAB, device=DEVICE).to(torch.bfloat16)
    row_ids = torch.arange(ROWS, device=DEVICE)
    for rule, names in RULES.items():
        sampling = table.gather(row_ids, row_ids, names | {"temperature"})
        fused_sample(logits, sampling)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fused_sample(logits, table.gather(row_ids, row_ids, names | {"temperature"}))
            torch.cuda.synchronize()
        found[rule] = sum(each.count for each in profile.key_averages())
    return found


def check_engine() -> dict[str, str]:
    """In an engine that replays, hot rows with the narrowest reach take the best token each time,
    and the others have the tokens that they have without processed rows beside them, or as good
    ones: other steps round 16 bits otherwise.
    """
    ids = [list(range(5 + i, 69 + i)) for i in range(24)]
    prompts = [{"prompt_token_ids": each} for each in ids]
    hot = {"temperature": 2.0, "max_tokens": 64, "ignore_eos": True}
    plain = [SamplingParams(seed=i, **hot) for i in range(len(ids))]
    ruled = [
        SamplingParams(seed=i, **hot, extra_args={"reach": 1e-6}) if i % 4 == 1 else each
        for i, each in enumerate(plain)
    ]
    failed = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        near_processor.install(Path(folder))
        sys.path.insert(0, folder)
        stack.callback(sys.path.remove, folder)
        for proposer in ("off", "ngram"):
            # Graphs are captured before the first step, and not when they are first needed.
            settings: dict[str, Any] = {"ops": "triton", "device": DEVICE, "defer_graphs": False}
            with LLM(
                "demo",
                logits_processors=("near",),
                runner="cudagraph",
                proposer=proposer,
                **settings,
            ) as llm:
                alone, beside = (
                    [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
                    for params in (plain, ruled)
                )
                short = [
                    margin
                    for prompt, answer in zip(ids[1::4], beside[1::4], strict=True)
                    for margin in find_margins(llm, prompt, answer)
                ]
                answers = zip(alone, beside, strict=True)
                gaps = [
                    find_gap(llm, prompt, pair, params)
                    for prompt, pair, params in zip(ids, answers, plain, strict=True)
                ]
                steps = llm._session.engine.stats()
            widest = max(gap for number, gap in enumerate(gaps) if number % 4 != 1)
            if max(short) > MOST_MARGIN or widest > MOST_MARGIN:
                failed[f"engine, proposer {proposer}"] = (
                    f"tokens are {max(short):.3g} below the best, others {widest:.3g} from those "
                    f"without processed rows beside them; {steps}"
                )
    return failed


MOST_MARGIN = 0.25
"""How far below the best token, in log-probability, 16 bits may put one that is the best."""


def find_margins(llm: LLM, prompt: list[int], answer: list[int]) -> list[float]:
    """How far each token of an answer is below the best, when all is scored as a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([{"prompt_token_ids": prompt + answer}], params)
    assert output.prompt_logprobs is not None
    margins = []
    for token, table in zip(answer, output.prompt_logprobs[len(prompt) :], strict=True):
        assert table is not None
        best = max(each.logprob for each in table.values())
        margins.append(float(best - table[token].logprob))
    return margins


def find_gap(
    llm: LLM, prompt: list[int], answers: tuple[list[int], list[int]], params: SamplingParams
) -> float:
    """How far apart the first different tokens of two answers are, in log-probability with the
    noise that both are drawn with: a drawn token has the highest sum. 0 for equal answers.
    """
    pairs = zip(*answers, strict=True)
    at = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
    if at is None:
        return 0.0
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    seed, position = torch.tensor([params.seed]), torch.tensor([len(prompt) + at])
    sums = []
    for answer in answers:
        token, text = answer[at], prompt + answer[: at + 1]
        (output,) = llm.generate([{"prompt_token_ids": text}], scoring)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[-1] is not None
        noise = float(gumbel(seed, position, 1, token))
        sums.append(output.prompt_logprobs[-1][token].logprob + params.temperature * noise)
    return abs(sums[0] - sums[1])


def time_steps() -> dict[str, float]:
    """Milliseconds of a token of the 0.6B shape at 256 streams, the median of five turns: of those
    without a grammar, beside none and 8 with one; then where all have one.
    """
    prompts = [{"prompt_token_ids": list(range(5, 69))}] * ROWS
    plain = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    # No answer ends before its 128 tokens.
    grammar = {"regex": "[a-z]{1500}"}
    ruled = SamplingParams(temperature=0.0, max_tokens=128, structured_outputs=grammar)
    counts = {"plain": 0, "8 with a grammar": NUM_RULED, "all with a grammar": ROWS}
    found: dict[str, list[float]] = {name: [] for name in counts}
    sizes: dict[str, Any] = {"max_running_requests": ROWS, "num_pages": 2048, "page_size": 64}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_model_directory(MODEL_SHAPES["qwen3-0.6b"], Path(folder))
        llm = stack.enter_context(
            LLM(folder, load_format="dummy", attn="fa", defer_graphs=False, **sizes)
        )
        for _ in range(5):
            for name, count in counts.items():
                outputs = llm.generate(prompts, [ruled] * count + [plain] * (ROWS - count))
                assert all(len(each.outputs[0].token_ids) == 128 for each in outputs)
                ends = [each.metrics for each in outputs[count:] or outputs]
                took = statistics.median((e.end or 0) - (e.first_token or 0) for e in ends)
                found[name].append(took * 1000 / 127)
    return {name: statistics.median(each) for name, each in found.items()}


def main(builds: list[object]) -> dict[str, Any]:
    """Right or wrong, and microseconds; see the module."""
    failed = check_kernels() | check_processed() | check_engine()
    sampling = time_sampling()
    step = attempt("qwen3-0.6b", "fa", str(ROWS), str(CONTEXT))
    added = {
        name: sampling[name] - sampling[f"{name.partition(', ')[0]}, plain"]
        for name in sampling
        if not name.endswith(("plain", "all processed")) and not name.startswith("part: ")
    }
    shares = {name: value / step["device_us"] for name, value in added.items()}
    long = {name: value for name, value in added.items() if value > MOST_US}
    slow = {name: value for name, value in long.items() if not name.startswith(FLAT)}
    return {
        "ok": not failed and not slow,
        "failed": failed,
        "slow": slow,
        "slow and not judged": {name: long[name] for name in long.keys() - slow.keys()},
        "sampling_us": sampling,
        "added_us": added,
        "step_us": {name: step[name] for name in ("context", "step_us", "device_us")},
        "added_share_of_a_step": shares,
        "kernels": count_kernels(),
        "ms_a_token": time_steps() if find_spec("llguidance") else "no llguidance",
        "device": torch.cuda.get_device_name(),
    }


if __name__ == "__main__":
    print(json.dumps(main([]), indent=1))  # noqa: T201
