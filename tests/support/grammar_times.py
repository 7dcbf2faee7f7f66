"""Measure what rows with a grammar cost the host in a step, in a process of its own.

`python grammar_times.py DIRECTORY ROWS`: makes a model in the directory, and prints the median
milliseconds of processor time that grammars of so many rows take in a step, and the steps.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import Variant, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headstock import LLM, SamplingParams
from headstock.grammar.rows import GrammarMasks, GrammarRows

VOCAB = 131_072
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 8},
        "size": {"type": "object", "properties": {"width": {"type": "number"}}},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
        "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    },
    "required": ["name", "tags", "size", "code", "note"],
    "additionalProperties": False,
}


def write_checkpoint(directory: Path) -> None:
    """A tiny random model, and a tokenizer of bytes and of texts such as real ones have."""
    save_model(Variant("llama", "Llama", {"vocab_size": VOCAB, "eos_token_id": 0}), directory)
    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = dict.fromkeys(["<end>", *alphabet])
    while len(texts) < VOCAB:
        letters = "".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9)))
        kind = rng.random()
        if kind < 0.5:
            text = f"\u0120{letters}"
        elif kind < 0.9:
            text = letters.capitalize() if kind < 0.6 else letters
        else:
            text = "".join(rng.choices('{}[]":,.0123456789\u0120_-', k=rng.randint(2, 5)))
        texts[text] = None
    inner = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<end>", special=True)])
    inner.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


class StepTimes:
    """Milliseconds of processor time that grammars took in each step."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.steps: list[float] = []
        self.spent = 0.0
        for owner, name in (
            (GrammarRows, "plan_masks"),
            (GrammarRows, "advance"),
            (GrammarMasks, "fill"),
        ):
            setattr(owner, name, self.measure(getattr(owner, name)))

    def measure(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, whose time counts for the step."""

        def measured(self_: Any, *arguments: Any) -> Any:
            began = time.thread_time()
            result = call(self_, *arguments)
            self.spent += 1000 * (time.thread_time() - began)
            if call.__name__ == "fill":
                if len(self_.logits) == self.num_rows:
                    self.steps.append(self.spent)
                self.spent = 0.0
            return result

        return measured


def main(directory: Path, num_rows: int) -> None:
    """Print the median of the steps' milliseconds, and how many they are, as JSON."""
    write_checkpoint(directory)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=24, structured_outputs={"json": SCHEMA})
        for i in range(num_rows)
    ]
    times = StepTimes(num_rows)
    # Without overlap each of them is in every step.
    with LLM(str(directory), max_running_requests=num_rows, overlap=False) as llm:
        llm.generate([[5 + i] for i in range(num_rows)], params)
    sys.stdout.write(json.dumps([statistics.median(times.steps), len(times.steps)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
