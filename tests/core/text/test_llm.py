"""The LLM object over a scripted engine: prompts and parameters."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from attrs import evolve

from headstock import LLM, EngineConfig, SamplingParams
from headstock.errors import NotSupported, RequestError, UsageError
from headstock.outputs import CompletionOutput, RequestOutput

Make = Callable[..., tuple[LLM, Any]]
SHORT = SamplingParams(max_tokens=8, temperature=0)


def test_generate_answers_in_order_with_vllm_names(scripted: Make) -> None:
    llm, loop = scripted()
    prompts = [f"hello {number}" for number in range(20)]
    outputs = llm.generate(prompts, SHORT)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        (answer,) = output.outputs
        assert isinstance(output, RequestOutput) and isinstance(answer, CompletionOutput)
        assert (answer.finish_reason, answer.stop_reason, len(answer.token_ids)) == (
            "length",
            None,
            8,
        )
        assert answer.text == llm._session.tokenizer.decode(answer.token_ids)
        assert (
            output.finished and output.metrics.ttft is not None and output.metrics.total is not None
        )
        assert 0 <= output.metrics.ttft <= output.metrics.total
    assert loop.most <= 2 * llm._session.config.max_running_requests
    assert [request.id for request in loop.seen] == [str(number) for number in range(20)]


def test_an_answer_does_not_depend_on_its_neighbours(scripted: Make) -> None:
    llm, _ = scripted()
    together = llm.generate(["a", "b", "c"], SHORT)
    alone = [llm.generate(prompt, SHORT)[0] for prompt in ("a", "b", "c")]
    assert [output.outputs for output in together] == [output.outputs for output in alone]


def test_token_ids_are_prompts_too(scripted: Make) -> None:
    llm, _ = scripted()
    ids = llm._session.tokenizer.encode("hello")
    for given_ids in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        (output,) = llm.generate(given_ids, SHORT)
        assert (output.prompt, output.prompt_token_ids) == (None, ids)
    assert (
        llm.generate([ids, "hello"], SHORT)[0].outputs
        == llm.generate({"prompt": "hello"}, SHORT)[0].outputs
    )
    assert llm.generate([], SHORT) == []


def test_n_answers_are_requests_seeded_one_after_another(scripted: Make) -> None:
    llm, loop = scripted()
    (output,) = llm.generate("hello", SamplingParams(n=3, seed=5, max_tokens=4))
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert [request.params.seed for request in loop.seen] == [5, 6, 7]
    assert len({request.id for request in loop.seen}) == 3


def test_unseeded_requests_get_seeds_of_their_own_that_the_engine_seed_repeats(
    scripted: Make,
) -> None:
    seeds = []
    for _ in range(2):
        llm, loop = scripted()
        llm.generate(["a", "a"], SamplingParams(max_tokens=1))
        seeds.append([request.params.seed for request in loop.seen])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2


def test_one_params_or_one_for_each_prompt(scripted: Make) -> None:
    llm, _ = scripted()
    params = [SamplingParams(max_tokens=number) for number in (1, 2)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(["a", "b"], params)] == [
        1,
        2,
    ]
    with pytest.raises(RequestError, match=r"one for each prompt \(3\), got 2"):
        llm.generate(["a", "b", "c"], params)


def test_default_params_come_from_the_checkpoint(
    scripted: Make, byte_level: Any, tmp_path: Any
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((byte_level / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3, "eos_token_id": [7]}')
    llm, loop = scripted(directory=tmp_path)
    assert len(llm.generate("hello")[0].outputs[0].token_ids) == 3
    assert loop.seen[0].stop_ids == (7, 0)
    assert llm._session.default_params.max_tokens == 3


BAD: list[tuple[Any, str]] = [
    ("", "prompt is empty"),
    ([[]], "prompt is empty"),
    ([[5, 9999]], "prompt token ids: expected integers from 0 to"),
    ([[5, True]], "prompt token ids: expected integers"),
    ([[5, -1]], "prompt token ids: expected integers"),
    ([5.5], "expected text or a list of token ids"),
    ({"text": "x"}, "one of prompt and prompt_token_ids, .* got text"),
    ({"prompt_token_ids": "abc"}, "prompt_token_ids: expected a list of token ids, got str abc"),
    ({"prompt": [5, 6]}, "prompt: expected text, got list"),
    ([{"prompt": 5}], "prompt: expected text, got int 5"),
    ("x\ud83d", "not valid Unicode"),
    (5, "prompts: expected text, a list of token ids, a mapping .*, or a list of such, got int 5"),
    (None, "prompts: expected text, .* got None"),
    (b"hello", "prompts: expected text, .* got bytes"),
    (object(), "prompts: expected text, .* got object$"),
    ([None], "a prompt: expected text or a list of token ids, got None"),
    ([object()], "a prompt: expected text or a list of token ids, got object$"),
]


@pytest.mark.feature("H10")
@pytest.mark.parametrize(("prompt", "message"), BAD)
def test_bad_prompts_are_refused_before_anything_runs(
    scripted: Make, prompt: Any, message: str
) -> None:
    llm, loop = scripted()
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, SHORT)
    assert loop.seen == []


@pytest.mark.parametrize("params", [5, "greedy", {1, 2}, [5], [None, SHORT, ["n"]]])
def test_params_of_another_type_are_refused_by_name(scripted: Make, params: Any) -> None:
    llm, loop = scripted()
    with pytest.raises(
        RequestError,
        match=r"sampling_params: expected SamplingParams.*, got (int 5|str greedy|set|list)",
    ):
        llm.generate("a" if not isinstance(params, list) else ["a"] * len(params), params)
    assert loop.seen == []


def test_a_mapping_of_names_is_the_sampling_params_of_these(scripted: Make) -> None:
    llm, loop = scripted()
    values: dict[str, Any] = {"temperature": 0.5, "max_tokens": 3, "seed": 7, "stop": "zz"}
    messages = [{"role": "user", "content": "x"}]

    llm.generate(["a", "b"], [values, {"max_tokens": 3}])
    list(llm.stream("a", values))
    llm.chat(messages, values)
    asyncio.run(llm.generate_async("a", MappingProxyType(values)))

    first, second, *others = [request.params for request in loop.seen]
    assert [first, *others] == [
        SamplingParams(temperature=0.5, max_tokens=3, seed=7, stop="zz")
    ] * 4
    assert evolve(second, seed=None) == SamplingParams(max_tokens=3)
    for wrong, message in (
        ({"temperatur": 0}, "temperatur.*temperature"),
        ({"temperature": "cold"}, "temperature: expected a number between"),
        ({3: 4}, "3"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate("a", wrong)


def test_a_chat_without_parameters_may_fill_the_context_and_says_that_it_was_cut(
    scripted: Make, byte_level: Path, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "x"}]
    llm, _ = scripted(script=lambda request: [5] * 4096, max_seq_len=200)
    (answer,) = llm.chat(messages)
    assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == 200
    assert answer.outputs[0].finish_reason == "length"
    assert len(list(llm.stream_chat(messages))) == len(answer.outputs[0].token_ids)
    (completion,) = llm.generate("x")
    assert len(completion.outputs[0].token_ids) == 100

    # A number of the model's own holds.
    shutil.copytree(byte_level, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"max_new_tokens": 7}')
    llm, _ = scripted(tmp_path / "model", script=lambda request: [5] * 4096)
    (answer,) = llm.chat(messages)
    assert len(answer.outputs[0].token_ids) == 7


@pytest.mark.parametrize("messages", [5, None, "hello", {"role": "user"}, [5], [[5], 5], [[], []]])
def test_messages_of_another_type_are_refused(scripted: Make, messages: Any) -> None:
    llm, loop = scripted()
    with pytest.raises(
        RequestError,
        match=r"messages(\[0\])?: expected (a list of one or more turns|an object with a role)",
    ):
        llm.chat(messages)
    assert loop.seen == []


@pytest.mark.parametrize("max_tokens", [None, 300])
def test_min_tokens_that_do_not_fit_beside_the_prompt_are_refused_with_both_numbers(
    scripted: Make, max_tokens: int | None
) -> None:
    llm, loop = scripted(max_seq_len=40)
    prompt = {"prompt_token_ids": [5] * 30}
    params = SamplingParams(max_tokens=max_tokens, min_tokens=11)
    with pytest.raises(
        RequestError,
        match=r"min_tokens \(11\) is more than the 10 tokens that fit beside the prompt; lower it, "
        r"or shorten the prompt or raise .*max.seq.len",
    ) as caught:
        llm.generate(prompt, params)
    assert caught.value.parameter == "min_tokens"
    assert loop.seen == []
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=max_tokens, min_tokens=10))
    assert len(output.outputs[0].token_ids) == 10


def test_min_tokens_and_allowed_token_ids_that_leave_no_token_are_refused_by_both_names(
    scripted: Make,
) -> None:
    llm, loop = scripted()
    only_end = {"min_tokens": 2, "allowed_token_ids": [0]}
    for values in (only_end, only_end | {"allowed_token_ids": [0, 7], "stop_token_ids": [7]}):
        with pytest.raises(
            RequestError, match=r"min_tokens \(2\) .* allowed_token_ids \(\[0.*\]\) has no others"
        ):
            llm.generate("a", SamplingParams(**values))
    assert loop.seen == []
    for values in (
        only_end | {"min_tokens": 0},
        only_end | {"ignore_eos": True},
        only_end | {"allowed_token_ids": [0, 5]},
    ):
        llm.generate("a", SamplingParams(max_tokens=2, **values))
    assert len(loop.seen) == 3


def test_max_tokens_of_an_output_is_what_there_was_room_for(scripted: Make) -> None:
    llm, _ = scripted(max_seq_len=16)
    asked = [SamplingParams(max_tokens=count) for count in (3, 50, None)]
    assert [output.max_tokens for output in llm.generate([[5, 6]] * 3, asked)] == [3, 14, 14]


def test_a_bad_prompt_among_several_is_named_by_its_index_and_none_runs(scripted: Make) -> None:
    llm, loop = scripted()
    with pytest.raises(RequestError, match=r"^prompts\[2\]: prompt is empty") as caught:
        llm.generate(["a", "b", "", "c"], SHORT)
    assert caught.value.parameter == "prompt" and loop.seen == []


@pytest.mark.feature("S22")
def test_a_prompt_too_long_is_refused_with_both_numbers_and_one_shorter_is_served(
    scripted: Make,
) -> None:
    llm, _ = scripted(max_seq_len=16)
    with pytest.raises(RequestError, match="prompt has 16 tokens, but sequences may have 16 here"):
        llm.generate([[5] * 16], SHORT)
    (output,) = llm.generate([[5] * 15], SHORT)
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_past_the_model_are_refused(scripted: Make, name: str) -> None:
    llm, _ = scripted()
    vocab = llm._session.tokenizer.vocab_size
    for token, good in ((vocab - 1, True), (vocab, False)):
        params = SamplingParams(
            max_tokens=1, **{name: {token: 1.0} if name == "logit_bias" else [token]}
        )
        if good:
            llm.generate("a", params)
        else:
            with pytest.raises(
                RequestError, match=f"{name}: expected token ids from 0 to {vocab - 1}"
            ):
                llm.generate("a", params)


def test_chat_goes_through_the_template(scripted: Make) -> None:
    llm, loop = scripted()
    talk = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(talk, SHORT)
    assert one.prompt == "<|im|>user: hello\n<|im|>assistant: "
    assert loop.seen[0].prompt[0] == 1
    assert [each.outputs for each in llm.chat([talk, talk], SHORT)] == [one.outputs] * 2
    with pytest.raises(RequestError, match=r"prompts\[1\]: messages: expected"):
        llm.chat([talk, []], SHORT)


@pytest.mark.feature("H8")
def test_keywords_and_a_file_below_them_are_the_configuration(tmp_path: Path) -> None:
    class Reached(Exception):
        pass

    seen: list[EngineConfig] = []

    def start(config: EngineConfig) -> tuple[Any, Any]:
        seen.append(config)
        raise Reached

    with pytest.raises(Reached):
        LLM("demo", page_size=16, attn="sdpa", start=start)
    assert (seen[0].model, seen[0].page_size, seen[0].attn) == ("demo", 16, "sdpa")
    with pytest.raises(UsageError, match="page_size"):
        LLM("demo", page_sise=16, start=start)
    with pytest.raises(UsageError, match="not both"):
        LLM("demo", config=EngineConfig(), start=start)
    with pytest.raises(
        UsageError, match="config: expected a file's path or an EngineConfig, got dict"
    ):
        LLM("demo", config={"page_size": 16}, start=start)  # type: ignore[arg-type]
    file = tmp_path / "engine.toml"
    file.write_text("page_size = 8\nnum_pages = 99\n", encoding="utf-8")
    for given in (file, str(file)):
        with pytest.raises(Reached):
            LLM(config=given, page_size=4, start=start)
        assert (seen[-1].page_size, seen[-1].num_pages) == (4, 99)


def test_importing_headstock_imports_no_torch() -> None:
    code = (
        "import sys, headstock as h; h.SamplingParams(); h.EngineConfig(); h.LLM; h.RequestOutput;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0


def test_llm_chat_takes_a_template_for_one_call_and_the_llm_one_for_all(scripted: Any) -> None:
    hello = [{"role": "user", "content": "hello"}]
    llm, _ = scripted(chat_template="<{{ messages[0].content }}>")
    outputs = [
        *llm.chat(hello),
        *llm.chat([hello, hello], chat_template="{{ messages[0].content }}?"),
    ]
    assert [output.prompt for output in outputs] == ["<hello>", "hello?", "hello?"]
    assert llm.chat(hello, chat_template="{{ 1 + 1 }}")[0].prompt == "2"
    with pytest.raises(UsageError, match="not a Jinja template"):
        llm.chat(hello, chat_template="{{")


def test_a_request_keeps_the_parameters_that_it_began_with(scripted: Make) -> None:
    llm, _ = scripted()
    params = SamplingParams(max_tokens=3)
    stream = llm.stream("a", params)
    params.max_tokens = 1
    assert sum(len(piece.outputs[0].token_ids) for piece in stream) == 3
    params.min_tokens = 2
    with pytest.raises(RequestError, match="min_tokens: expected max_tokens"):
        llm.generate("a", params)


def test_keywords_of_vllm_are_taken_as_far_as_they_change_nothing(scripted: Make) -> None:
    llm, _ = scripted()
    talk = [{"role": "user", "content": "a"}]
    llm.generate("a", SHORT, lora_request=None, mm_processor_kwargs=None)
    llm.chat(talk, SHORT, lora_request=None, chat_template_content_format="auto")  # type: ignore[call-arg]
    for call in (
        lambda: llm.generate("a", SHORT, lora_request=5),
        lambda: llm.chat(talk, SHORT, lora_request=5),  # type: ignore[call-arg]
    ):
        with pytest.raises(NotSupported, match="lora_request=5 is not supported; LoRA adapters"):
            call()
    with pytest.raises(RequestError, match=r"generate has no keyword tools; give it to LLM.chat"):
        llm.generate("a", SHORT, tools=[])
    with pytest.raises(RequestError, match="generate has no keyword colour; leave it out"):
        llm.generate("a", SHORT, colour=1)


def test_the_tokenizer_is_the_one_of_transformers(scripted: Make) -> None:
    llm, _ = scripted()
    tokenizer = llm.get_tokenizer()
    assert tokenizer is llm._session.tokenizer.hf_tokenizer
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert llm.get_default_sampling_params() == llm._session.default_params
