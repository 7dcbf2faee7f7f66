"""Show by numbers that a module of transformers computes what an operation does."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from headstock.spi import Activation, Weight
from headstock_transformers.attention import INPUTS
from headstock_transformers.exchanged import (
    AttentionForm,
    GatedMlp,
    OpsLinear,
    OpsNorm,
    PagedAttention,
)
from headstock_transformers.operations import PLAIN, computing_with

_SIZES = (1e-4, 1e-3, 1e-2, 1.0, 30.0, 1e3)
"""Of the numbers of a token; with the smallest, what is added to a mean square decides."""
_TOKENS = 5
_WIDTH = 12
"""Of the streams that stand for a model's own, whose maps would take its memory."""
_INNER = 20
_FLOAT32_ERROR = 1e-5
_BFLOAT16_ERROR = 3 * 2**-8
"""Three roundings: a module may round twice, before and after its weight, an operation rounds once.
"""
_LARGEST_EPS = 0.1
_FARTHEST = 1 << 20


@frozen
class NormForm:
    """What a norm adds to the mean square, and to its weight."""

    eps: float
    offset: float


def find_norm_form(module: nn.Module) -> NormForm | None:
    """How `rms_norm` computes the module; None where it does not.

    module: on the meta device
    """
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module._buffers or module._modules:
        return None
    shape = module.get_parameter("weight").shape
    if len(shape) != 1:
        return None
    found = {value for value in vars(module).values() if type(value) is float}
    forms = [
        NormForm(eps, offset)
        for eps in sorted(found)
        if 0 < eps < _LARGEST_EPS
        for offset in (0.0, 1.0)
    ]
    return next((form for form in forms if _is_norm(module, form)), None)


def _is_norm(module: nn.Module, form: NormForm) -> bool:
    """Whether the module is an RMS norm of this form, in float32 and in bfloat16."""
    noise = _Noise()
    norm = copy.deepcopy(module).to_empty(device="cpu")
    (width,) = norm.get_parameter("weight").shape
    rows = noise.draw(len(_SIZES) + 1, 4, width)
    rows *= torch.tensor((0.0, *_SIZES))[:, None, None]
    for dtype in (torch.float32, torch.bfloat16):
        norm.weight = nn.Parameter(noise.draw(width).to(dtype), requires_grad=False)
        stored = norm.get_parameter("weight").detach()
        weight = Weight(tensor=stored.float() + form.offset if form.offset else stored)
        x = rows.to(dtype)
        with torch.inference_mode():
            wanted = [_try(norm, each) for each in (x, x[None], x.flatten(0, 1)[None])]
            result = PLAIN.rms_norm(x.flatten(0, 1), weight, form.eps)
        if not all(_is_near(result, each, to="number") for each in wanted):
            return False
    return True


def find_activation(mlp: nn.Module) -> Activation | None:
    """Of which activation the module is a gated feed-forward part; None where it is none.

    mlp: on the meta device, with the maps `gate_proj`, `up_proj` and `down_proj`
    """
    return next((each for each in Activation if _is_gated(mlp, each)), None)


def _is_gated(mlp: nn.Module, activation: Activation) -> bool:
    """Whether the module is that part."""
    noise = _Noise()
    sizes = {
        "gate_proj": (_WIDTH, _INNER),
        "up_proj": (_WIDTH, _INNER),
        "down_proj": (_INNER, _WIDTH),
    }
    small = {
        name: noise.make_map(*size, like=mlp.get_submodule(name)) for name, size in sizes.items()
    }
    merged = merge_maps((small["gate_proj"], small["up_proj"]))
    operation = GatedMlp(merged, copy_map(small["down_proj"]), activation)
    rows = noise.draw(len(_SIZES), _WIDTH) * torch.tensor(_SIZES)[:, None]
    twin = make_twin(mlp, small)
    for dtype in (torch.float32, torch.bfloat16):
        x = rows.to(dtype)
        _cast((twin, operation), dtype)
        with torch.inference_mode(), computing_with(PLAIN):
            for shaped in (x, x[None]):
                if not _is_near(operation(shaped), _try(twin, shaped)):
                    return False
    return True


def is_attention(
    attention: nn.Module,
    form: AttentionForm,
    out_name: str,
    norms: Sequence[str],
    call: Mapping[str, Any],
    *,
    is_brief: bool = False,
) -> bool:
    """Whether the module gives attention what `PagedAttention` gives it, and adds the same.

    attention: on the meta device, with the attention function `COMPARED`
    norms: the names of its norms of queries and of keys
    call: the arguments that it gets in a step
    is_brief: whether one comparison is enough, since another layer's like this had all
    """
    noise = _Noise()
    heads = dict(zip(("q_proj", "k_proj", "v_proj"), form.rows, strict=True))
    small = {
        name: noise.make_map(_WIDTH, rows, like=attention.get_submodule(name))
        for name, rows in heads.items()
    }
    out = noise.make_map(form.rows[0], _WIDTH, like=attention.get_submodule(out_name))
    children: dict[str, nn.Module] = {**small, out_name: out}
    for name in norms:
        norm = copy.deepcopy(attention.get_submodule(name)).to_empty(device="cpu")
        weight = noise.draw(len(norm.get_parameter("weight")))
        norm.weight = nn.Parameter(weight, requires_grad=False)
        children[name] = norm
    twin = make_twin(attention, children)
    operation = PagedAttention(
        attention.config, 0, form, merge_maps(list(small.values())), copy_map(out), out_name
    )
    weights = [children[name].get_parameter("weight") + form.offset for name in norms]
    if form.norm == "head":
        counts = (form.heads, form.kv_heads)
        rows = [each.expand(count, -1) for each, count in zip(weights, counts, strict=True)]
        _set_weight(operation.qk_norm, torch.cat(rows))
    elif form.norm == "whole":
        for norm, weight in zip((operation.q_norm, operation.k_norm), weights, strict=True):
            _set_weight(norm, weight)
    for dtype in (torch.float32,) if is_brief else (torch.float32, torch.bfloat16):
        _cast((twin, operation), dtype)
        for size in (30.0,) if is_brief else (1e-3, 1.0, 30.0):
            arguments = noise.fill_call(call, size, dtype)
            if arguments is None or not _gives_the_same(operation, twin, arguments):
                return False
    return True


def _gives_the_same(operation: nn.Module, twin: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether both give attention the same, and add the same."""
    seen = []
    for module in (operation, twin):
        inputs: list[tuple[Tensor, ...]] = []
        token = INPUTS.set(inputs)
        try:
            with torch.inference_mode(), computing_with(PLAIN):
                result = module(**arguments)
        except Exception:
            return False
        finally:
            INPUTS.reset(token)
        if not (isinstance(result, tuple) and len(result) == 2 and result[1] is None):
            return False
        if len(inputs) != 1:
            return False
        seen.append([*inputs[0], result[0]])
    # Turned numbers are sums that may cancel, so they are less than what was rounded.
    return all(_is_near(*pair, to="all") for pair in zip(*seen, strict=True))


class _Noise:
    """The same random numbers for every module."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers in float32."""
        return torch.randn(*shape, generator=self.generator)

    def make_map(self, width: int, outs: int, *, like: nn.Module) -> nn.Linear:
        """A linear map of that size, with a bias where the other has one."""
        small = nn.Linear(width, outs, bias=like.bias is not None)
        small.weight = nn.Parameter(self.draw(outs, width) / width**0.5, requires_grad=False)
        if small.bias is not None:
            small.bias = nn.Parameter(self.draw(outs), requires_grad=False)
        return small

    def fill_call(
        self, call: Mapping[str, Any], size: float, dtype: torch.dtype
    ) -> dict[str, Any] | None:
        """Arguments of that kind for some tokens; None for what is not known.

        size: of hidden states
        """
        filled: dict[str, Any] = {}
        for name, value in call.items():
            if name == "hidden_states":
                filled[name] = (self.draw(1, _TOKENS, _WIDTH) * size).to(dtype)
            elif name == "position_embeddings" and isinstance(value, tuple):
                # Any numbers, of which rotations are some.
                filled[name] = tuple(
                    self.draw(1, _TOKENS, each.shape[-1]).to(dtype) for each in value
                )
            elif isinstance(value, Tensor):
                if value.dtype is not torch.int64 or value.dim() != 2:
                    return None
                shape = (1, _TOKENS)
                filled[name] = torch.randint(_FARTHEST, shape, generator=self.generator)
            elif value is None or isinstance(value, bool | int | float | str):
                filled[name] = value
            else:
                return None
        return filled


def make_twin(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """The same module with these children; all else is shared."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    return twin


def merge_maps(maps: Sequence[nn.Linear]) -> OpsLinear:
    """One map, whose outputs are those of the maps one after the other."""
    rows = sum(each.out_features for each in maps)
    has_bias = maps[0].bias is not None
    merged = OpsLinear(maps[0].in_features, rows, bias=has_bias)
    for name in ("weight", "bias") if has_bias else ("weight",):
        joined = torch.cat([each.get_parameter(name).detach() for each in maps])
        setattr(merged, name, nn.Parameter(joined, requires_grad=False))
    merged.hold()
    return merged


def copy_map(linear: nn.Linear) -> OpsLinear:
    """The same map as an operation."""
    return merge_maps((linear,))


def _set_weight(norm: OpsNorm, weight: Tensor) -> None:
    """Give the norm a weight."""
    norm.weight = nn.Parameter(weight.detach(), requires_grad=False)
    norm.hold()


def _cast(modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Bring parameters to the type; those of other modules that are shared stay."""
    for module in modules:
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                setattr(each, name, nn.Parameter(parameter.detach().to(dtype), False))
            if isinstance(each, OpsLinear | OpsNorm):
                each.hold()


def _try(module: nn.Module, x: Tensor) -> Tensor | None:
    """What the module makes of it; None where it raises."""
    try:
        result = module(x)
    except Exception:
        return None
    return result if isinstance(result, Tensor) else None


def _is_near(found: Tensor, wanted: Tensor | None, *, to: str = "row") -> bool:
    """Whether results differ by no more than the rounding of their type.

    to: what differences are relative to: each "number", with any shape, or the largest number of
        its "row", or of "all"
    """
    if wanted is None or found.dtype is not wanted.dtype or found.numel() != wanted.numel():
        return False
    if to != "number" and found.shape != wanted.shape:
        return False
    limit = _FLOAT32_ERROR if found.dtype is torch.float32 else _BFLOAT16_ERROR
    found, wanted = found.double().reshape(wanted.shape), wanted.double()
    sizes = {"number": wanted.abs(), "row": wanted.abs().amax(-1, True), "all": wanted.abs().max()}
    return bool(wanted.isfinite().all()) and bool(
        ((found - wanted).abs() <= limit * sizes[to]).all()
    )
