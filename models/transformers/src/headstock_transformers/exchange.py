"""Put headstock's operations where modules of transformers compute the same."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn

from headstock.spi import Activation, ModelConfig, ParamSpec
from headstock_transformers.attention import COMPARED, LOCAL, PROBED
from headstock_transformers.exchanged import (
    AttentionForm,
    GatedMlp,
    OpsLinear,
    OpsNorm,
    PagedAttention,
)
from headstock_transformers.module import Decoder, replace_base
from headstock_transformers.operations import PLAIN, computing_with
from headstock_transformers.proofs import (
    NormForm,
    find_activation,
    find_norm_form,
    is_attention,
)

_TOKENS = 8
_QKV = ("q_proj", "k_proj", "v_proj")
_NORMS = ("q_norm", "k_norm")
_GATED = ("gate_proj", "up_proj", "down_proj")
Specs = Mapping[str, ParamSpec]
Look = tuple[object, ...]


def exchange_modules(
    decoder: Decoder, specs: Specs, config: ModelConfig
) -> tuple[Decoder, dict[str, ParamSpec]]:
    """The decoder with operations where it can have them, and the parameters that it has then.

    Modules are compared with operations on random numbers. What differs stays, and so does a
    decoder that cannot be run on shapes alone.

    specs: of the parameters, by the names that the modules have for them
    writes: decoder.model, some of whose modules are replaced
    """
    model = decoder.model
    before = _run_on_shapes(decoder)
    if before is None:
        return decoder, dict(specs)
    exchange = _Exchange(decoder=decoder, specs=dict(specs), config=config, calls=before.calls)
    model.set_attn_implementation(COMPARED)
    try:
        for replace in (exchange.replace_attention, exchange.replace_mlp, exchange.replace_small):
            for path, module in exchange.list_modules():
                replace(path, module)
    finally:
        model.set_attn_implementation(PROBED)
    exchanged = evolve(decoder, head=replace_base(model))
    after = _run_on_shapes(exchanged)
    if after is not None and after.shape == before.shape:
        return exchanged, exchange.specs
    for path, module in reversed(exchange.replaced):
        _set_module(model, path, module)
    return decoder, dict(specs)


@frozen(eq=False)
class _Run:
    """A pass on shapes.   calls: each module's, by its identity; shape: of the scores"""

    calls: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]]
    shape: torch.Size


def _run_on_shapes(decoder: Decoder) -> _Run | None:
    """Run base and head on the meta device; None where they cannot be."""
    model, experts = decoder.model, decoder.model.get_experts_implementation()
    calls: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(id(module), []).append((args, kwargs))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    tokens = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
    try:
        model.set_experts_implementation(PROBED)
        model.set_attn_implementation(LOCAL)
        with torch.inference_mode(), computing_with(PLAIN):
            scores = decoder.run_head(decoder.run_base(tokens, tokens))
    except Exception:
        return None
    finally:
        for hook in hooks:
            hook.remove()
        model.set_experts_implementation(experts)
        model.set_attn_implementation(PROBED)
    return _Run(calls, scores.shape)


@define(eq=False, kw_only=True)
class _Exchange:
    """What has been replaced so far.

    calls: the arguments that each module gets in a step, by its identity
    forms: of norms, by what they look like
    activations: of feed-forward parts, by the same
    compared: attention that was compared in all ways, by that and by its form
    replaced: the modules that were there, by path
    """

    decoder: Decoder
    specs: dict[str, ParamSpec]
    config: ModelConfig
    calls: Mapping[int, list[tuple[tuple[Any, ...], dict[str, Any]]]]
    forms: dict[Look, NormForm | None] = field(factory=dict)
    activations: dict[Look, Activation | None] = field(factory=dict)
    compared: set[tuple[Look, AttentionForm]] = field(factory=set)
    replaced: list[tuple[str, nn.Module]] = field(factory=list)

    def list_modules(self) -> list[tuple[str, nn.Module]]:
        """Modules by path that nothing else has to do with: one place, no hooks."""
        places = [*self.decoder.model.named_modules(remove_duplicate=False)]
        counts = Counter(id(module) for _, module in places)
        return [
            (path, module)
            for path, module in places
            if path and counts[id(module)] == 1 and id(module) in self.calls
            if not _has_hooks(module)
        ]

    def replace_attention(self, path: str, module: nn.Module) -> None:
        """Put `PagedAttention` in the place of an equal module.   writes: self, the parent"""
        linears = [name for name, each in module.named_children() if type(each) is nn.Linear]
        others = [name for name in linears if name not in _QKV]
        calls = self.calls[id(module)]
        if len(linears) != 4 or len(others) != 1 or len(calls) != 1:
            return
        (out_name,) = others
        norms = [name for name in _NORMS if isinstance(getattr(module, name, None), nn.Module)]
        if not _is_plain(module, (*linears, *norms)):
            return
        call = _bind_call(module, *calls[0])
        layer = getattr(module, "layer_idx", None)
        if call is None or not isinstance(layer, int) or not hasattr(module, "config"):
            return
        qkv = self.merge([f"{path}.{name}" for name in _QKV])
        if qkv is None:
            return
        for form in self.list_forms(module, norms, call):
            out = module.get_submodule(out_name)
            assert isinstance(out, nn.Linear)
            if form.rows[0] != out.in_features:
                return
            seen = (describe_module(module), form)
            is_brief = seen in self.compared
            if is_attention(module, form, out_name, norms, call, is_brief=is_brief):
                self.compared.add(seen)
                hidden = out.out_features
                new = PagedAttention(
                    module.config,
                    layer,
                    form,
                    OpsLinear(hidden, sum(form.rows), bias="bias" in qkv),
                    OpsLinear(out.in_features, hidden, bias=out.bias is not None),
                    out_name,
                )
                self.set_merged(path, "qkv_proj", _QKV, qkv)
                self.set_norms(path, form, norms)
                self.put(path, module, new)
                return

    def list_forms(
        self, module: nn.Module, norms: Sequence[str], call: Mapping[str, Any]
    ) -> Iterator[AttentionForm]:
        """The forms that a layer's attention may have by its looks."""
        heads, kv_heads, head_dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        kind, eps, offset = "", 0.0, 0.0
        if norms:
            found = [self.find_form(module.get_submodule(name)) for name in norms]
            if len(norms) != 2 or found[0] is None or found[0] != found[1]:
                return
            widths = [module.get_submodule(name).get_parameter("weight").numel() for name in norms]
            kind = "head" if widths == [head_dim, head_dim] else "whole"
            if kind == "whole" and widths != [heads * head_dim, kv_heads * head_dim]:
                return
            eps, offset = found[0].eps, found[0].offset
        turns = (True, False) if isinstance(call.get("position_embeddings"), tuple) else (False,)
        for has_rope in turns:
            yield AttentionForm(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                norm=kind,
                eps=eps,
                offset=offset,
                has_rope=has_rope,
            )

    def set_norms(self, path: str, form: AttentionForm, norms: Sequence[str]) -> None:
        """Declare the norms of queries and keys.   writes: self.specs"""
        names = [f"{path}.{name}.weight" for name in norms]
        if form.norm == "whole":
            for name in names:
                self.specs[name] = _add_offset(self.specs[name], form.offset)
        elif form.norm == "head":
            rows = [self.specs.pop(name).sources[0] for name in names]
            spec = ParamSpec(
                shape=(form.heads + form.kv_heads, form.head_dim),
                sources=(rows[0],) * form.heads + (rows[1],) * form.kv_heads,
                stacked=True,
            )
            self.specs[f"{path}.qk_norm.weight"] = _add_offset(spec, form.offset)

    def replace_mlp(self, path: str, module: nn.Module) -> None:
        """Put `GatedMlp` in the place of an equal module.   writes: self, the parent"""
        children = dict(module.named_children())
        linears = {name for name, each in children.items() if type(each) is nn.Linear}
        if (
            linears != {*_GATED}
            or not _is_plain(module, _GATED)
            or not self.has_one_argument(module)
        ):
            return
        gate_up = self.merge([f"{path}.{name}" for name in _GATED[:2]])
        if gate_up is None:
            return
        look = describe_module(module)
        if look not in self.activations:
            self.activations[look] = find_activation(module)
        activation = self.activations[look]
        if activation is None:
            return
        gate, down = children["gate_proj"], children["down_proj"]
        assert isinstance(gate, nn.Linear) and isinstance(down, nn.Linear)
        new = GatedMlp(
            OpsLinear(gate.in_features, gate.out_features * 2, bias="bias" in gate_up),
            OpsLinear(down.in_features, down.out_features, bias=down.bias is not None),
            activation,
        )
        self.set_merged(path, "gate_up_proj", _GATED[:2], gate_up)
        self.put(path, module, new)

    def replace_small(self, path: str, module: nn.Module) -> None:
        """Put `OpsLinear` or `OpsNorm` in the place of an equal module.

        writes: self, the parent
        """
        if not self.has_one_argument(module):
            return
        if type(module) is nn.Linear:
            bias = module.bias is not None
            self.put(path, module, OpsLinear(module.in_features, module.out_features, bias=bias))
            return
        name = f"{path}.weight"
        # A weight that stays in float32 gives some modules a result in float32.
        if name not in self.specs or self.specs[name].dtype is not None:
            return
        form = self.find_form(module)
        if form is None:
            return
        self.specs[name] = _add_offset(self.specs[name], form.offset)
        self.put(path, module, OpsNorm(tuple(module.get_parameter("weight").shape), form.eps))

    def find_form(self, module: nn.Module) -> NormForm | None:
        """`find_norm_form`, once for all that look the same.   writes: self"""
        if _has_hooks(module):
            return None
        look = describe_module(module)
        if look not in self.forms:
            self.forms[look] = find_norm_form(module)
        return self.forms[look]

    def has_one_argument(self, module: nn.Module) -> bool:
        """Whether the module gets a tensor and nothing else."""
        return all(
            len(args) == 1 and isinstance(args[0], Tensor) and not kwargs
            for args, kwargs in self.calls[id(module)]
        )

    def merge(self, paths: Sequence[str]) -> dict[str, ParamSpec] | None:
        """The parameters of the maps as those of one, by their last name; None if they cannot be.

        Only what checkpoints hold tensor by tensor is merged.
        """
        merged = {}
        for leaf in ("weight", "bias"):
            names = [f"{path}.{leaf}" for path in paths]
            specs = [self.specs[name] for name in names if name in self.specs]
            if not specs and leaf == "bias":
                continue
            tied = {*self.decoder.tied, *self.decoder.tied.values()}
            if len(specs) != len(names) or tied.intersection(names):
                return None
            for spec in specs:
                plain = ParamSpec(shape=spec.shape, sources=spec.sources, dtype=spec.dtype)
                if spec != plain or len(spec.sources) != 1 or len(spec.sources[0]) != 1:
                    return None
            rest = {(spec.shape[1:], spec.dtype) for spec in specs}
            if len(rest) != 1:
                return None
            rows = tuple(spec.shape[0] for spec in specs)
            merged[leaf] = evolve(
                specs[0],
                shape=(sum(rows), *specs[0].shape[1:]),
                sources=(tuple(spec.sources[0][0] for spec in specs),),
                parts=rows,
            )
        return merged

    def set_merged(
        self, path: str, name: str, old: Sequence[str], merged: Mapping[str, ParamSpec]
    ) -> None:
        """Declare one map in the place of several.   writes: self.specs"""
        for leaf, spec in merged.items():
            for each in old:
                del self.specs[f"{path}.{each}.{leaf}"]
            self.specs[f"{path}.{name}.{leaf}"] = spec

    def put(self, path: str, old: nn.Module, new: nn.Module) -> None:
        """Replace the module.   writes: self, the parent"""
        new.eval()
        self.replaced.append((path, old))
        _set_module(self.decoder.model, path, new)


def describe_module(module: nn.Module) -> Look:
    """What a module's results depend on, beside its parameters and the number of its layer."""
    settings = {
        name: value if isinstance(value, bool | int | float | str | None) else id(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "layer_idx"
    }
    shapes = {
        name: tuple(each.shape) for name, each in module._parameters.items() if each is not None
    }
    children = {name: describe_module(each) for name, each in module.named_children()}
    parts = (settings, shapes, children)
    return (type(module), *(tuple(sorted(part.items())) for part in parts))


def _set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module in its place.   writes: the parent"""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _has_hooks(module: nn.Module) -> bool:
    """Whether something runs with the module, or in its place."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def _is_plain(module: nn.Module, used: Collection[str]) -> bool:
    """Whether all tensors of the module are those of some children, and none has hooks."""
    names = (*dict(module.named_parameters()), *dict(module.named_buffers()))
    has_others = any(name.partition(".")[0] not in used for name in names)
    return not has_others and not any(_has_hooks(each) for each in module.children())


def _bind_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The arguments by name; None for other first ones than hidden states."""
    names = list(inspect.signature(module.forward).parameters)
    if len(args) > 1 or names[:1] != ["hidden_states"]:
        return None
    call = dict(zip(names, args, strict=False)) | dict(kwargs)
    return call if isinstance(call.get("hidden_states"), Tensor) else None


def _add_offset(spec: ParamSpec, offset: float) -> ParamSpec:
    """The parameter with a number added, which 16 bits would not hold."""
    if not offset:
        return spec
    return evolve(spec, dtype="float32", transform=lambda weight: weight.add_(offset))
