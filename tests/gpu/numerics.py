"""Numbers against transformers in float32: stories of the demo model, logits of the 0.6B shape
(prompts, replays).
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu.graphs import Compared
from gpu.tokens import BACKENDS, REPLAYED
from transformers import AutoConfig, AutoModelForCausalLM

from headstock import LLM, SamplingParams
from headstock.registry import load_spec
from headstock_bench.model_shapes import MODEL_SHAPES, write_model_directory

HEROES = (
    "girl Sara",
    "boy Ben",
    "fox Otto",
    "mouse Mia",
    "rabbit Hugo",
    "bear Lena",
    "girl Anna",
    "squirrel Theo",
)
PROMPTS = tuple(
    f"Once upon a time, there was a little {' named '.join(hero.split())}." for hero in HEROES
)
"""Openings as the demo model's README measures margins after."""
STORY = 400
"""Tokens of a story at most; each ends where its teller ends it."""
MOST_EXCUSED = 0.02


def main(builds: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    """Both, for every backend."""
    torch.backends.cuda.matmul.allow_tf32 = False
    stories, logits = attempt(all_stories), attempt(all_logits)
    ok = all(
        isinstance(part, dict) and all(each["ok"] for each in part.values())
        for part in (stories, logits)
    )
    return {"ok": ok, "stories": stories, "logits": logits}


def attempt(work: Any) -> Any:
    """What the work found, or what it raised."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def all_stories() -> dict[str, Any]:
    """Stories that float32 tells, and what each backend in bfloat16 would have said at every
    position of them.
    """
    folder = load_spec("checkpoint", "demo").directory
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    with LLM("demo", device="cuda", num_pages=64, runner="eager", max_running_requests=1) as llm:
        prompts = [llm._session.tokenizer.encode(prompt) for prompt in PROMPTS]
    with torch.inference_mode():
        told = [told_by(model, prompt) for prompt in prompts]
    del model
    found = {}
    for prompts_by in BACKENDS:
        for decode_by in BACKENDS:
            for runner in ("eager", "cudagraph") if decode_by in REPLAYED else ("eager",):
                pair = prompts_by if prompts_by == decode_by else f"{prompts_by},{decode_by}"
                if prompts_by == decode_by or runner == "cudagraph":
                    found[f"{pair}, {runner}"] = story(pair, runner, prompts, told)
    return found


def told_by(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """A greedy story in float32, and the scores from which each of its tokens came. [tokens,
    vocab]
    """
    ids = torch.tensor([prompt], device="cuda")
    whole = model.generate(ids, max_new_tokens=STORY, do_sample=False)
    scores = model(whole).logits[0, len(prompt) - 1 : -1].float()
    return whole[0, len(prompt) :].tolist(), scores.cpu()


def story(attn: str, runner: str, prompts: list[list[int]], told: list[Any]) -> dict[str, Any]:
    """How often a pair agrees: every other position of each story is a request of its own, for the
    two tokens after it, the first of which a prompt gives and the second a decode step.

    A position counts when float32 prefers its token by more than four times the median error of
    logits, which are known up to what all of a position have in common: so those of the likeliest
    tokens are compared with the very likeliest.
    """
    asked, wanted, margins, references = [], [], [], []
    for prompt, (tokens, scores) in zip(prompts, told, strict=True):
        best = scores.topk(2, -1).values
        for place in range(0, len(tokens) - 1, 2):
            asked.append({"prompt_token_ids": prompt + tokens[:place]})
            wanted.append(tokens[place : place + 2])
            margins.append((best[place : place + 2, 0] - best[place : place + 2, 1]).tolist())
            references.append(scores[place : place + 2])
    # a story's end is a token too
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=5)
    settings = {"num_pages": 4096, "max_running_requests": 64, "max_seq_len": 1024}
    with LLM("demo", device="cuda", attn=attn, runner=runner, **settings) as llm:
        answers = [output.outputs[0] for output in llm.generate(asked, params)]
    errors, compared = [], []
    for answer, right, margin, reference in zip(answers, wanted, margins, references, strict=True):
        # after another token the second means nothing
        for place in range(2 if answer.token_ids[0] == right[0] else 1):
            said = answer.token_ids[place]
            told = answer.logprobs[place]
            others = [token for token in told if token != said]
            ours = torch.tensor([told[token].logprob - told[said].logprob for token in others])
            errors += (ours - (reference[place, others] - reference[place, said])).abs().tolist()
            compared.append((margin[place], said == right[place]))
    limit = 4 * sorted(errors)[len(errors) // 2]
    excused = sum(margin <= limit for margin, _ in compared)
    wrong = sum(not agrees for margin, agrees in compared if margin > limit)
    return {
        "ok": wrong == 0 and excused <= MOST_EXCUSED * len(compared),
        "positions": len(compared),
        "wrong": wrong,
        "excused": excused,
        "excused_and_different": sum(not agrees for margin, agrees in compared if margin <= limit),
        "median_error": round(limit / 4, 5),
        "largest_error": round(max(errors), 4),
    }


def all_logits() -> dict[str, Any]:
    """Log-probabilities of random prompts on the 0.6B shape with random weights; transformers in
    bfloat16 beside us.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model_directory(MODEL_SHAPES["qwen3-0.6b"], folder)
        torch.manual_seed(0)
        model = (
            AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
            )
            .cuda()
            .eval()
        )
        model.save_pretrained(folder)
        lengths = (7, 64, 129, 1000)
        prompts = [torch.randint(0, 150_000, (1, length), device="cuda") for length in lengths]
        # there is no way back: bfloat16 would round its rotary frequencies too
        precise = copy.deepcopy(model).float()
        with torch.inference_mode():
            own = [scored(model, prompt) for prompt in prompts]
            exact = [scored(precise, prompt) for prompt in prompts]
        theirs = worst(own, exact)
        chosen = os.environ.get("GPU_LOGITS", ";".join(BACKENDS)).split(";")
        found = {}
        for attn in chosen:
            found[attn] = tried(logits, attn, folder, prompts, exact, theirs)
            if attn.split(",")[-1] in REPLAYED:
                found[f"{attn}, replayed"] = tried(decoded, attn, folder, prompts, model, precise)
    return found | {"transformers in bfloat16": {"ok": True, "largest_error": theirs}}


def tried(work: Any, *arguments: Any) -> dict[str, Any]:
    """What the work found, said at once: a run that is cut off keeps it. What the work raised is a
    finding too.
    """
    found = attempt(lambda: work(*arguments))
    found = found if isinstance(found, dict) else {"ok": False, "error": found}
    sys.stderr.write(f"{work.__name__} {arguments[0]}: {json.dumps(found)}\n")
    return found


def decoded(
    attn: str, folder: Path, prompts: list[torch.Tensor], model: Any, precise: Any
) -> dict[str, Any]:
    """The largest error of log-probabilities of tokens that replayed decode steps gave, the
    likeliest five of each.

    `precise` (float32) and `model` (bfloat16) read what we said; right when our error is at most
    twice that of `model`.
    """
    settings = {
        "num_pages": 256,
        "max_running_requests": 4,
        "max_seq_len": 2048,
        "runner": "cudagraph",
    }
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)
    with LLM(str(folder), device="cuda", dtype="bfloat16", attn=attn, **settings) as llm:
        compared = Compared(llm._session.engine.executor.runner)
        asked = [{"prompt_token_ids": prompt[0].tolist()} for prompt in prompts]
        answers = [output.outputs[0] for output in llm.generate(asked, params)]
    exact, theirs = (
        [read(each, *pair) for pair in zip(prompts, answers, strict=True)]
        for each in (precise, model)
    )
    ours = [
        torch.tensor([[e.logprob for e in each.values()] for each in one.logprobs])
        for one in answers
    ]
    replays, mine, limit = compared.steps["steps"], worst(ours, exact), 2 * worst(theirs, exact)
    return {
        "ok": replays >= 40 and mine <= limit,
        "replays": replays,
        "largest_error": mine,
        "limit": limit,
    }


def read(model: Any, prompt: torch.Tensor, answer: Any) -> torch.Tensor:
    """The model's log-probabilities of the tokens that the answer names at each of its places.
    [tokens, 6 or fewer]
    """
    said = torch.tensor([answer.token_ids], device="cuda")
    with torch.inference_mode():
        logits = model(torch.cat([prompt, said], 1)).logits[0, prompt.shape[1] - 1 : -1]
    named = torch.tensor([list(each) for each in answer.logprobs], device="cuda")
    return logits.float().log_softmax(-1).gather(1, named).cpu()


def scored(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token of the prompt but the first."""
    ranked = model(prompt).logits[0, :-1].float().log_softmax(-1)
    return ranked.gather(-1, prompt[0, 1:, None])[:, 0].cpu()


def worst(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference; NaN when one of them is."""
    gaps = torch.cat([(a - b).abs().flatten() for a, b in zip(some, others, strict=True)])
    return round(float(gaps.max()), 4)


def logits(
    attn: str, folder: Path, prompts: list[torch.Tensor], exact: list[torch.Tensor], theirs: float
) -> dict[str, Any]:
    """Our largest error, whole and in chunks; right when it is at most twice what transformers has
    in bfloat16.
    """
    errors = {}
    for chunk in (8192, 96):
        settings = {
            "num_pages": 256,
            "max_batch_tokens": chunk,
            "max_running_requests": 16,
            "max_seq_len": 2048,
        }
        with LLM(str(folder), device="cuda", dtype="bfloat16", attn=attn, **settings) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            outputs = llm.generate(
                [{"prompt_token_ids": prompt[0].tolist()} for prompt in prompts], params
            )
        ours = []
        for output, prompt in zip(outputs, prompts, strict=True):
            ids = prompt[0, 1:].tolist()
            told = output.prompt_logprobs[1:]
            ours.append(
                torch.tensor([each[token].logprob for each, token in zip(told, ids, strict=True)])
            )
        errors[chunk] = worst(ours, exact)
    return {
        "ok": all(error <= 2 * theirs for error in errors.values()),
        "largest_error": errors,
        "transformers": theirs,
    }
