"""Members of enums, and fields that files, devices and operations are asked by."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
import torch
from safetensors.torch import save_file
from torch import Tensor

from headstock.builtin.specs import torch_ops
from headstock.config import EngineConfig
from headstock.debug.watched_ops import WatchedOps
from headstock.errors import CannotRun, HeadstockError
from headstock.ops.fbgemm_ops import FbgemmOps
from headstock.ops.torch_ops import TorchOps
from headstock.requests.input_processor import InputProcessor
from headstock.selection.capabilities import find_rejections
from headstock.selection.negotiate import negotiate_terms
from headstock.selection.select import check_layouts, select_plugins
from headstock.spi import (
    Activation,
    DeviceEnv,
    Feature,
    LayoutKind,
    ParamSpec,
    Phase,
    QkNorm,
    Role,
    Weight,
    WeightFormat,
    WeightKind,
)
from headstock.startup.watching import watch_operations
from headstock.weights import load_weights
from headstock.weights.quantization import dequantize_

from . import models, steps, terms
from .vary import Case, outcome_of, vary


def compare(observe: Callable[[Any], object], one: object, other: object) -> Case:
    """The case of two values of one thing."""
    return lambda: (outcome_of(observe, one), outcome_of(observe, other))


def rejections(**claims: Any) -> list[str]:
    """What these claims cannot serve of a query of all phases."""
    changed = attrs.evolve(terms.CLAIMS, **claims)
    return [str(each) for each in find_rejections(changed, terms.QUERY, terms.CPU)]


def refused_feature(features: frozenset[Feature]) -> object:
    """Why a model that needs these features is refused by a backend that has none."""
    config = attrs.evolve(terms.model(), features=features)
    asked = attrs.evolve(terms.NEEDS, model=config).make_query(frozenset(Phase))
    claims = attrs.evolve(terms.CLAIMS, features=frozenset())
    return [str(each) for each in find_rejections(claims, asked, terms.CPU)]


def served_layouts(served: frozenset[LayoutKind]) -> str:
    """Why a part that serves these cannot serve a model that has all."""
    needs: Any = SimpleNamespace(layouts=frozenset(LayoutKind))
    try:
        check_layouts(needs, served, "--x y writes", "--x z")
    except CannotRun as error:
        return str(error)
    return ""


def prepare(roles: frozenset[Role], shape: tuple[int, ...]) -> object:
    """What `fbgemm` makes of a tensor that is used so."""
    tensor = torch.linspace(-1, 1, prod(shape)).half().float().view(shape)
    made = FbgemmOps().prepare(ParamSpec(shape=shape, roles=roles), Weight(tensor=tensor))
    return type(made).__name__, tuple(made.tensor.shape), made.nbytes


def prepared(roles: frozenset[Role]) -> object:
    """What is made of a matrix."""
    return prepare(roles, (64, 64))


def prepared_norm(roles: frozenset[Role]) -> object:
    """What is made of the weight of a norm."""
    return prepare(roles, (64,))


FILE = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(6.0, 12.0).view(2, 3),
    "all": torch.zeros(4, 3),
    "other": torch.ones(2, 3),
}
READ = ParamSpec(shape=(4, 3), sources=(("a", "b"),), ignored=("all", "other"), parts=(2, 2))


def load_file(spec: ParamSpec) -> object:
    """The parameter that is read of a small checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(FILE, Path(folder, "model.safetensors"))
        Path(folder, "config.json").write_text("{}")
        try:
            return load_weights(
                Path(folder),
                {"x": spec},
                models.CONFIG,
                dtype=torch.float32,
                device=torch.device("cpu"),
                max_seq_len=16,
            )
        except HeadstockError as error:
            return str(error).replace(folder, "")


def unpacked(weight: Weight) -> object:
    """What a packed matrix stands for, and its bytes."""
    assert weight.format is not None
    assert weight.scales is not None
    out = torch.empty(4, 4)
    dequantize_(weight, out)
    return out, weight.nbytes


PACKED = Weight(
    tensor=torch.ones(4, 4).to(torch.float8_e4m3fn),
    scales=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    format=WeightFormat(kind=WeightKind.FP8_E4M3, group=(2, 2)),
)


def product(weight: Weight) -> object:
    """A product with the matrix."""
    return TorchOps().linear(torch.ones(1, 3), weight, None)


def device_term(env: DeviceEnv) -> object:
    """The terms' line of the device."""
    one = SimpleNamespace(spec=terms.SDPA, phases=frozenset(Phase), capabilities=terms.CLAIMS)
    parts: Any = SimpleNamespace(attention=(one,), cache=terms.NAIVE)
    return negotiate_terms(EngineConfig(page_size=16), parts, terms.model(), "float32", env).table


def chosen_ops(name: str) -> object:
    """Whether a set serves a model in bfloat16; both run on a CPU and write full KV."""
    settings = EngineConfig(attn="sdpa", ops=name, runner="eager")
    needs = attrs.evolve(terms.NEEDS, dtype="bfloat16", kv_dtype="bfloat16")
    return select_plugins(settings, terms.CPU, needs).ops.name


def quantized_ops(name: str) -> object:
    """Whether a set serves weights in INT8; both run on a CPU."""
    settings = EngineConfig(attn="sdpa", ops=name, runner="eager", quant="int8")
    return select_plugins(settings, terms.CPU, terms.NEEDS).ops.name


def compared_ops(weight_loss: float) -> object:
    """What `--debug-ops` says of scores that are a tenth off."""
    capabilities = torch_ops().capabilities
    parts = SimpleNamespace(
        ops=attrs.evolve(
            torch_ops(), capabilities=attrs.evolve(capabilities, weight_loss=weight_loss)
        ),
        operations=TorchOps(),
    )
    config = EngineConfig(debug_ops=True)
    inputs: Any = SimpleNamespace(
        config=config, parts=parts, plain_params={}, model=models.CONFIG, needs=terms.NEEDS
    )
    watch: Any = SimpleNamespace(vocab=9)
    watched = watch_operations(inputs, watch, ())
    assert isinstance(watched, WatchedOps) and watched.reference is not None
    right = torch.ones(2, 9)
    return watched.reference.compare(right * 1.1, right, "lm_head")


def stop_ids(eos_ids: tuple[int, ...]) -> object:
    """What ends a request of an engine whose model has these."""
    tokenizer = SimpleNamespace(eos_ids=(3,))
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("headstock.requests.input_processor.open_tokenizer", return_value=tokenizer),
    ):
        engine: Any = SimpleNamespace(directory=Path(folder), eos_ids=eos_ids)
        return InputProcessor(engine, 0, None).eos_ids  # type: ignore[arg-type]


def logits_at_once(most: int) -> object:
    """How many positions of a step are scored at a time."""
    counts: list[int] = []

    class Counted(TorchOps):
        def lm_head(self, hidden: Tensor) -> Tensor:
            counts.append(len(hidden))
            return super().lm_head(hidden)

    steps.run(steps.STEP, max_logits=most, changes={"ops": Counted()})
    return counts


def run_with(head: Tensor | None) -> object:
    """A step of the model with this matrix for scores in place of its own."""
    params = models.load(models.CONFIG, models.FAMILY.params(models.CONFIG))
    changed = {} if head is None else {"lm_head": Weight(tensor=head)}
    return steps.run(steps.STEP, changes={"params": {**params, **changed}})


ALL, LINEAR, RAW = frozenset(Phase), frozenset({Role.LINEAR}), frozenset({Role.RAW})
ROLES = {
    Role.LINEAR: (LINEAR, RAW),
    Role.HEAD: (frozenset({Role.HEAD}), RAW),
    Role.ROUTER: (frozenset({Role.ROUTER}), RAW),
    Role.EMBEDDING: (LINEAR | {Role.EMBEDDING}, LINEAR | RAW),
    Role.NORM: (frozenset({Role.NORM}), RAW),
    Role.HEAD_NORM: (frozenset({Role.HEAD_NORM}), RAW),
    Role.HEAD_LINEAR: (frozenset({Role.HEAD_LINEAR}), LINEAR),
    Role.EXPERTS: (frozenset({Role.EXPERTS}), LINEAR),
    Role.ROPE: (frozenset({Role.ROPE}), LINEAR),
    Role.RAW: (LINEAR | RAW, LINEAR),
}
"""Each role among some, and what they are without it."""
NORMS = (Role.NORM, Role.HEAD_NORM)

CASES: dict[str, Case] = {
    **{
        f"Activation.{one.name}": compare(
            models.score,
            attrs.evolve(models.CONFIG, activation=one),
            attrs.evolve(models.CONFIG, activation=other),
        )
        for one, other in zip(Activation, [*Activation][::-1], strict=True)
        if one is not other
    },
    "Activation.GELU": compare(
        models.score,
        attrs.evolve(models.CONFIG, activation=Activation.GELU),
        attrs.evolve(models.CONFIG, activation=Activation.GELU_TANH),
    ),
    **{
        f"QkNorm.{one.name}": compare(
            models.score,
            attrs.evolve(models.CONFIG, qk_norm=one),
            attrs.evolve(models.CONFIG, qk_norm=other),
        )
        for one, other in zip(QkNorm, [*list(QkNorm)[1:], QkNorm.NONE], strict=True)
    },
    **{
        f"Phase.{one.name}": compare(lambda some: rejections(phases=some), ALL, ALL - {one})
        for one in Phase
    },
    **{
        f"Feature.{one.name}": compare(refused_feature, frozenset(), frozenset({one}))
        for one in Feature
    },
    **{
        f"LayoutKind.{one.name}": compare(
            served_layouts, frozenset(LayoutKind), frozenset(LayoutKind) - {one}
        )
        for one in LayoutKind
    },
    **{
        f"Role.{one.name}": compare(prepared_norm if one in NORMS else prepared, *pair)
        for one, pair in ROLES.items()
    },
    "ParamSpec.roles": compare(prepared, LINEAR, RAW),
    **vary(
        READ,
        load_file,
        {
            "sources": (("b", "a"),),
            "stacked": True,
            "ignored": ("all",),
            "parts": (1, 3),
            "whole": "all",
        },
    ),
    **vary(
        attrs.evolve(READ, ignored=("other",)),
        load_file,
        {"copies": ("all",), "left_out": ("al",)},
    ),
    **vary(
        PACKED,
        unpacked,
        {
            "tensor": -PACKED.tensor.float(),
            "scales": PACKED.scales * 2,  # type: ignore[operator]
            "zeros": torch.tensor([[0, 1], [0, 0]]),
            "order": torch.tensor([1, 0, 2, 3]),
            "format": attrs.evolve(PACKED.format, group=(2, 3)),  # type: ignore[arg-type]
        },
    ),
    **vary(Weight(tensor=torch.eye(3)), product, {"bias": torch.ones(3)}),
    "WeightFormat.group": compare(
        unpacked, PACKED, attrs.evolve(PACKED, format=attrs.evolve(PACKED.format, group=(3, 2)))
    ),
    **vary(DeviceEnv(device="cpu", name="x86-64"), device_term, {"name": "arm64"}),
    "OpsCapabilities.dtypes": compare(chosen_ops, "torch", "onednn"),
    "OpsCapabilities.formats": compare(quantized_ops, "fbgemm", "onednn"),
    "OpsCapabilities.weight_loss": compare(compared_ops, 0.0, 0.2),
    "ModelConfig.eos_ids": compare(stop_ids, (1, 2), ()),
    "Program.max_logits": compare(logits_at_once, 99, 1),
    "Program.params": compare(run_with, None, torch.ones(24, 16)),
}
