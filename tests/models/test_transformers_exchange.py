"""Which modules of transformers headstock's operations stand in for, and that results stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from decoder_cases import SERVED, make_config
from engine_parity import PROMPTS, answer_alone, assert_equal, generate
from often import often
from quantized_checkpoints import SCHEMES, write_quantized
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from headstock.nn.meta_batch import make_meta_batch
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Activation, Batch, ModelConfig, Params, ParamSpec, Weight
from headstock_conformance.model.parity import write
from headstock_transformers.exchange import exchange_modules
from headstock_transformers.exchanged import GatedMlp, OpsLinear, OpsNorm, PagedAttention
from headstock_transformers.family import make_family
from headstock_transformers.module import build_decoder
from headstock_transformers.options import TransformersOptions
from headstock_transformers.proofs import NormForm, find_activation, find_norm_form
from headstock_transformers.sources import find_sources

TOKENS = 6
EPS = 1e-5
VIEWS = (
    "view reshape unsqueeze transpose select slice t chunk split split_with_sizes unbind expand "
    "alias detach flatten squeeze permute empty_like new_empty".split()
)
"""Operations that launch nothing, or that only make room."""


class Norm(nn.Module):
    """An RMS norm as most models have it: rounded, then multiplied by the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, device="meta"))
        self.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalize(x.float()).to(x.dtype)

    def normalize(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class RoundedLast(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.float() * self.normalize(x.float())).to(x.dtype)


class OneMore(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalize(x.float()) * (1.0 + self.weight.float())).type_as(x)


class HalfMore(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (self.normalize(x.float()) * (0.5 + self.weight.float())).type_as(x)


class EpsOutside(Norm):
    def normalize(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class EpsLeast(Norm):
    def normalize(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp_min(self.eps))


class OtherEps(Norm):
    def normalize(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


class Centered(Norm):
    def normalize(self, x: Tensor) -> Tensor:
        return super().normalize(x - x.mean(-1, keepdim=True))


class Bounded(Norm):
    def normalize(self, x: Tensor) -> Tensor:
        return super().normalize(x).clamp(-2, 2)


class Widened(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.float() * self.normalize(x.float())


class InBfloat16(Norm):
    def normalize(self, x: Tensor) -> Tensor:
        narrow = x.bfloat16()
        return narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + self.eps)


class WithoutWeight(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("kind", "offset"), [(Norm, 0.0), (RoundedLast, 0.0), (OneMore, 1.0)], ids=lambda x: str(x)
)
def test_an_rms_norm_is_found_with_what_it_adds(kind: type[Norm], offset: float) -> None:
    assert find_norm_form(kind()) == NormForm(EPS, offset)


@pytest.mark.parametrize(
    "kind",
    [
        *(HalfMore, EpsOutside, EpsLeast, OtherEps, Centered),
        *(Bounded, Widened, InBfloat16, WithoutWeight),
    ],
)
def test_what_only_looks_like_an_rms_norm_is_none(kind: type[Norm]) -> None:
    assert find_norm_form(kind()) is None


class Mlp(nn.Module):
    """A gated feed-forward part."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(*size, bias=False, device="meta") for size in ((8, 16), (8, 16), (16, 8))
        )
        self.act_fn = act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class ClampedMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=20.0)
        out: Tensor = self.down_proj(self.act_fn(gate) * self.up_proj(x))
        return out


class SwappedMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))
        return out


@pytest.mark.parametrize(
    ("mlp", "activation"),
    [
        (Mlp(F.silu), Activation.SILU),
        (Mlp(F.gelu), Activation.GELU),
        (Mlp(nn.GELU("tanh")), Activation.GELU_TANH),
        (Mlp(F.relu), None),
        (Mlp(lambda x: x * torch.sigmoid(1.01 * x)), None),
        (ClampedMlp(F.silu), None),
        (SwappedMlp(F.silu), None),
    ],
)
def test_a_gated_part_is_found_by_what_it_computes(
    mlp: nn.Module, activation: Activation | None
) -> None:
    assert find_activation(mlp) is activation


def list_kinds(model_type: str, **options: Any) -> Counter[str]:
    """How often each class of modules is in a case."""
    family = make_family(TransformersOptions(**options))
    family.config(make_config(model_type, SERVED[model_type]))
    modules = family.forward.__self__.decoder.model.modules()
    return Counter(type(module).__name__ for module in modules)


def test_a_plain_decoder_has_operations_alone() -> None:
    kinds = list_kinds("qwen3")
    assert (kinds["PagedAttention"], kinds["GatedMlp"]) == (4, 4)
    assert not [name for name in kinds if name.startswith("Qwen3") and "Norm" in name]
    assert "Linear" not in kinds


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("helium", "HeliumAttention"),  # turns neighbouring pairs
        ("ministral3", "Ministral3Attention"),  # scales queries by their position
        ("hunyuan_v1_dense", "HunYuanDenseV1Attention"),  # has a norm after the rope
        ("gpt_oss", "GptOssAttention"),  # has sinks
        ("olmo", "OlmoLayerNorm"),
        ("cohere", "CohereLayerNorm"),
        ("arcee", "ArceeMLP"),
        ("nanochat", "NanoChatMLP"),
    ],
)
def test_modules_that_differ_from_the_operations_stay(model_type: str, kind: str) -> None:
    assert list_kinds(model_type)[kind] >= 4


def test_an_option_leaves_all_modules_in_place() -> None:
    kinds = list_kinds("qwen3", exchange=False)
    assert (kinds["Qwen3Attention"], kinds["Qwen3MLP"], kinds["Qwen3RMSNorm"]) == (4, 4, 17)
    assert kinds["OpsLinear"] == kinds["OpsNorm"] == 0


def make_params(
    specs: Mapping[str, ParamSpec], config: ModelConfig, dtype: torch.dtype
) -> dict[str, Weight]:
    """Parameters made of the same published tensors under any declaration."""
    return {name: Weight(tensor=make_tensor(spec, config, dtype)) for name, spec in specs.items()}


def make_tensor(spec: ParamSpec, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """A parameter, whose sources hold numbers that depend on their names."""
    if spec.compute is not None:
        return spec.compute(config, 64)
    count = len(spec.sources[0])
    parts = spec.parts or (spec.shape[1 if spec.stacked else 0] // count,) * count
    rest = spec.shape[2 if spec.stacked else 1 :]
    rows = []
    for names in spec.sources:
        drawn = [draw(name, (part, *rest)) for name, part in zip(names, parts, strict=True)]
        rows.append(torch.cat(drawn).to(dtype))
    tensor = (torch.stack(rows) if spec.stacked else rows[0]).view(spec.shape)
    tensor = tensor.to(getattr(torch, spec.dtype)) if spec.dtype else tensor
    return tensor if spec.transform is None else spec.transform(tensor)


def draw(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers of a published tensor."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * 0.3


def make_batch(config: ModelConfig, dtype: torch.dtype) -> Batch:
    """A step of one row on the CPU, over two pages."""
    batch = make_meta_batch(config, TOKENS)
    slots = torch.arange(TOKENS)
    return attrs.evolve(
        batch,
        tokens=torch.arange(TOKENS) * 7 + 3,
        positions=torch.arange(TOKENS) + 2,
        slots=(slots,) * len(batch.slots),
        pools=tuple(torch.zeros(2, *pool.shape[1:], dtype=dtype) for pool in batch.pools),
    )


class _Step:
    """A step of a case, by the modules of transformers or by operations."""

    def __init__(self, model_type: str, *, exchange: bool, dtype: torch.dtype) -> None:
        self.family = make_family(TransformersOptions(exchange=exchange))
        self.config = self.family.config(make_config(model_type, SERVED[model_type]))
        specs = self.family.params(self.config)
        self.params: Params = make_params(specs, self.config, dtype)
        self.batch = make_batch(self.config, dtype)

    def run(self, config: ModelConfig | None = None) -> Tensor:
        """Scores; attention gives the queries, since it is the same for both."""
        ops, config = TorchOps(), config or self.config
        with torch.inference_mode():
            hidden = self.family.forward(
                self.params, config, self.batch, lambda q, layer: q.clone(), ops
            )
            assert self.family.logits is not None
            return self.family.logits(self.params, config, hidden, ops)


CASES = ("qwen3", "gemma2", "olmo2", "smollm3", "phi", "qwen2_moe", "helium", "starcoder2")


@pytest.mark.parametrize("model_type", often(3, CASES))
def test_scores_and_pages_are_those_of_the_modules(model_type: str) -> None:
    plain, exchanged = (
        _Step(model_type, exchange=each, dtype=torch.float32) for each in (False, True)
    )
    wanted = plain.run()
    assert torch.allclose(exchanged.run(), wanted, atol=1e-4, rtol=1e-4)
    for found, pool in zip(exchanged.batch.pools, plain.batch.pools, strict=True):
        assert torch.allclose(found, pool, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", often(1, ["qwen3", "gemma2"]))
def test_scores_in_bfloat16_are_as_near_to_float32_as_those_of_the_modules(
    model_type: str,
) -> None:
    right = _Step(model_type, exchange=False, dtype=torch.float32).run()
    plain, exchanged = (
        (_Step(model_type, exchange=each, dtype=torch.bfloat16).run() - right).norm()
        for each in (False, True)
    )
    assert exchanged < 1.5 * plain


class _Launches(TorchDispatchMode):
    """Counts operations that compute.   writes: names"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names[func.overloadpacket.__name__] += 1
        return result


def count_launches(*, exchange: bool) -> Counter[str]:
    """The operations of a step in bfloat16."""
    step = _Step("qwen3", exchange=exchange, dtype=torch.bfloat16)
    step.run()
    with _Launches() as launches:
        step.run()
    return Counter({name: n for name, n in launches.names.items() if name not in VIEWS})


def test_a_layer_launches_less_than_half_of_what_its_modules_do() -> None:
    plain, exchanged = (count_launches(exchange=each) for each in (False, True))
    assert exchanged.total() < plain.total() / 2
    # Four layers: in each a product for queries, keys and values, one for gate and up, two more.
    assert exchanged["linear"] == 4 * 4 + 1
    assert exchanged["rms_norm"] == 4 * 3 + 1
    assert exchanged["index_put_"] == 4
    assert exchanged["pow"] == exchanged["rsqrt"] == 0
    # Once a step, for all layers.
    assert exchanged["neg"] == exchanged["div"] == 1


def test_modules_stay_where_others_reach_into_them() -> None:
    decoder = build_decoder(make_config("qwen3", {}))
    family = make_family(TransformersOptions())
    config = family.config(make_config("qwen3", {}))
    layer = decoder.base.get_submodule("layers.1")

    class Reaching(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            assert self.mlp.gate_proj.weight.dim() == 2
            out: Tensor = super().forward(hidden_states, **kwargs)
            return out

    layer.__class__ = Reaching
    modules, specs = [*decoder.model.named_modules()], find_sources(decoder.model)
    found, params = exchange_modules(decoder, specs, config)
    assert found is decoder and params == specs
    assert [*decoder.model.named_modules()] == modules


def test_a_module_with_a_hook_or_in_two_places_stays() -> None:
    decoder = build_decoder(make_config("qwen3", {}))
    config = make_family(TransformersOptions()).config(make_config("qwen3", {}))
    first, second = (decoder.base.get_submodule(f"layers.{at}") for at in (0, 1))
    first.mlp.register_forward_hook(lambda module, args, output: output)
    second.post_attention_layernorm = second.input_layernorm
    exchange_modules(decoder, find_sources(decoder.model), config)
    assert not isinstance(first.mlp, GatedMlp)
    assert isinstance(first.mlp.down_proj, OpsLinear)
    assert not isinstance(second.input_layernorm, OpsNorm)
    assert isinstance(second.self_attn, PagedAttention)


@pytest.mark.parametrize("exchange", often(1, [True, False]))
def test_keys_and_values_are_divided_by_the_scales_of_a_checkpoint(exchange: bool) -> None:
    plain, scaled = (_Step("qwen3", exchange=exchange, dtype=torch.float32) for _ in range(2))
    layers = tuple(attrs.evolve(each, k_scale=2.0, v_scale=4.0) for each in scaled.config.layers)
    plain.run()
    scaled.run(attrs.evolve(scaled.config, layers=layers))
    for found, pool in zip(scaled.batch.pools, plain.batch.pools, strict=True):
        assert torch.equal(found[:, 0] * 2, pool[:, 0]) and torch.equal(found[:, 1] * 4, pool[:, 1])


@pytest.mark.parametrize("scheme", often(1, ["gptq zeros", "fp8 tensor", "awq", "ct fp8 block"]))
def test_merged_maps_of_packed_weights_are_made_plain(scheme: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2}
    write(tmp_path, make_config("qwen3", {}, **sizes))
    write_quantized(tmp_path, tmp_path / "packed", SCHEMES[scheme])
    outputs, _ = generate(tmp_path / "packed", prompts=PROMPTS[2:5], model_impl="transformers")
    answers = answer_alone(tmp_path, prompts=PROMPTS[2:5])
    for number, (output, answer) in enumerate(zip(outputs, answers, strict=True)):
        assert_equal(output, answer, number)
