"""Scores equal those of transformers in float32, however the tokens are cut into steps."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from attrs import frozen
from checkpoints import VARIANTS, Variant, save_model
from often import often
from packed_ops import PackedOps
from torch import Tensor

from headstock.ops.fbgemm_ops import FbgemmOps
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Model, ModelConfig, Ops, Params
from headstock.weights import load_weights, read_config
from headstock_conformance.model.paged import Paged
from headstock_llama import families as llama
from headstock_qwen import families as qwen

MODELS = {
    "Llama": llama.LLAMA,
    "Mistral": llama.MISTRAL,
    "Qwen2": qwen.QWEN2,
    "Qwen3": qwen.QWEN3,
    "Qwen3Moe": qwen.QWEN3_MOE,
}
LENGTHS = (19, 7, 1)
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@frozen(eq=False)
class Loaded:
    """One variant as headstock loads it, and what transformers makes of some prompts."""

    model: Model
    config: ModelConfig
    params: Params
    prompts: list[list[int]]
    expected: list[Tensor]

    def paged(self, page_size: int, ops: Ops) -> Paged:
        """A fresh pool."""
        specs = self.model.params(self.config)
        params = {name: ops.prepare(specs[name], weight) for name, weight in self.params.items()}
        return Paged.new(self.model, self.config, params, ops, page_size=page_size)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    variant: Variant = request.param
    directory: Path = tmp_path_factory.mktemp(variant.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = save_model(variant, directory)
    model = MODELS[variant.family]
    config = model.config(read_config(directory))
    params = load_weights(
        directory,
        model.params(config),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=64,
    )
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, config.vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    with torch.inference_mode():
        expected = [theirs(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    return Loaded(model, config, params, prompts, expected)


@pytest.mark.parametrize("ops", [TorchOps, PackedOps, FbgemmOps])
def test_whole_prompts_in_one_step(loaded: Loaded, ops: type[Ops]) -> None:
    scores = loaded.paged(4, ops()).step(dict(enumerate(loaded.prompts)))

    torch.testing.assert_close(scores, torch.cat(loaded.expected), **TOLERANCE)


@pytest.mark.parametrize(
    ("chunk", "ops"),
    often(2, [(8, TorchOps), (3, PackedOps), (1, TorchOps), (3, TorchOps), (1, FbgemmOps)]),
)
def test_chunks_and_single_tokens_of_several_rows(
    loaded: Loaded, chunk: int, ops: type[Ops]
) -> None:
    paged = loaded.paged(3, ops())
    found: list[list[Tensor]] = [[] for _ in loaded.prompts]
    for start in range(0, max(LENGTHS), chunk):
        work = {
            i: prompt[start : start + chunk]
            for i, prompt in enumerate(loaded.prompts)
            if start < len(prompt)
        }
        for i, part in zip(
            work, paged.step(work).split([len(t) for t in work.values()]), strict=True
        ):
            found[i].append(part)

    for parts, expected in zip(found, loaded.expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), expected, **TOLERANCE)
