"""Answer each line of a file as one batch: python batch.py PROMPTS.txt ANSWERS.jsonl [MODEL]"""

import json
import sys
from pathlib import Path

from headstock import LLM, SamplingParams


def main(prompts: str, answers: str, model: str = "demo") -> None:
    """Write one JSON object a line, in the order of the prompts."""
    lines = Path(prompts).read_text(encoding="utf-8").splitlines()
    with LLM(model) as llm, Path(answers).open("w", encoding="utf-8") as file:
        for output in llm.generate(lines, SamplingParams(temperature=0, max_tokens=64)):
            answer = output.outputs[0]
            record = {
                "prompt": output.prompt,
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "cached_tokens": output.metrics.cached_tokens,
            }
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
