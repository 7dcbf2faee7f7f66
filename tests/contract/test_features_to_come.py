"""The table of features in docs/plugins.md: each is shown by a test, or sketched here.

A sketch uses the fields of the contract that such a plugin would use, so that types are checked and
a change that takes one away is noticed. It is no proof that the feature works.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from attrs import evolve, frozen
from feature_table import LINK, TESTS
from source_tree import ROOT
from torch import Tensor

from headstock.nn.eager_step import run_eager_step
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    Batch,
    CachePolicy,
    CaptureProgress,
    FullKV,
    KVGroup,
    KVLayer,
    ParamSpec,
    Program,
    ReplayLimits,
    ReplaySizes,
    Role,
    Runner,
    Sample,
    Step,
    Weight,
)
from headstock.spi.arrays import Ints
from headstock_radix_cache.policy import RadixCache

FEATURES = """
speculation by n-gram, speculation by draft model, LoRA, grammar, offload, MLA, hybrid models,
embeddings, disaggregation, tensor parallel, megakernel, cascade, quantization, vision
"""
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
GROUP = KVGroup(layers=(0,), layout=FullKV(kv_heads=2, k_dim=4, v_dim=4))


def rows() -> dict[str, str]:
    """The second column of the table, by feature."""
    section = PAGE.split("\n## What the contract serves\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")]
    return {name.strip(): shown.strip() for name, shown in cells[1:] if "---" not in name}


def test_each_feature_is_shown_or_sketched_and_said_to_be() -> None:
    table = rows()
    assert list(table) == [each.strip() for each in FEATURES.split(",")]
    for feature, shown in table.items():
        named = {(file, name) for name, file in LINK.findall(shown)}
        assert named, feature
        for file, name in named:
            assert f"\ndef {name}(" in (TESTS / file).read_text("utf-8"), feature
        here = {name for file, name in named if file == "contract/test_features_to_come.py"}
        assert bool(here) == shown.startswith("not shown"), f"{feature}: shown or not?"
    sketches = {name for name in globals() if name.startswith("test_a_sketch")}
    assert sketches == set(re.findall(r"\[(test_a_sketch\w+)\]", PAGE))


@frozen(kw_only=True, eq=False)
class LoraWeight(Weight):
    """A matrix with those that adapters add: [adapters, rank, in] and [adapters, out, rank]."""

    down: Tensor
    up: Tensor


class LoraOps(TorchOps):
    """The torch set, whose linear maps add what the adapter of each row says.

    adapters: [rows of the row tables] int64, the adapter of each row, 0 for none
    """

    def __init__(self, adapters: Tensor, rank: int) -> None:
        super().__init__()
        self.adapters, self.rank = adapters, rank

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        """A matrix gets room for two adapters."""
        if Role.LINEAR not in spec.roles:
            return super().prepare(spec, weight)
        rows, columns = weight.tensor.shape
        return LoraWeight(
            tensor=weight.tensor,
            bias=weight.bias,
            down=torch.zeros(3, self.rank, columns),
            up=torch.zeros(3, rows, self.rank),
        )

    def linear(self, x: Tensor, weight: Weight, batch: Batch | None) -> Tensor:
        """The map, and the low-rank one of each token's adapter."""
        out = super().linear(x, weight, batch)
        if batch is None or not isinstance(weight, LoraWeight):
            return out
        which = self.adapters[batch.row_ids][batch.token_rows]
        inner = torch.einsum("ti,tri->tr", x, weight.down[which])
        return out + torch.einsum("tr,tor->to", inner, weight.up[which])


def test_a_sketch_of_adapters() -> None:
    ops = LoraOps(torch.tensor([0, 2, 1]), rank=1)
    weight = ops.prepare(
        ParamSpec(shape=(2, 2), roles=frozenset({Role.LINEAR})), Weight(tensor=torch.eye(2))
    )
    assert isinstance(weight, LoraWeight)
    weight.down[1:], weight.up[1], weight.up[2] = 1.0, 10.0, 20.0
    batch = SimpleNamespace(row_ids=torch.tensor([1, 2, 0]), token_rows=torch.tensor([0, 1, 2]))
    mapped = ops.linear(torch.ones(3, 2), weight, cast("Batch", batch))
    assert mapped.tolist() == [[41.0, 41.0], [21.0, 21.0], [1.0, 1.0]]


def save_pages(kv: Mapping[int, KVLayer], group: int, pages: Ints) -> dict[int, list[Tensor]]:
    """Copy pages of a group to the host: what each layer keeps of them."""
    which = torch.from_numpy(pages.astype(np.int64))
    return {
        layer: [part[which].cpu() for part in (own.k, own.v, own.latent) if part is not None]
        for layer, own in kv.items()
        if own.group == group
    }


def load_pages(kv: Mapping[int, KVLayer], saved: Mapping[int, list[Tensor]], pages: Ints) -> None:
    """Copy what was saved to other pages."""
    which = torch.from_numpy(pages.astype(np.int64))
    for layer, parts in saved.items():
        own = [part for part in (kv[layer].k, kv[layer].v, kv[layer].latent) if part is not None]
        for part, values in zip(own, parts, strict=True):
            part[which] = values.to(part)


def make_layer() -> KVLayer:
    """A layer of five pages of random numbers."""
    k, v = torch.randn(2, 5, 4, 2, 4)
    return KVLayer(group=0, k=k, v=v)


def test_a_sketch_of_offload() -> None:
    kv = {0: make_layer()}
    before = [part.clone() for part in (kv[0].k, kv[0].v) if part is not None]
    load_pages(kv, save_pages(kv, 0, np.int32([2, 3])), np.int32([4, 1]))
    for part, old in zip((kv[0].k, kv[0].v), before, strict=True):
        assert part is not None and torch.equal(part[[4, 1]], old[[2, 3]])


def receive_prefix(policy: CachePolicy, index: object, keys: Ints, pages: Ints) -> Ints:
    """Have a prefix that another engine computed found here: the pages that count for it.

    keys: of whole pages    pages: [groups, n], of this engine, that hold what was received
    """
    return policy.insert(index, None, keys, pages, "").canonical


def test_a_sketch_of_disaggregation() -> None:
    sender, receiver = {0: make_layer()}, {0: make_layer()}
    policy = RadixCache(4, (GROUP,))
    index, keys = policy.new_index(), np.arange(8, dtype=np.int32)
    load_pages(receiver, save_pages(sender, 0, np.int32([1, 2])), np.int32([4, 3]))
    receive_prefix(policy, index, keys, np.int32([[4, 3]]))
    (pages,) = policy.match_prefix(index, np.arange(11, dtype=np.int32), "").pages
    theirs, ours = sender[0].k, receiver[0].k
    assert theirs is not None and ours is not None
    assert torch.equal(ours[torch.from_numpy(pages).long()], theirs[[1, 2]])


class WholeStepRunner(Runner):
    """A decode step as one launch; all else is computed operation by operation."""

    launch: Callable[[Program, Step], Sample] | None = None

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, step: Step) -> Sample:
        """One token a row by settings that lie on the device, or any step."""
        if self.launch is None or not step.is_decode or step.kind() is None:
            return run_eager_step(self.program, step)
        sample = self.launch(self.program, step)
        self.program.row_tables.keep(step.row_ids, step.stops, sample)
        return evolve(sample, is_replayed=True)

    def prepare(self, limits: ReplayLimits, report: CaptureProgress) -> ReplaySizes:
        """Make the launches over what stays at its address: parameters, tables and pages."""
        rows = tuple(2**power for power in range(limits.max_rows.bit_length() - 1, -1, -1))
        for done, _ in enumerate(rows, start=1):
            report(done, len(rows))
        return ReplaySizes(rows=rows)

    def close(self) -> None:
        """Nothing is held."""


def test_a_sketch_of_a_megakernel() -> None:
    runner = WholeStepRunner(cast("Program", SimpleNamespace()))
    progress: list[tuple[int, int]] = []
    limits = ReplayLimits(max_rows=6)
    sizes = runner.prepare(limits, lambda done, total: progress.append((done, total)))
    assert sizes == ReplaySizes(rows=(4, 2, 1)) and not runner.prepare_next()
    assert progress == [(1, 3), (2, 3), (3, 3)]


def make_keys(tokens: Ints, contents: Mapping[int, bytes]) -> Ints:
    """The keys of a prompt in which some tokens stand for parts of pictures, by position."""
    keys = tokens.copy()
    for position, content in contents.items():
        digest = hashlib.blake2b(content, digest_size=4).digest()
        keys[position] = np.frombuffer(digest, np.int32)[0]
    return keys


def test_a_sketch_of_pictures_as_keys() -> None:
    policy = RadixCache(4, (GROUP,))
    index, tokens = policy.new_index(), np.int32([1, 9, 9, 2])
    cat, dog = (make_keys(tokens, {1: name + b"0", 2: name + b"1"}) for name in (b"cat", b"dog"))
    policy.insert(index, None, cat, np.int32([[3]]), "")
    found = [policy.match_prefix(index, keys, "").pages.shape[1] for keys in (cat, dog, tokens)]
    assert found == [1, 0, 0]
