"""How `headstock run` prints answers: text as it comes, text under headings, or JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from headstock.cli.notes import print_note
from headstock.cli.tables import print_table
from headstock.errors import format_count, shorten
from headstock.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from headstock.requests.terminal import can_style


def show_prompt(prompt: str | None) -> None:
    """Print the prompt, dimmed, before its text; only a terminal gets it, a pipe not."""
    # A pipe gets the answer alone, for the program that reads it.
    if prompt is not None and sys.stdout.isatty():
        begin, end = ("\033[2m", "\033[0m") if can_style(sys.stdout) else ("", "")
        print(f"{begin}{prompt}{end}", end="", flush=True)


def show_text(number: int, output: RequestOutput, prompt: str | None) -> None:
    """Print the answers to a prompt, each under a heading; `prompt` is as the user gave it."""
    for answer in output.outputs:
        which = f"{number}" if len(output.outputs) == 1 else f"{number}.{answer.index + 1}"
        heading = "token ids" if prompt is None else shorten(prompt)
        print(f"==> {which}: {heading} <==\n{answer.text}\n", flush=True)
        if show_logprobs(output, answer):
            print(flush=True)


def show_logprobs(output: RequestOutput, answer: CompletionOutput) -> bool:
    """Print an answer's log-probabilities, and first its prompt's; whether there are any."""
    rows = []
    # All answers have the same prompt, so its table is printed once.
    if output.prompt_logprobs is not None and answer.index == 0:
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        rows += [
            _make_logprob_row("prompt", token, entries)
            for token, entries in pairs
            if entries is not None
        ]
    if answer.logprobs is not None:
        rows += [
            _make_logprob_row("answer", *pair)
            for pair in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
    if rows:
        print_table(("PLACE", "TOKEN", "LOGPROB", "LIKELIEST"), rows, sys.stdout)
    return bool(rows)


def _make_logprob_row(place: str, token: int, entries: dict[int, Logprob]) -> tuple[str, ...]:
    """One token, its log-probability and the likeliest ones in its place."""
    ranked = sorted(
        (entry for entry in entries.values() if entry.rank is not None),
        key=lambda entry: entry.rank or 0,
    )
    likeliest = ", ".join(
        f"{_quote_token(entry.decoded_token)} {entry.logprob:z.4f}" for entry in ranked
    )
    return (
        place,
        _quote_token(entries[token].decoded_token),
        f"{entries[token].logprob:z.4f}",
        likeliest,
    )


def _quote_token(text: str) -> str:
    """A token's text on one line, with its spaces to be seen."""
    return json.dumps(text, ensure_ascii=False)


def show_json(where: str, number: int, output: RequestOutput, stream: TextIO) -> None:
    """Print one JSON line for each answer to a prompt."""
    for answer in output.outputs:
        head = {"request": number, "answer": answer.index + 1, "where": where}
        _print_json(head | _answer_to_json(output, answer), stream)


def show_error(where: str, number: int, reason: str, stream: TextIO | None) -> None:
    """Print why a prompt could not be run; `stream` gets a JSON line instead of its answer."""
    print_note(f"headstock: {where}: {reason}")
    if stream is not None:
        _print_json({"request": number, "where": where, "error": reason}, stream)


def _print_json(values: dict[str, object], stream: TextIO) -> None:
    """Print values as one line of JSON."""
    print(json.dumps(values, ensure_ascii=False), file=stream, flush=True)


def _answer_to_json(output: RequestOutput, answer: CompletionOutput) -> dict[str, object]:
    """One answer for JSON; times are in seconds."""
    values: dict[str, object] = {
        "prompt": output.prompt,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "max_tokens": output.max_tokens,
        "timings": _compute_timings(output.metrics, output.num_output_tokens),
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": output.metrics.cached_tokens,
        },
        "preemptions": output.metrics.preemptions,
    }
    if answer.reasoning is not None:
        values["reasoning"] = answer.reasoning
    if answer.tool_calls:
        values["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in answer.tool_calls
        ]
    if answer.logprobs is not None:
        values["cumulative_logprob"] = answer.cumulative_logprob
        values["logprobs"] = [_logprobs_to_json(entries) for entries in answer.logprobs]
    if output.prompt_logprobs is not None:
        values["prompt_logprobs"] = [
            None if entries is None else _logprobs_to_json(entries)
            for entries in output.prompt_logprobs
        ]
    if answer.error is not None:
        values["error"] = answer.error
    return values


def _logprobs_to_json(entries: dict[int, Logprob]) -> list[dict[str, object]]:
    """The alternatives at one position for JSON."""
    return [
        {
            "token_id": token,
            "token": entry.decoded_token,
            "logprob": entry.logprob,
            "rank": entry.rank,
        }
        for token, entry in entries.items()
    ]


def _compute_timings(metrics: RequestMetrics, tokens: int) -> dict[str, float | None]:
    """Seconds to the first token and to the end, and tokens a second over all of it."""
    total = metrics.total
    rounded = [None if value is None else round(value, 6) for value in (metrics.ttft, total)]
    rate = round(tokens / total, 3) if total else None
    return {"ttft": rounded[0], "total": rounded[1], "tokens_per_second": rate}


def format_footer(output: RequestOutput, tokens: int) -> str:
    """One line about a finished request."""
    times = _compute_timings(output.metrics, tokens)
    reason = output.outputs[-1].finish_reason or "Ctrl-C"
    first = "-" if times["ttft"] is None else f"{1000 * times['ttft']:.0f} ms"
    rate = (
        "" if times["tokens_per_second"] is None else f", {times['tokens_per_second']:.1f} tokens/s"
    )
    preempted = (
        f", preempted {format_count(n, 'time')}" if (n := output.metrics.preemptions) else ""
    )
    return (
        f"{format_count(tokens, 'token')}, first after {first}{rate}, ended by {reason}{preempted}"
    )


def format_totals(outputs: Sequence[RequestOutput], num_prompts: int) -> str:
    """One line about the results of a batch of `num_prompts` prompts."""
    tokens = sum(output.num_output_tokens for output in outputs)
    metrics = [output.metrics for output in outputs]
    seconds = max(times.end or 0.0 for times in metrics) - min(times.arrival for times in metrics)
    preemptions = sum(times.preemptions or 0 for times in metrics)
    failed = num_prompts - sum(output.sound for output in outputs)
    rate = f"{format_count(tokens, 'token')} in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s"
    preempted = f", {format_count(preemptions, 'preemption')}" if preemptions else ""
    return f"{format_count(num_prompts, 'prompt')}, {failed} failed; {rate}{preempted}"
