"""An engine process without a model: it says what `SCRIPT` in the environment tells it to.

Run by a server in place of its engine. Every request gets the tokens of the text in
turns, one a step.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from attrs import Factory, define, frozen

import headstock_demo
from headstock.text import Tokenizer
from headstock_openai_server.engine.channel import Channel
from headstock_openai_server.engine.messages import (
    Abort,
    Accepted,
    Close,
    Failed,
    Inspect,
    Lane,
    Ready,
    Refused,
    Snapshot,
    Start,
    StartProgress,
    Stats,
    Step,
    Submit,
    TreeNode,
    WireLogprob,
    WireRequest,
    WireUpdate,
)

TEXT = "Once upon a time, there was a little girl named Sara. "
DIRECTORY = Path(headstock_demo.__file__).parent / "checkpoint"
VOCAB = 768
SUMMARY = {
    "model": "demo",
    "architecture": "none",
    "device": "cpu",
    "device_name": "none",
    "dtype": "float32",
    "kv_dtype": "float32",
    "attention": "none",
    "cache": "none",
    "scheduler": "none",
    "runner": "none",
    "ops": "none",
    "proposer": "",
    "logits_processors": [],
    "grammar": "",
    "page_size": 16,
    "kv_tokens": 4096,
    "options": [],
    "overlap": True,
    "prompt_graphs": [],
    "max_seq_len": 4096,
    "max_running_requests": 64,
    "table": [["device", "none", "the script"]],
    "memory": [],
    "notes": [],
    "start": [["weights", 1.0]],
}


@frozen(kw_only=True)
class Script:
    """What the engine does: seconds a step, and the steps after which it changes its mind.

    stops: an answer ends with the text, and does not begin it again
    die_at: the process ends at once; fail_at: it says why first; hang_at: it says nothing more
    """

    interval: float = 0.002
    load_seconds: float = 0.0
    start_error: str = ""
    die_at: int = -1
    fail_at: int = -1
    hang_at: int = -1
    refuse: str = ""
    text: str = TEXT
    stops: bool = False
    garbage: bool = False


@define
class Running:
    """A request, and how many tokens it has had."""

    wire: WireRequest
    params: dict[str, Any]
    stream_tokens: bool
    sent: int = 0
    held: list[int] = Factory(list)


def main(descriptor: int, script: Script) -> int:
    """Serve the script; the exit code."""
    import socket

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    assert isinstance(channel.receive(), Start)
    channel.send(StartProgress("weights", 1, 2))
    time.sleep(script.load_seconds)
    if script.start_error:
        channel.send(Failed(script.start_error, "the script says so"))
        return 6
    if script.garbage:
        channel.socket.sendall(b"\0\0\0\3abc")  # a frame that is no message
    channel.send(Ready(str(DIRECTORY), VOCAB, 4096, "", (0, 2), SUMMARY))
    tokens = Tokenizer(DIRECTORY).encode(script.text)
    running: dict[str, Running] = {}
    step, due = 0, time.monotonic()
    send_stats(channel, running, step)
    while True:
        wait = max(0.0, due - time.monotonic()) if running else 1.0
        ready, _, _ = select.select([channel.socket], [], [], wait)
        if ready and not take_message(channel, running, script):
            return 0
        if not running:
            send_stats(channel, running, step)
            due = time.monotonic()
            continue
        if time.monotonic() < due:
            continue
        due = time.monotonic() + script.interval
        step += 1
        if step == script.die_at:
            os._exit(9)
        if step == script.fail_at:
            channel.send(Failed("EngineDied", "the script says so"))
            return 70
        if step == script.hang_at:
            time.sleep(1e6)
        channel.send(Step(make_updates(running, tokens, stops=script.stops)))
        if step % 100 == 0:
            send_stats(channel, running, step)


def take_message(channel: Channel, running: dict[str, Running], script: Script) -> bool:
    """Do what messages say; False at the end."""
    while True:
        message = channel.receive()
        if message is None or isinstance(message, Close):
            return False
        if isinstance(message, Submit):
            if script.refuse:
                channel.send(
                    Refused(message.batch, script.refuse, "prompt", capacity=True, retry=True)
                )
            else:
                for wire in message.requests:
                    params = {**message.params, **wire.params}
                    running[wire.id] = Running(wire, params, message.stream_tokens)
                channel.send(Accepted(message.batch))
        elif isinstance(message, Abort):
            for request_id in message.ids:
                running.pop(request_id, None)
            if not running:
                send_stats(channel, running, 0)
        elif isinstance(message, Inspect):
            lanes = [
                Lane(each.wire.id, len(each.wire.prompt) // 4, 0, 0, each.sent)
                for each in running.values()
            ]
            pages = b"1" * 16 + b"2" * len(lanes) + b"3" * 8
            tree = [TreeNode(-1, 4, len(lanes)), *(TreeNode(0, 2, 1) for _ in lanes)]
            shown = Snapshot(lanes, [], len(lanes), 0, 16, [pages.ljust(256, b"0")], tree)
            channel.send(shown)
        if not channel.messages:
            return True


def make_updates(
    running: dict[str, Running], tokens: list[int], *, stops: bool
) -> list[WireUpdate]:
    """The news of one step: a token for each request."""
    updates = []
    for request_id, one in list(running.items()):
        token = tokens[one.sent % len(tokens)]
        is_first, one.sent = one.sent == 0, one.sent + 1
        ends = stops and one.sent == len(tokens)
        is_last = ends or one.sent == one.wire.max_tokens
        one.held.append(token)
        most = one.params.get("logprobs")
        wants_prompt = is_first and one.wire.prompt_logprobs
        if one.stream_tokens or is_first or is_last:
            updates.append(
                WireUpdate(
                    request_id,
                    tuple(one.held),
                    None if most is None else tuple(make_logprob(each, most) for each in one.held),
                    make_prompt_logprobs(one) if wants_prompt else None,
                    "stop" if ends else "length" if is_last else None,
                    None,
                    None,
                    0 if is_first else None,
                    0,
                    0.0 if is_first else None,
                    None,
                )
            )
            one.held = []
        if is_last:
            del running[request_id]
    return updates


def make_logprob(token: int, most: int) -> WireLogprob:
    """The log-probability of a token, the likeliest of its position."""
    top = [(token + rank) % VOCAB for rank in range(most)]
    return token, -1.0, tuple((each, -1.0 - rank) for rank, each in enumerate(top)), 1


def make_prompt_logprobs(one: Running) -> tuple[WireLogprob | None, ...]:
    """Those of a prompt, whose first token nothing predicts."""
    prompt = np.frombuffer(one.wire.prompt, np.int32).tolist()
    most = one.params.get("prompt_logprobs", 0)
    return None, *(make_logprob(token, most) for token in prompt[1:])


def send_stats(channel: Channel, running: dict[str, Any], step: int) -> None:
    """Send counts, as an engine does."""
    names = "waiting preemptions cached_pages prompt_tokens cached_tokens output_tokens failed"
    counts = dict.fromkeys(f"{names} peak_held_pages".split(), 0)
    live = len(running)
    channel.send(
        Stats(
            counts | {"running": live, "steps": step, "free_pages": 256 - live, "total_pages": 256}
        )
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Script(**json.loads(os.environ.get("SCRIPT", "{}")))))
