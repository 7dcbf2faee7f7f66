"""The text of an answer is what its tokens add to that of the prompt's."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import count_examples
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers

from headstock import LLM, SamplingParams
from headstock.outputs import CompletionOutput, TokenLogprob, Update
from headstock.text.completion import CompletionBuilder, join_pieces
from headstock.text.detokenizer import Detokenizer
from headstock.text.logprobs import read_tokens
from headstock.text.tokenizer import Tokenizer

Make = Callable[..., tuple[LLM, Any]]

WORDS = ("▁", "▁Once", "▁upon", "a", "b", "é", ",", "▁▁")


def write_unigram(inner: Inner) -> None:
    """In the manner of Mistral's: a Metaspace decoder."""
    inner.decoder = decoders.Metaspace(prepend_scheme="first")


def write_prepended(inner: Inner) -> None:
    """In the manner of Llama 2's and TinyLlama's, with bytes."""
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    strip = decoders.Strip(" ", 1, 0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    inner.decoder = decoders.Sequence(steps)


def write_word_pieces(inner: Inner) -> None:
    """In the manner of BERT's: spaces between words, cleaned up."""
    inner.decoder = decoders.WordPiece(prefix="a", cleanup=True)


def write_suffixed(inner: Inner) -> None:
    """In the manner of the first GPT's: a suffix ends a word."""
    inner.decoder = decoders.BPEDecoder(suffix="b")


WRITERS = {
    "unigram": write_unigram,
    "prepended": write_prepended,
    "word pieces": write_word_pieces,
    "suffixed": write_suffixed,
}


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", *WRITERS])
def any_tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    if request.param not in WRITERS:
        directory: Path = request.getfixturevalue(request.param)
        return Tokenizer(directory)
    directory = tmp_path_factory.mktemp("vocabulary")
    write_tokenizer(directory, WRITERS[request.param])
    return Tokenizer(directory)


def write_tokenizer(directory: Path, write: Callable[[Inner], None]) -> None:
    pieces = ["<unk>", "<s>", "</s>", *WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Inner(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    write(inner)
    inner.add_special_tokens(pieces[:3])
    inner.save(str(directory / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def draw_tokens(data: st.DataObject, tokenizer: Tokenizer, most: int) -> list[int]:
    """Few distinct ones, so that characters are whole at times, and some that are none."""
    few = [*range(8), *tokenizer.encode("é日😀"), *sorted(tokenizer.byte_ids)[:3]]
    letters = [token for byte, token in byte_tokens(tokenizer).items() if byte in "é\n 日".encode()]
    ids = st.sampled_from([*few, *letters]) | st.integers(0, tokenizer.vocab_size + 1)
    return data.draw(st.lists(ids, max_size=most))


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    return {byte: token for token, byte in tokenizer.byte_values.items()}


def expected_text(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], skip: bool) -> str:
    """By the definition: what follows the characters that both texts have."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *tokens], skip_special_tokens=skip)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
    return whole[sum(1 for _ in same) :]


@settings(max_examples=count_examples(120))
@given(data=st.data(), skip=st.booleans())
def test_prompt_and_answer_are_the_text_of_all_tokens(
    any_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt, tokens = (draw_tokens(data, any_tokenizer, most) for most in (40, 30))
    expected = expected_text(any_tokenizer, prompt, tokens, skip)

    def open_detokenizer() -> Detokenizer:
        return Detokenizer(any_tokenizer, skip_special_tokens=skip, prompt=prompt)

    detokenizer = open_detokenizer()
    singly = [*map(detokenizer.add_token, tokens), detokenizer.flush()]
    assert "".join(singly) == expected

    cut = data.draw(st.integers(0, len(tokens)))
    detokenizer = open_detokenizer()
    head = detokenizer.add_tokens(tokens[:cut])
    assert head + detokenizer.peek() == expected_text(any_tokenizer, prompt, tokens[:cut], skip)
    assert head + detokenizer.add_tokens(tokens[cut:]) + detokenizer.flush() == expected

    detokenizer = open_detokenizer()
    assert detokenizer.add_tokens(tokens[:cut]) + detokenizer.add_last_tokens(tokens[cut:]) == (
        expected
    )


def update_of(tokens: list[int], **end: Any) -> Update:
    entries = [TokenLogprob(token, -1.0, ((3, -0.5), (token, -1.0)), 2) for token in tokens]
    return Update(id="a", tokens=tuple(tokens), logprobs=tuple(entries), **end)


def build(
    tokenizer: Tokenizer, prompt: list[int], parts: list[list[int]], **params: Any
) -> list[CompletionOutput]:
    """The pieces of an answer whose tokens come in these parts."""
    builder = CompletionBuilder(0, SamplingParams(**params), tokenizer, None, prompt)
    pieces = []
    for at, part in enumerate(parts, start=1):
        end = {"finish_reason": "length"} if at == len(parts) else {}
        pieces.append(builder.apply_update(update_of(part, **end)))
        if builder.is_finished:
            break
    return pieces


@settings(max_examples=count_examples(120))
@given(data=st.data(), skip=st.booleans())
def test_the_texts_of_tokens_joined_are_the_answer_however_it_is_cut(
    any_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt = draw_tokens(data, any_tokenizer, 12)
    parts = [draw_tokens(data, any_tokenizer, 5) for _ in range(data.draw(st.integers(0, 5)))]
    # An engine says with the last token that it is the last one.
    parts.append([*draw_tokens(data, any_tokenizer, 4), any_tokenizer.encode("é")[-1]])
    tokens = [token for part in parts for token in part]
    pieces = build(any_tokenizer, prompt, parts, logprobs=2, skip_special_tokens=skip)
    hidden = any_tokenizer.special_ids if skip else frozenset()

    whole = join_pieces(pieces)
    assert whole.text == expected_text(any_tokenizer, prompt, tokens, skip)
    assert whole.token_ids == tokens
    for piece in [*pieces, whole]:
        assert piece.logprobs is not None
        texts = [
            table[token].decoded_token
            for token, table in zip(piece.token_ids, piece.logprobs, strict=True)
            if token not in hidden
        ]
        assert piece is not whole or "".join(texts) == whole.text
    (at_once,) = build(any_tokenizer, prompt, [tokens], logprobs=2, skip_special_tokens=skip)
    assert at_once.logprobs == whole.logprobs


@given(data=st.data(), skip=st.booleans())
def test_the_texts_of_a_prompts_tokens_joined_are_its_text(
    any_tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    prompt = draw_tokens(data, any_tokenizer, 30)
    entries = [None, *(TokenLogprob(token, -1.0) for token in prompt[1:])][: len(prompt)]
    hidden = any_tokenizer.special_ids if skip else frozenset()
    tables = read_tokens(prompt, entries, any_tokenizer, skip_special_tokens=skip)
    text = "".join(each.text for each in tables if each.token not in hidden)
    assert [each.token for each in tables] == prompt
    assert text == any_tokenizer.decode(prompt, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("llama")
    write_tokenizer(directory, write_prepended)
    return Tokenizer(directory)


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [tokenizer.backend.token_to_id(text) for text in texts]


def test_a_byte_that_is_a_character_has_it_and_the_next_token_none_of_it(llama: Tokenizer) -> None:
    tokens = ids_of(llama, "<0x0A>", "▁Once", "<0xC3>", "<0xA9>", "a")
    pieces = build(llama, ids_of(llama, "<s>", "b"), [[each] for each in tokens], logprobs=1)
    whole = join_pieces(pieces)
    assert whole.logprobs is not None
    texts = [
        table[token].decoded_token for token, table in zip(tokens, whole.logprobs, strict=True)
    ]
    assert texts == ["\n", " Once", "", "é", "a"]
    # A token comes with its text.
    assert [piece.token_ids for piece in pieces] == [[], tokens[:2], [], [], tokens[2:]]
    assert [piece.text for piece in pieces] == ["", "\n Once", "", "", "éa"]


def test_alternatives_have_the_text_that_they_would_add(llama: Tokenizer) -> None:
    first, half, rest, once, end = ids_of(llama, "b", "<0xC3>", "<0xA9>", "▁Once", "</s>")
    prompt = [first, half]
    top = tuple((token, -1.0) for token in (rest, once, half, end))
    builder = CompletionBuilder(0, SamplingParams(logprobs=4), llama, None, prompt)
    update = Update(
        id="a", tokens=(first,), logprobs=(TokenLogprob(first, -3.0, top, 9),), finish_reason="stop"
    )
    (table,) = builder.apply_update(update).logprobs or ()
    shown = {token: (each.rank, each.decoded_token) for token, each in table.items()}
    assert [*table] == [first, rest, once, half, end]
    assert shown == {
        first: (9, "b"),
        rest: (1, "é"),
        once: (2, " Once"),
        half: (3, ""),
        end: (4, "</s>"),
    }


@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_behind_nothing_but_a_bos_begins_as_all_tokens_do(
    llama: Tokenizer, skip: bool
) -> None:
    prompt, tokens = ids_of(llama, "<s>"), ids_of(llama, "▁Once", "▁upon")
    (answer,) = build(llama, prompt, [tokens], skip_special_tokens=skip)
    assert answer.text == ("Once upon" if skip else " Once upon")


def test_only_the_last_tokens_of_a_prompt_are_read(
    llama: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = []
    has_token = llama.has_token
    monkeypatch.setattr(
        llama, "has_token", lambda token: looked_up.append(token) or has_token(token)
    )
    prompt = ids_of(llama, "▁Once", "b") * 50_000
    detokenizer = Detokenizer(llama, prompt=prompt)
    assert (len(looked_up), detokenizer.window) == (4, prompt[-4:])


@pytest.mark.parametrize("pace", [1, 3])
def test_the_answers_of_an_llm_keep_their_first_space(
    scripted: Make, llama: Tokenizer, pace: int
) -> None:
    tokens = ids_of(llama, "▁Once", "a", "▁upon")
    llm, _ = scripted(directory=llama._directory, script=lambda request: tokens, pace=pace)
    prompt = {"prompt_token_ids": ids_of(llama, "<s>", "▁Once", ",")}
    for params in (
        SamplingParams(n=2),
        SamplingParams(stop=["zz"], skip_special_tokens=False),
        SamplingParams(logprobs=0, prompt_logprobs=0),
    ):
        (output,) = llm.generate(prompt, params)
        pieces = [*llm.stream(prompt, params)]
        streamed = "".join(piece.outputs[0].text for piece in pieces if piece.outputs[0].index == 0)
        assert streamed == " Oncea upon"
        assert {answer.text for answer in output.outputs} == {" Oncea upon"}
    assert output.prompt_logprobs is not None
    tables = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    assert [table[token].decoded_token for token, table in tables if table] == ["Once", ","]
    assert llm.generate(prompt, SamplingParams(stop=" O"))[0].outputs[0].stop_reason == " O"
