"""Decoders that transformers computes, in steps that graphs replay, or why none can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import replayed_sdpa
import torch
from decoder_cases import SERVED, make_config
from engine_parity import MAX_TOKENS, answer_alone, assert_equal, counted, generate
from often import often
from torch import Tensor, nn

from headstock.errors import CannotRun
from headstock.spi import DeviceEnv, ModelConfig
from headstock.startup.decisions import describe_graph_obstacle
from headstock.startup.model_loading import read_family
from headstock_conformance.model.parity import write
from headstock_cuda_graph.runner import CudaGraphRunner
from headstock_transformers.family import make_family
from headstock_transformers.options import TransformersOptions
from headstock_transformers.replays import find_obstacle

EAGER = "phimoe"
"""Its rope copies a table to the device in every step."""
REPLAYED = sorted(
    SERVED.keys() - {EAGER}, key=lambda name: (name not in ("gpt_oss", "gpt2", "mellum"), name)
)
FOUND = {"model_impl": "transformers"}


@pytest.fixture
def replayed(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of graphs that compute again, which a CPU has."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    with replayed_sdpa.installed(folder):
        yield {"attn": "sdpa-replayed", "runner": replayed_sdpa.RUNNER, **FOUND}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps are replayed, by kind."""
    counts: Counter[str] = Counter()
    for name in ("replay_rows", "replay_prompts"):
        monkeypatch.setattr(CudaGraphRunner, name, counted(name, counts))
    return counts


def write_case(directory: Path, model_type: str) -> Path:
    """A random checkpoint of that type."""
    directory.mkdir()
    write(directory, make_config(model_type, SERVED[model_type]))
    return directory


@pytest.mark.feature("G2", "V12")
@pytest.mark.parametrize("model_type", often(2, REPLAYED))
def test_replayed_steps_give_the_tokens_of_transformers(
    model_type: str, replayed: dict[str, Any], counts: Counter[str], tmp_path: Path
) -> None:
    checkpoint = write_case(tmp_path / "model", model_type)
    outputs, _ = generate(checkpoint, max_batch_tokens=11, max_running_requests=7, **replayed)

    assert counts["replay_rows"] > 5 and counts["replay_prompts"]
    for number, (output, answer) in enumerate(zip(outputs, answer_alone(checkpoint), strict=True)):
        assert len(output.token_ids) == MAX_TOKENS
        assert_equal(output, answer, number)


@pytest.mark.feature("G11", "V12")
def test_a_capture_that_fails_after_all_leaves_steps_without_graphs_and_a_note(
    replayed: dict[str, Any],
    counts: Counter[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(work: Callable[[], object], *, warm: bool) -> object:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("rerun.capture", fail)
    checkpoint = write_case(tmp_path / "model", "helium")
    outputs, engine = generate(checkpoint, **replayed)

    assert not +counts
    (note,) = [each for each in engine.summary.notes if each.startswith("graphs are off")]
    assert note.endswith("runner (--runner) eager leaves out the attempt")
    for number, (output, answer) in enumerate(zip(outputs, answer_alone(checkpoint), strict=True)):
        assert_equal(output, answer, number)


def find_config(model_type: str, experts: str = "auto", **changes: Any) -> ModelConfig:
    """What the family makes of a case."""
    settings = SERVED[model_type] | changes
    return make_family(TransformersOptions(experts=experts)).config(
        make_config(model_type, settings)
    )


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("experts", often(1, ["auto", "batched_mm", "grouped_mm"]))
def test_experts_whose_sizes_stay_on_the_device_are_replayed(model_type: str, experts: str) -> None:
    config = find_config(model_type, experts)
    assert (config.is_capturable, config.capture_obstacle) == (True, "")


@pytest.mark.feature("V12")
def test_a_loop_over_experts_is_not_replayed() -> None:
    config = find_config("mixtral", "eager")
    assert not config.is_capturable
    assert config.capture_obstacle == "model.layers.0.mlp.experts waits for the device (nonzero)"


def test_a_table_that_is_copied_to_the_device_is_found() -> None:
    wanted = "model.rotary_emb copies a tensor of the host to the device (_to_copy)"
    assert find_config(EAGER).capture_obstacle == wanted


def test_a_token_that_pads_is_not_looked_for_in_every_step() -> None:
    assert find_config("gpt2", pad_token_id=0).is_capturable


@pytest.mark.feature("V12")
def test_a_refusal_of_graphs_says_what_was_found(replayed: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write_case(tmp_path / "model", EAGER)
    with pytest.raises(CannotRun, match=r"captured: model.rotary_emb copies .*; set the runner to"):
        generate(checkpoint, **replayed)
    assert not read_family(checkpoint, implementation="transformers").config.is_capturable


@pytest.mark.feature("V12")
def test_the_start_says_why_steps_are_not_replayed() -> None:
    gpu, model = DeviceEnv(device="cuda", capability=(9, 0)), find_config("mixtral", "eager")
    note = "steps are not replayed as graphs: model.layers.0.mlp.experts waits for the device"
    assert describe_graph_obstacle(model, gpu).startswith(note)
    assert describe_graph_obstacle(model, DeviceEnv(device="cpu")) == ""
    assert describe_graph_obstacle(find_config("mixtral"), gpu) == ""


def set_attribute(module: nn.Module, x: Tensor) -> Tensor:
    """What depends on an earlier step."""
    module.longest = x.shape[1]  # type: ignore[assignment]
    return x


def swallow(x: Tensor) -> Tensor:
    """What goes on after an operation that a capture does not survive."""
    try:
        return x * x.sum().item()
    except Exception:
        return x


def set_first(x: Tensor) -> Tensor:
    """What stores a number where a tensor says."""
    result = x.clone()
    result[x[0, :, 0].long().clamp(0, 0)] = 0.0
    return result


HOST = torch.arange(4.0)
OBSTACLES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "item": (lambda x: x * x.sum().item(), "waits for the device (_local_scalar_dense)"),
    "a condition": (lambda x: x if x.sum() > 0 else -x, "waits for the device"),
    "an integer": (lambda x: x * int(x.argmax()), "waits for the device"),
    "tolist": (lambda x: x.sum(-1).tolist(), "waits for the device (_to_copy)"),
    "nonzero": (lambda x: x.nonzero(), "waits for the device (nonzero)"),
    "where": (lambda x: torch.where(x > 0), "waits for the device (nonzero)"),
    "a stored number": (set_first, "stores a number by an index"),
    "a mask": (lambda x: x[x > 0], "waits for the device (index by a mask)"),
    "a set mask": (lambda x: x.clone().index_put_((x > 0,), x.sum()), "index_put_ by a mask"),
    "unique": (lambda x: x.unique(), "waits for the device (_unique2)"),
    "masked_select": (lambda x: x.masked_select(x > 0), "waits for the device (masked_select)"),
    "equal": (lambda x: torch.equal(x, x), "waits for the device (equal)"),
    "allclose": (lambda x: torch.allclose(x, x), "waits for the device"),
    "repeats": (lambda x: x.repeat_interleave(x[0, :, 0].long(), 1), "(repeat_interleave)"),
    "to the host": (lambda x: x.cpu(), "waits for the device (_to_copy)"),
    "numbers": (lambda x: x + torch.tensor([1.0], device=x.device), "copies numbers to the device"),
    "new numbers": (lambda x: x + x.new_tensor([1.0]), "copies numbers to the device (new_tensor)"),
    "a table": (lambda x: HOST.to(x.device), "copies a tensor of the host to the device"),
    "a copy": (lambda x: x[0, 0, :4].copy_(HOST), "copies a tensor of the host to the device"),
    "a host's choice": (lambda x: torch.where(x > 0, x, torch.tensor(1.0)), "(where)"),
    "a list": (lambda x: x[:, [0, 1]], "indexes by a list"),
    "what is caught": (swallow, "waits for the device"),
}
HARMLESS: dict[str, Callable[[Tensor], object]] = {
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "a read of the host": lambda x: x * torch.tensor(2.0).item(),
    "a mask that fills": lambda x: x.masked_fill(x > 0, 0.0),
    "a choice": lambda x: torch.where(x > 0, x, 0.0),
    "an index of the device": lambda x: x[:, torch.arange(2, device=x.device)],
    "equal repeats": lambda x: x.repeat_interleave(2, 1),
    "the same device": lambda x: x.to(x.device),
    "a sort": lambda x: x.sort(-1),
}


FindAfter = Callable[[Callable[[nn.Module, Tensor], object]], str]


@pytest.fixture(scope="module")
def find_after() -> FindAfter:
    """The obstacle of a decoder whose second layer does something too."""
    family = make_family(TransformersOptions())
    config = family.config(make_config("helium", {}))
    assert config.is_capturable
    decoder = family.forward.__self__.decoder
    mlp = decoder.base.layers[1].mlp
    usual = type(mlp)

    def find(work: Callable[[nn.Module, Tensor], object]) -> str:
        class Doing(usual):  # type: ignore[misc, valid-type]
            def forward(self, x: Tensor) -> Tensor:
                work(self, x)
                out: Tensor = super().forward(x)
                return out

        mlp.__class__ = Doing
        try:
            return find_obstacle(decoder, config)
        finally:
            mlp.__class__ = usual
            vars(mlp).pop("longest", None)

    return find


@pytest.mark.feature("V12")
@pytest.mark.parametrize("name", OBSTACLES)
def test_what_a_capture_would_not_survive_is_found_with_its_module(
    name: str, find_after: FindAfter
) -> None:
    work, reason = OBSTACLES[name]
    found = find_after(lambda module, x: work(x))
    assert reason in found
    assert found.startswith("model.layers.1.mlp ") or name == "what is caught"


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_capture_survives_is_no_obstacle(name: str, find_after: FindAfter) -> None:
    assert find_after(lambda module, x: HARMLESS[name](x)) == ""


def test_a_module_that_keeps_something_of_a_step_is_found(find_after: FindAfter) -> None:
    found = find_after(set_attribute)
    assert found == "model.layers.1.mlp sets longest as it runs, which a replay would not"
