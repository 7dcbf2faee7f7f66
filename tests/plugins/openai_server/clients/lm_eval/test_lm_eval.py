"""lm-eval, unchanged, evaluates a server with the demo model as it evaluates transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from served import CHECKPOINT, OFFLINE, Served, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

PAIRS = [
    ("Once upon a time", " there was a little girl"),
    ("23 + 48 =", " 71"),
    ("23 + 48 =", " 17"),
    ("The cat sat on the", " mat and looked at the moon."),
    ("Tom and Sara went to the park.", " They saw a big dog."),
]
SUMS = [(2, 3), (14, 25), (40, 17), (61, 8)]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve("--num-pages", "256") as served:
        yield served


def write_task(folder: Path, name: str, documents: list[dict[str, str]], **fields: Any) -> None:
    """Write a task of lm-eval that reads its documents from a file."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(f"{json.dumps(each)}\n" for each in documents))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **fields,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def evaluate(folder: Path, task: str, client: str, *flags: str, **arguments: Any) -> list[Any]:
    """The samples of a task, in the order of its documents."""
    settings = ",".join(f"{name}={value}" for name, value in arguments.items())
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "lm_eval"), "run", "--model", client),
            *("--model_args", settings, "--tasks", task, "--include_path", str(folder)),
            *("--log_samples", "--output_path", str(folder / "out"), *flags),
        ],
        cwd=folder,
        env={**os.environ, **OFFLINE, "OPENAI_API_KEY": "none"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(samples, key=lambda each: int(each["doc_id"]))


def log_likelihood(model: Any, tokenizer: Any, context: str, text: str) -> tuple[float, bool]:
    """What transformers says of `text` after `context`: its log-probability, and whether it is the
    greedy answer.
    """
    before = tokenizer.encode(context, add_special_tokens=False)
    ids = tokenizer.encode(context + text, add_special_tokens=False)
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    places = range(len(before) - 1, len(ids) - 1)
    total = sum(float(logprobs[place, ids[place + 1]]) for place in places)
    return total, all(int(logprobs[place].argmax()) == ids[place + 1] for place in places)


@pytest.mark.feature("W1")
def test_log_likelihoods_are_those_of_transformers(server: Served, tmp_path: Path) -> None:
    documents = [{"context": context, "text": text} for context, text in PAIRS]
    write_task(
        tmp_path,
        "pairs",
        documents,
        output_type="loglikelihood",
        doc_to_text="{{context}}",
        doc_to_target="{{text}}",
        target_delimiter="",
        metric_list=[{"metric": "perplexity"}, {"metric": "acc"}],
    )
    samples = evaluate(
        tmp_path,
        "pairs",
        "local-completions",
        model="demo",
        base_url=f"http://127.0.0.1:{server.port}/v1/completions",
        tokenizer=CHECKPOINT,
        num_concurrent=2,
    )
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert len(samples) == len(PAIRS)
    greedy = set()
    for sample, (context, text) in zip(samples, PAIRS, strict=True):
        ((found, is_greedy),) = sample["resps"][0]
        wanted, wanted_greedy = log_likelihood(model, tokenizer, context, text)
        assert float(found) == pytest.approx(wanted, abs=1e-3)
        assert (is_greedy == "True") == wanted_greedy
        greedy.add(wanted_greedy)
    assert greedy == {True, False}, "the cases must have both"


def test_chats_are_scored(server: Served, tmp_path: Path) -> None:
    write_task(
        tmp_path,
        "sums",
        [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in SUMS],
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match"}],
    )
    samples = evaluate(
        tmp_path,
        "sums",
        "local-chat-completions",
        "--apply_chat_template",
        model="demo",
        base_url=f"http://127.0.0.1:{server.port}/v1/chat/completions",
        num_concurrent=2,
    )
    for sample, (a, b) in zip(samples, SUMS, strict=True):
        body = {
            "messages": [{"role": "user", "content": f"What is {a} + {b}?"}],
            "max_tokens": 8,
            "temperature": 0,
            "stop": ["\n"],
        }
        answer = server.post("/v1/chat/completions", body).json
        assert sample["resps"] == [[answer["choices"][0]["message"]["content"]]]
    assert sum(sample["exact_match"] for sample in samples) >= 3
