"""A server begins, ends and fails as documented, whatever its engine does."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from served import Served, find_engine, read_until_closed, serve, split_events

from headstock import LLM, ModelError, RequestError, SamplingParams
from headstock_openai_server.engine.process_start import start_engine_process

TEXT = "/v1/completions"
STREAM = {"prompt": "a", "max_tokens": 400, "stream": True}


def health(server: Served) -> tuple[int, str]:
    answer = server.get("/health")
    return answer.status, answer.json["status"]


def wait_for_health(server: Served, wanted: tuple[int, str], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while (found := health(server)) != wanted:
        assert time.monotonic() < end, f"/health is {found}, not {wanted}"
        time.sleep(0.02)


def read_libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_engine_process_alone_loads_torch(server: Served) -> None:
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 2}).status == 200
    assert "libtorch" in read_libraries(find_engine(server))
    assert "libtorch" not in read_libraries(server.process.pid)


def test_sigterm_lets_streams_end_and_refuses_what_is_new() -> None:
    script = {"interval": 0.01}
    with serve("--drain-delay", "0.3", script=script) as server:
        with server.post_raw(TEXT, STREAM | {"max_tokens": 100}) as connection:
            assert connection.recv(10) == b"HTTP/1.1 2"
            server.process.send_signal(signal.SIGTERM)
            wait_for_health(server, (503, "shutting_down"))
            late = server.post(TEXT, STREAM)
            assert (late.status, late.error["code"]) == (503, "shutting_down")
            events = split_events(b"HTTP/1.1 2" + read_until_closed(connection))
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            server.get("/health")


def test_an_engine_that_dies_fails_what_runs_and_ends_the_server_with_70() -> None:
    with serve("--drain-delay", "1", script={"die_at": 20, "interval": 0.01}) as server:
        with server.post_raw(TEXT, STREAM) as stream, server.post_raw(TEXT, {"prompt": "a"}):
            *some, last = split_events(read_until_closed(stream))
        assert len(some) > 5 and all(each["choices"] for each in some)
        assert last["error"]["type"] == "server_error"
        assert last["error"]["message"] == "the engine has stopped"
        assert health(server) == (503, "engine_dead")
        late = server.post(TEXT, STREAM)
        assert (late.status, late.error["code"]) == (503, "engine_dead")
        assert server.wait() == 70
    assert "the engine process ended" in server.errors[-1]


@pytest.mark.full
def test_a_server_that_loads_says_so_and_an_engine_that_does_not_start_ends_it() -> None:
    script = {"load_seconds": 1.0, "start_error": "ModelError"}
    with serve(script=script, wait_ready=False) as server:
        first = server.get("/health")
        assert first.status == 503 and first.json["status"] == "loading"
        answer = server.post(TEXT, {"prompt": "a"})
        assert (answer.status, answer.error["code"]) == (503, "loading")
        assert answer.headers["retry-after"] == "1"
        assert server.get("/v1/models").status == 503
        assert server.get("/version").status == 200
        assert server.wait() == 6
    assert server.errors[-1].strip() == "the script says so"


@pytest.mark.full
def test_a_silent_engine_is_unhealthy_and_then_killed() -> None:
    limits = ("--watchdog", "0.5", "--watchdog-exit", "3", "--drain-delay", "0.5")
    with serve(*limits, script={"hang_at": 20}) as server:
        with server.post_raw(TEXT, STREAM) as stream:
            wait_for_health(server, (503, "engine_stalled"))
            *_, last = split_events(read_until_closed(stream))
        assert last["error"]["message"] == "the engine has stopped"
        assert server.wait() == 70


@pytest.mark.full
def test_an_engine_that_says_why_it_fails_is_quoted_in_the_log_alone() -> None:
    with serve("--drain-delay", "0.5", script={"fail_at": 5}) as server:
        with server.post_raw(TEXT, STREAM) as stream:
            *_, last = split_events(read_until_closed(stream))
        assert last["error"]["message"] == "the engine has stopped"
        assert server.wait() == 70
    assert "the script says so" in server.errors[-1]


@pytest.mark.full
def test_a_second_signal_ends_at_once_with_an_error_for_what_runs() -> None:
    with serve(script={"interval": 0.05}) as server:
        with server.post_raw(TEXT, STREAM | {"max_tokens": 2000}) as stream:
            assert stream.recv(10) == b"HTTP/1.1 2"
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            *_, last = split_events(b"HTTP/1.1 2" + read_until_closed(stream))
        assert last["error"]["code"] == "shutting_down"
        assert server.wait(600) == 0


@pytest.mark.full
def test_the_drain_has_an_end() -> None:
    with serve("--drain-timeout", "0.5", script={"interval": 0.05}) as server:
        with server.post_raw(TEXT, STREAM | {"max_tokens": 2000}) as stream:
            assert stream.recv(10) == b"HTTP/1.1 2"
            server.process.send_signal(signal.SIGTERM)
            *_, last = split_events(b"HTTP/1.1 2" + read_until_closed(stream))
        assert last["error"]["code"] == "shutting_down"
        assert server.wait(600) == 0


@pytest.mark.full
def test_no_engine_outlives_its_server() -> None:
    with serve("--num-pages", "64") as server:
        engine = find_engine(server)
        server.process.kill()
        end = time.monotonic() + 600
        while is_running(engine):
            assert time.monotonic() < end
            time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{process}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.full
def test_a_signal_while_the_model_loads_ends_at_once() -> None:
    with serve(script={"load_seconds": 60}, wait_ready=False) as server:
        wait_for_health(server, (503, "loading"))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(600) == 0


@pytest.mark.full
def test_a_stream_without_tokens_ends_and_a_whole_answer_is_waited_for() -> None:
    with serve("--idle-timeout", "0.5", script={"interval": 3}) as server:
        with server.post_raw(TEXT, STREAM) as stream:
            *_, last = split_events(read_until_closed(stream))
        assert last["error"]["code"] == "timeout" and "no token for" in last["error"]["message"]
        whole = server.post(TEXT, {"prompt": "a", "max_tokens": 1}).json
        assert whole["usage"]["completion_tokens"] == 1


@pytest.mark.feature("W10")
@pytest.mark.full
def test_a_request_may_take_a_given_time_in_all() -> None:
    with serve("--request-timeout", "1.5", script={"interval": 0.05}) as server:
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 5}).status == 200
        whole = server.post(TEXT, {"prompt": "a", "max_tokens": 400})
        assert (whole.status, whole.error["code"]) == (500, "timeout")
        *some, last = server.post(TEXT, STREAM).events
        assert len(some) > 5 and "took more than 1.5 s" in last["error"]["message"]
        server.wait_for("headstock_requests_running", 0)


@pytest.mark.full
def test_a_template_that_does_not_end_fails_its_request_alone() -> None:
    loops = "{% for b in range(9999) %}" * 3 + "{% endfor %}" * 3
    template = f"{{% if 'x' in messages[0].content %}}{loops}{{% endif %}}hi"
    limits = ("--template-timeout", "0.5", "--chat-template", template)
    with serve(*limits, script={"interval": 0.001}) as server:
        bad, good = (
            server.post(
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
            )
            for text in ("x", "y")
        )
        assert (bad.status, bad.error["param"]) == (400, "messages")
        assert "takes too long" in bad.error["message"]
        assert good.status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(600) == 0


@pytest.mark.full
def test_a_request_whose_step_fails_gets_an_error_and_others_go_on() -> None:
    with serve("--num-pages", "64", faults=("nan@4:0",)) as server:
        body = {"prompt": "a", "max_tokens": 12, "ignore_eos": True, "stream": True}
        *some, last = server.post(TEXT, body).events
        assert last["error"]["message"] == "the engine could not compute an answer to this request"
        assert some and last["error"]["type"] == "server_error"
        assert server.wait_for_line(status=200, finish=["error"])["completion_tokens"] > 0
        assert server.post(TEXT, body).events[-1]["choices"][0]["finish_reason"] == "length"
        server.wait_for("headstock_failed_requests_total", 1)
        assert health(server) == (200, "ok")


@pytest.mark.full
def test_an_engine_elsewhere_gives_the_answers_of_one_here() -> None:
    params = SamplingParams(max_tokens=20, seed=3, temperature=1.0, logprobs=2, prompt_logprobs=1)
    prompts = ["Once upon a time", "23 + 48 ="]
    with (
        LLM("demo", num_pages=64) as here,
        LLM("demo", num_pages=64, start=start_engine_process) as there,
    ):
        for wanted, found in zip(
            here.generate(prompts, params), there.generate(prompts, params), strict=True
        ):
            ours, theirs = found.outputs[0], wanted.outputs[0]
            assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
            for more, tables in (
                (ours.logprobs, theirs.logprobs),
                (found.prompt_logprobs[1:], wanted.prompt_logprobs[1:]),
            ):
                for one, other in zip(more, tables, strict=True):
                    # Prompts that arrive one after another are other batches.
                    numbers = {token: each.logprob for token, each in other.items()}
                    assert {token: each.logprob for token, each in one.items()} == pytest.approx(
                        numbers, abs=1e-4
                    )
        wanted_text = here.generate("Once", SamplingParams(temperature=0, stop=["girl"]))
        streamed = there.stream("Once", SamplingParams(temperature=0, stop=["girl"]))
        assert "".join(each.outputs[0].text for each in streamed) == wanted_text[0].outputs[0].text
        with pytest.raises(RequestError, match="from 0 to 767"):
            there.generate([[768]])
    with pytest.raises(ModelError, match="no such"):
        LLM("/no such", start=start_engine_process)


@pytest.mark.full
def test_garbage_from_an_engine_is_dropped_and_a_full_pool_is_429() -> None:
    with serve(script={"garbage": True, "refuse": "no room"}) as server:
        answer = server.post(TEXT, {"prompt": "a"})
        assert (answer.status, answer.error["message"]) == (429, "no room")
        assert answer.headers["retry-after"] == "1"
        assert any("a message was dropped" in line for line in server.errors)
        assert server.metric("headstock_requests_running") == 0


@pytest.mark.full
def test_tokens_that_wait_fill_the_queue() -> None:
    with serve("--max-queued-tokens", "10", script={"interval": 3}) as server:
        with server.post_raw(TEXT, {"prompt": [5] * 8, "max_tokens": 1}):
            time.sleep(0.5)
            assert server.post(TEXT, {"prompt": [5] * 2, "max_tokens": 1}).status == 200
        with server.post_raw(TEXT, {"prompt": [5] * 8, "max_tokens": 1}):
            time.sleep(0.5)
            full = server.post(TEXT, {"prompt": [5] * 3, "max_tokens": 1})
            assert full.status == 429
            assert "8 of 10 prompt tokens wait" in full.error["message"]


@pytest.mark.full
def test_a_client_that_reads_nothing_is_dropped_and_others_are_not_slowed() -> None:
    with serve("--unread-timeout", "1", script={"interval": 0.0005}) as server:
        body = STREAM | {"max_tokens": 4000, "n": 60, "logit_bias": {"5": 0}}
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", server.port))
            data = json.dumps(body).encode()
            head = (
                f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                f"content-length: {len(data)}\r\n\r\n"
            )
            deaf.sendall(head.encode() + data)
            server.wait_for("headstock_requests_running", 60)
            server.wait_for("headstock_requests_running", 0)
        assert server.metric("headstock_requests_total") == 60


@pytest.mark.full
def test_a_server_that_does_not_start_does_not_say_that_it_listens() -> None:
    with serve("--ops", "triton", wait_ready=False) as refused:
        assert refused.process.wait() == 5
    assert not any("listening" in line for line in refused.errors)
    assert "ops (--ops) triton" in refused.errors[-1]


def test_a_server_says_that_it_listens_only_once_it_serves() -> None:
    with serve(script={}) as server:
        (line,) = [line for line in server.errors if "listening" in line]
        assert re.fullmatch(rf"ready: \S+, listening on http://\S+:{server.port}/v1\n", line)
