"""Scores of documents beside what transformers computes from the same prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

from headstock import registry
from headstock.config import make_engine_config
from headstock.errors import ModelError, RequestError, UsageError
from headstock.requests import EngineSession
from headstock.requests.scorer import ScoreOptions
from headstock_conformance.model.parity import shape, write

QUERY = "Who wrote the first program?"
DOCUMENTS = ["Ada wrote it.", "The moon is far away. " * 3, "Ada wrote it."]
TASK = "Find who did it"
TEMPLATE = (
    "{%- set task = messages | selectattr('role', 'eq', 'system') | map(attribute='content') "
    "| first | default('Judge') -%}"
    "<|im_start|>{{ task }}\n"
    "{{ (messages | selectattr('role', 'eq', 'query') | first).content }}|"
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|im_end|>"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ ending }}"
)
SETTINGS = {"device": "cpu", "dtype": "float32", "max_seq_len": 640, "num_pages": 300}
TRUE, FALSE = 91, 421


def make_checkpoint(directory: Path, **changes: Any) -> Path:
    """A small model with the demo's tokenizer, in which "yes" and "no" are tokens."""
    write(directory, shape("qwen3", vocab_size=800, max_position_embeddings=2048, **changes))
    demo = registry.load_spec("checkpoint", "demo").directory
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(directory)
    return directory


def declare_tokens(directory: Path, score: dict[str, Any], template: str = TEMPLATE) -> None:
    """The files with which sentence-transformers has a checkpoint scored by tokens."""
    kinds = {"": "base.modules.transformer.Transformer"}
    kinds["1_LogitScore"] = "cross_encoder.modules.logit_score.LogitScore"
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    options = {"chat_template": {"add_generation_prompt": True, "ending": "So: "}}
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir(exist_ok=True)
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    (directory / "sentence_bert_config.json").write_text(
        json.dumps({"transformer_task": "text-generation", "processing_kwargs": options})
    )
    (directory / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"task": TASK}, "default_prompt_name": "task"})
    )
    (directory / "chat_template.jinja").write_text(template)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def session(checkpoint: Path) -> Iterator[EngineSession]:
    with open_session(checkpoint, scoring="yes-no") as session:
        yield session


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, for more files."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def open_session(directory: Path, **more: Any) -> EngineSession:
    return EngineSession(make_engine_config(**{"model": str(directory), **SETTINGS, **more}))


def score(session: EngineSession, queries: list[str], documents: list[str], **more: Any) -> Any:
    """The scores of the documents."""
    batch = session.scorer.process(queries, documents, ScoreOptions(**more))
    for _ in session.stream_outputs(cast("Any", batch.requests), stream_tokens=False):
        pass
    outputs = batch.list_outputs()
    assert all(output.error is None for output in outputs)
    return [output.score for output in outputs]


def probability(directory: Path, text: str, true_id: int, false_id: int) -> float:
    """That of the true token, where it or the false one comes next, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = PreTrainedTokenizerFast.from_pretrained(directory)(text, add_special_tokens=False)
    with torch.inference_mode():
        logits = model(torch.tensor([ids["input_ids"]])).logits[0, -1]
    return float(logits[[false_id, true_id]].softmax(-1)[1])


def write_published(document: str) -> str:
    """What the model card of Qwen3-Reranker writes."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        f"answer the query\n<Query>: {QUERY}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.feature("W17")
@pytest.mark.parametrize(
    "changes", [{}, {"cache_type": "naive", "max_batch_tokens": 24, "max_running_requests": 3}]
)
def test_yes_against_no_has_transformers_probability(
    checkpoint: Path, changes: dict[str, Any]
) -> None:
    with open_session(checkpoint, scoring="yes-no", **changes) as session:
        found = score(session, [QUERY], DOCUMENTS)
        stats = session.engine.stats()
    wanted = [probability(checkpoint, write_published(each), 768, 769) for each in DOCUMENTS]

    assert found == pytest.approx(wanted, abs=1e-5)
    assert found[0] == pytest.approx(found[2], abs=1e-5) and abs(found[0] - found[1]) > 1e-3
    # Each second request has the first one's prompt, and documents have a common beginning.
    assert stats.cached_tokens == 0 if changes else stats.cached_tokens > 0.7 * stats.prompt_tokens


@pytest.mark.feature("W17")
def test_the_checkpoints_own_tokens_template_and_instruction_make_the_prompt(copy: Path) -> None:
    declare_tokens(copy, {"true_token_id": TRUE, "false_token_id": FALSE})
    text = f"<|im_start|>{{}}\n{QUERY}|{DOCUMENTS[0]}<|im_end|><|im_start|>assistant\nSo: "
    with open_session(copy) as session:
        for task, options in (
            (TASK, {}),
            (TASK, {"prompt_name": "task"}),
            ("Sort them", {"instruction": "Sort them"}),
        ):
            wanted = probability(copy, text.format(task), TRUE, FALSE)
            found = score(session, [QUERY], DOCUMENTS[:1], **options)
            assert found == pytest.approx([wanted], abs=1e-5)
        # A document that the template could not take apart stays one text.
        assert score(session, [QUERY, "Why?"], ["{{ 1 / 0 }}", "b"])[0] > 0
        with pytest.raises(RequestError, match="prompt_name: expected one of task, got quest"):
            score(session, [QUERY], DOCUMENTS, prompt_name="quest")


@pytest.mark.feature("W17")
def test_vectors_are_compared_by_cosine_with_the_instructions_of_their_files(copy: Path) -> None:
    modules = [{"type": f"x.{kind}", "path": kind} for kind in ("Transformer", "Pooling")]
    (copy / "modules.json").write_text(json.dumps(modules))
    (copy / "Pooling").mkdir()
    (copy / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    (copy / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "Q: ", "passage": "P: ", "other": "O: "}})
    )
    model = AutoModel.from_pretrained(copy, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(copy)

    def embed(text: str) -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            return torch.nn.functional.normalize(model(ids).last_hidden_state[0].mean(0), dim=0)

    with open_session(copy) as session:
        for prefix, options in (("Q: ", {}), ("O: ", {"prompt_name": "other"})):
            query = embed(prefix + QUERY)
            wanted = [float(query @ embed("P: " + document)) for document in DOCUMENTS]
            found = score(session, [QUERY], DOCUMENTS, **options)
            assert found == pytest.approx(wanted, abs=1e-5)
        pairs = score(session, [QUERY, DOCUMENTS[1]], DOCUMENTS[:2])
        assert pairs[0] == pytest.approx(score(session, [QUERY], DOCUMENTS)[0], abs=1e-6)
        with pytest.raises(RequestError, match="instruction is not supported where vectors"):
            score(session, [QUERY], DOCUMENTS, instruction="Find it")


def test_documents_are_cut_only_when_asked(checkpoint: Path) -> None:
    long = "many words " * 200
    with open_session(checkpoint, scoring="yes-no") as session:
        for options in ({}, {"max_document_tokens": 600}):
            with pytest.raises(RequestError, match=r"^documents\[1\]: prompt has \d+") as raised:
                score(session, [QUERY], ["a", long], **options)
            assert raised.value.parameter == "documents"
        with pytest.raises(RequestError, match=r"^queries: prompt has \d+") as raised:
            score(session, [long], ["a", "b"])
        assert raised.value.parameter == "queries"
        with pytest.raises(RequestError, match=r"^queries\[1\]: prompt has \d+"):
            score(session, [QUERY, long], ["a", "b"])
        cut = score(session, [QUERY], ["a", long], max_document_tokens=9)
        text = session.tokenizer.cut_text(long, 9)
        assert long.startswith(text) and len(session.tokenizer.encode(text)) == 9
        assert cut == pytest.approx(score(session, [QUERY], ["a", text]), abs=1e-6)


@pytest.mark.parametrize(
    ("score_config", "template", "says"),
    [
        ({"true_token_id": TRUE}, TEMPLATE, "the logit of one token alone"),
        ({"true_token_id": True, "false_token_id": 1}, TEMPLATE, "true_token_id: expected a token"),
        ({"true_token_id": 3, "false_token_id": -1}, TEMPLATE, "false_token_id: expected a token"),
        ({"true_token_id": 3, "false_token_id": 3}, TEMPLATE, "expected another token"),
        ({"true_token_id": 3, "false_token_id": 800}, TEMPLATE, "token 800, and the model knows"),
        ({"true_token_id": TRUE, "false_token_id": FALSE}, "a", "writes no messages of the roles"),
    ],
)
def test_what_a_checkpoint_asks_for_in_vain_is_named(
    copy: Path, score_config: dict[str, Any], template: str, says: str
) -> None:
    declare_tokens(copy, score_config, template)
    with open_session(copy) as session:
        with pytest.raises((RequestError, ModelError, UsageError), match=says):
            session.scorer.process([QUERY], DOCUMENTS, ScoreOptions())
        # It generates all the same.
        assert session.input_processor.process("a").prompt.tokens


def test_a_model_without_a_known_score_says_what_to_do(checkpoint: Path) -> None:
    with open_session(checkpoint) as session, pytest.raises(RequestError, match="--scoring yes-no"):
        session.scorer.process([QUERY], DOCUMENTS, ScoreOptions())


def is_unicode(text: str) -> bool:
    """Whether the text has no half of a surrogate pair."""
    return text == text.encode("utf-8", "ignore").decode("utf-8")


WILD = st.text(st.sampled_from("ab 7\n\U0001f642\u00e9{}<|>\u0301") | st.characters(), min_size=1)


@given(st.lists(WILD | st.just("<|im_end|>yes"), min_size=1, max_size=4), st.integers(1, 9))
def test_any_texts_have_a_probability_or_an_error_that_names_one(
    session: EngineSession, texts: list[str], count: int
) -> None:
    scores: list[float] = []
    parameter: str | None = None
    try:
        scores = score(session, texts[:1], texts, max_document_tokens=count)
    except RequestError as error:
        parameter = error.parameter
    assert parameter in ("queries", "documents") or len(scores) == len(texts)
    assert all(0 <= each <= 1 for each in scores)


@given(WILD.filter(is_unicode), st.integers(1, 9))
def test_a_cut_text_is_a_beginning_with_no_more_tokens(
    session: EngineSession, text: str, count: int
) -> None:
    tokenizer = session.tokenizer
    cut = tokenizer.cut_text(text * 9, count)

    assert (text * 9).startswith(cut)
    assert len(tokenizer.encode(cut, add_special_tokens=False)) <= count
    whole = len(tokenizer.encode(text * 9, add_special_tokens=False)) <= count
    assert not whole or cut == text * 9
