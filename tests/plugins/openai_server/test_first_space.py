"""The text of answers over HTTP, of a vocabulary that drops the first space of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Answer, Served, serve
from tokenizers import Tokenizer, decoders, models, normalizers

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WORDS = ("<unk>", "<s>", "</s>", "▁Once", "▁upon", "▁a", "▁time", ",", "▁user", ":")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
TIME, COMMA = 6, 7
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %},{% endif %}"
)


def byte_id(byte: int) -> int:
    return len(WORDS) + byte


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with random weights and a vocabulary in the manner of Llama 2's."""
    folder: Path = tmp_path_factory.mktemp("llama")
    pieces = [*WORDS, *BYTES, *sorted({letter for word in WORDS[3:] for letter in word} - {*",:"})]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens(list(WORDS[:3]))
    inner.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with serve("--model", str(folder), "--load-format", "dummy", "--num-pages", "16") as served:
        yield served


def ask_for(token: int, **more: Any) -> dict[str, Any]:
    """A body whose answer is this token again and again."""
    return {"temperature": 0, "max_tokens": 2, "logit_bias": {str(token): 100}, **more}


def join_streamed(answer: Answer, index: int = 0) -> dict[str, Any]:
    """The choice that the chunks of a stream add up to."""
    text, logprobs = "", {"tokens": [], "text_offset": []}
    for event in answer.events:
        for choice in event["choices"]:
            if choice["index"] == index:
                text += choice["text"]
                for name, values in logprobs.items():
                    values += (choice["logprobs"] or {}).get(name, ())
    return {"text": text, "logprobs": logprobs}


@pytest.mark.parametrize("echo", [True, False])
def test_prompt_and_answer_are_the_text_of_all_tokens(llama: Served, echo: bool) -> None:
    body = ask_for(TIME, prompt=[1, 3, 4, 5], logprobs=1, echo=echo)
    (whole,) = llama.post(TEXT, body).json["choices"]
    streamed = join_streamed(llama.post(TEXT, body | {"stream": True}))
    before = "Once upon a" if echo else ""
    for choice in (whole, streamed):
        text, found = choice["text"], choice["logprobs"]
        assert text == before + " time time"
        tokens = [token for token in found["tokens"] if token != "<s>"]
        assert tokens == [*(["Once", " upon", " a"] if echo else []), " time", " time"]
        for start, token in zip(found["text_offset"][-len(tokens) :], tokens, strict=True):
            assert text[start:].startswith(token)


def test_an_echo_completes_the_character_that_token_ids_begin(llama: Served) -> None:
    first, second = (byte_id(byte) for byte in "é".encode())
    body = ask_for(second, prompt=[1, 3, first], max_tokens=1, echo=True)
    assert llama.post(TEXT, body).json["choices"][0]["text"] == "Onceé"
    assert join_streamed(llama.post(TEXT, body | {"stream": True}))["text"] == "Onceé"
    unfinished = llama.post(TEXT, body | {"max_tokens": 0}).json["choices"][0]["text"]
    assert unfinished == "Once\ufffd"
    other = llama.post(TEXT, ask_for(TIME, prompt=[1, 3, first], echo=True)).json["choices"]
    assert other[0]["text"] == "Once\ufffd time time"


def test_the_tokens_of_an_echo_joined_are_its_text_where_the_answer_completes_a_character(
    llama: Served,
) -> None:
    first, second, third = (byte_id(byte) for byte in "天".encode())
    for prompt, token, end in (
        ([1, 3, first, second], third, "天"),
        ([1, 3, first, second], TIME, "\ufffd\ufffd time"),
        ([1, 3, first, second, 1], third, "天"),
        ([first, second], third, "天"),
    ):
        body = ask_for(token, prompt=prompt, max_tokens=1, echo=True, logprobs=1)
        (whole,) = llama.post(TEXT, body).json["choices"]
        for choice in (whole, join_streamed(llama.post(TEXT, body | {"stream": True}))):
            found = choice["logprobs"]
            assert choice["text"] == ("Once" if 3 in prompt else "") + end
            tokens = [token for token in found["tokens"] if token != "<s>"]
            assert "".join(tokens) == choice["text"]
            starts = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
            offsets = zip(found["text_offset"], found["tokens"], strict=True)
            assert [offset for offset, token in offsets if token != "<s>"] == starts


def test_tokens_that_are_bytes_come_with_their_characters(llama: Served) -> None:
    body = ask_for(byte_id(ord("\n")), logprobs=True, top_logprobs=1, max_tokens=3)
    body["messages"] = [{"role": "user", "content": "Once"}]
    (choice,) = llama.post(CHAT, body).json["choices"]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "\n\n\n"
    assert [each["token"] for each in content] == ["\n"] * 3
    assert [each["bytes"] for each in content] == [[10]] * 3
    streamed = [event["choices"][0] for event in llama.post(CHAT, body | {"stream": True}).events]
    parts = [each["logprobs"]["content"] for each in streamed if each.get("logprobs")]
    assert [each["token"] for part in parts for each in part] == ["\n"] * 3


def test_an_answer_of_a_chat_begins_with_its_space(llama: Served) -> None:
    begun = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": "upon"}]
    go_on = {"add_generation_prompt": False, "continue_final_message": True}
    for messages, more in ((begun[:1], {}), (begun, go_on)):
        body = ask_for(TIME, messages=messages, **more)
        (choice,) = llama.post(CHAT, body).json["choices"]
        assert choice["message"]["content"] == " time time"


def test_stop_strings_that_hold_special_tokens_end_answers_over_http(server: Served) -> None:
    body = ask_for(2, prompt="12 + 30 =", ignore_eos=True, max_tokens=6)
    cases = {
        "<|im_end|>": (1, {}),
        "<|im_end|><|im_end|>": (2, {"skip_special_tokens": False}),
        "<|im_end|><|im_end|><|im_end|>": (3, {"stream": True}),
    }
    for stop, (count, more) in cases.items():
        answer = server.post(TEXT, body | {"stop": stop} | more)
        if not more.get("stream"):
            assert answer.json["usage"]["completion_tokens"] == count
        choices = answer.events if more.get("stream") else [answer.json]
        last = choices[-1]["choices"][0]
        assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("", "stop", stop)
    kept = server.post(TEXT, body | {"stop": "<|im_end|>", "include_stop_str_in_output": True})
    assert kept.json["choices"][0]["text"] == "<|im_end|>"
