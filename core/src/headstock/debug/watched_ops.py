"""Operations whose results are checked, and compared with the torch set if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from headstock.debug.kv_writes import KVWrites
from headstock.debug.operation_reference import OperationReference
from headstock.debug.watch import DebugWatch
from headstock.errors import PluginBroken, describe_type
from headstock.nn.vocab_shard import gather_mask
from headstock.spi import (
    ALONE,
    Batch,
    Collectives,
    LayerConfig,
    ModelConfig,
    Ops,
    Params,
    ParamSpec,
    Sample,
    Sampling,
    Stream,
    Weight,
    WeightFormat,
)

_BATCH_TENSORS = ("tokens", "positions", "token_rows", "row_ids", "starts", "query_start")


class WatchedOps(Ops):
    """Computes as `inner` does; raises PluginBroken for what no set of operations may do.

    What a graph replays has no calls and is not watched.

    reference: the torch set over plain weights, where operations are compared with it
    page_tables: by KV group, [rows, columns]
    """

    def __init__(
        self,
        inner: Ops,
        name: str,
        watch: DebugWatch,
        reference: OperationReference | None,
        page_tables: Sequence[Tensor],
    ) -> None:
        self.inner = inner
        self.name = name
        self.vocab = watch.vocab
        self.watch = watch
        self.reference = reference
        self.page_tables = page_tables
        self._writes: KVWrites | None = None
        self._batch: tuple[Tensor, ...] = ()

    def takes_format(self, spec: ParamSpec, format: WeightFormat) -> bool:
        """As the watched set says."""
        return self.inner.takes_format(spec, format)

    def takes(self, operation: str, config: ModelConfig, layer: LayerConfig | None) -> bool:
        """As `inner`."""
        return self.inner.takes(operation, config, layer)

    def prepare(self, spec: ParamSpec, weight: Weight) -> Weight:
        """As `inner`."""
        return self.inner.prepare(spec, weight)

    def bind(self, params: Params, config: ModelConfig, collectives: Collectives = ALONE) -> None:
        """As `inner`."""
        self.inner.bind(params, config, collectives)

    def embed(self, batch: Batch) -> Stream:
        """See `Ops.embed`.   raises: PluginBroken"""
        if not self.watch.is_running:
            return self.inner.embed(batch)
        self._writes = KVWrites(batch, self._who, self.watch.num_steps, self.page_tables)
        self._batch = tuple(getattr(batch, name).clone() for name in _BATCH_TENSORS)
        x = self.inner.embed(batch)
        expected = self.reference.embed(batch) if self.reference is not None else None
        return self._check_stream("embed", x, batch, None, expected, None)

    def qkv_rope_store(self, x: Stream, layer: LayerConfig, batch: Batch) -> Tensor:
        """See `Ops.qkv_rope_store`.   raises: PluginBroken"""
        if not self.watch.is_running or self._writes is None:
            return self.inner.qkv_rope_store(x, layer, batch)
        expected = None
        if self.reference is not None:
            expected = (
                self.reference.qkv_rope_store(x, layer, batch),
                self._writes.read(layer),
            )
        self._writes.mark(layer)
        q = self.inner.qkv_rope_store(x, layer, batch)
        where = f"qkv_rope_store of layer {layer.index}"
        if not isinstance(q, Tensor) or q.dim() != 3 or len(q) != len(batch.tokens):
            self._blame(f"in {where}: expected [tokens, heads, head_dim], got {_describe(q)}")
        self._writes.check(layer)
        self.watch.note_result(q, batch, f"{where} by {self.name!r}")
        if expected is not None and self.reference is not None:
            self.reference.compare(q.flatten(1), expected[0].flatten(1), f"queries of {where}")
            for part, stored, reference in self._writes.pair(layer, expected[1]):
                self.reference.compare(stored, reference, f"{part} of {where}")
        return q

    def attn_out(
        self,
        x: Stream,
        attention: Tensor,
        layer: LayerConfig,
        batch: Batch,
    ) -> Stream:
        """See `Ops.attn_out`.   raises: PluginBroken"""
        if not self.watch.is_running:
            return self.inner.attn_out(x, attention, layer, batch)
        self.watch.note_result(attention, batch, f"attention of layer {layer.index}")
        return self._run_layer("attn_out", x, layer, batch, attention)

    def short_conv(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `Ops.short_conv`.   raises: PluginBroken"""
        # It moves states on, so a reference would have to run over copies of them: not compared.
        y = self.inner.short_conv(x, layer, batch)
        if not self.watch.is_running:
            return y
        return self._check_stream("short_conv", y, batch, layer, None, None)

    def delta_rule(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `Ops.delta_rule`.   raises: PluginBroken"""
        y = self.inner.delta_rule(x, layer, batch)  # not compared either
        if not self.watch.is_running:
            return y
        return self._check_stream("delta_rule", y, batch, layer, None, None)

    def mlp(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `Ops.mlp`.   raises: PluginBroken"""
        return self._run_layer("mlp", x, layer, batch)

    def moe(self, x: Stream, layer: LayerConfig, batch: Batch) -> Stream:
        """See `Ops.moe`.   raises: PluginBroken"""
        return self._run_layer("moe", x, layer, batch)

    def _run_layer(
        self,
        operation: str,
        x: Stream,
        layer: LayerConfig,
        batch: Batch,
        *more: Tensor,
    ) -> Stream:
        """Run an operation that adds to the stream.   raises: PluginBroken"""
        run = getattr(self.inner, operation)
        if not self.watch.is_running:
            y: Stream = run(x, *more, layer, batch)
            return y
        before, expected = None, None
        if self.reference is not None:
            before = x.copy_total()
            expected = self.reference.run_layer(operation, x, layer, batch, *more)
        y = run(x, *more, layer, batch)
        return self._check_stream(operation, y, batch, layer, expected, before)

    def final_norm(self, x: Stream, batch: Batch) -> Tensor:
        """See `Ops.final_norm`.   raises: PluginBroken"""
        if not self.watch.is_running:
            return self.inner.final_norm(x, batch)
        expected = self.reference.final_norm(x, batch) if self.reference is not None else None
        hidden = self.inner.final_norm(x, batch)
        if not isinstance(hidden, Tensor) or len(hidden) != len(batch.tokens):
            self._blame(f"in final_norm: expected [tokens, hidden], got {_describe(hidden)}")
        self.watch.note_result(hidden, batch, f"final_norm by {self.name!r}")
        if expected is not None and self.reference is not None:
            self.reference.compare(hidden, expected, "final_norm")
        if self._writes is not None:
            self._writes.check_all()
        self._check_batch(batch)
        return hidden

    def lm_head(self, hidden: Tensor) -> Tensor:
        """See `Ops.lm_head`.   raises: PluginBroken"""
        scores = self.inner.lm_head(hidden)
        if self.watch.is_running and self.reference is not None:
            self.reference.compare(scores, self.reference.lm_head(hidden), "lm_head")
        return scores

    def sample(self, logits: Tensor, sampling: Sampling) -> Sample:
        """See `Ops.sample`.   raises: PluginBroken"""
        if not self.watch.is_running:
            return self.inner.sample(logits, sampling)
        copy = logits.clone()  # sampling may write the logits
        whole = gather_mask(sampling, self.config, self.all_gather)
        return self._check_sample(self.inner.sample(logits, sampling), copy, None, whole)

    def lm_head_sample(self, hidden: Tensor, sampling: Sampling) -> Sample:
        """See `Ops.lm_head_sample`.   raises: PluginBroken"""
        if not self.watch.is_running:
            return self.inner.lm_head_sample(hidden, sampling)
        logits = self.reference.lm_head(hidden) if self.reference is not None else None
        sampled = self.inner.lm_head_sample(hidden, sampling)
        whole = gather_mask(sampling, self.config, self.all_gather)
        return self._check_sample(sampled, logits, hidden, whole)

    def all_reduce(self, x: Tensor) -> Tensor:
        """As `inner`."""
        return self.inner.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """As `inner`."""
        return self.inner.all_gather(x)

    def __getattr__(self, name: str) -> Any:
        """What `inner` has beside `Ops`: its fine operations."""
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _check_stream(
        self,
        operation: str,
        x: object,
        batch: Batch,
        layer: LayerConfig | None,
        expected: Tensor | None,
        before: Tensor | None,
    ) -> Stream:
        """Check the stream that an operation returned.   raises: PluginBroken"""
        where = operation if layer is None else f"{operation} of layer {layer.index}"
        if not isinstance(x, Stream) or len(x.total) != len(batch.tokens):
            result = _describe(x.total) if isinstance(x, Stream) else describe_type(x)
            self._blame(f"in {where}: expected a Stream of {len(batch.tokens)} rows, got {result}")
        what = f"{where} by {self.name!r}"
        self.watch.note_result(x.total, batch, what)
        if x.pending is not None:
            terms = x.pending if x.pending.dim() == x.total.dim() else x.pending.transpose(0, 1)
            self.watch.note_result(terms, batch, what)
        if expected is not None and self.reference is not None:
            total = x.total if x.pending is None else x.copy_total()
            self.reference.compare(total, expected, where, before)
        return x

    def _check_sample(
        self, sampled: object, logits: Tensor | None, hidden: Tensor | None, sampling: Sampling
    ) -> Sample:
        """Check what was sampled, and keep it for a comparison with what the runner returns.

        logits, hidden: [n, vocab], [n, hidden], those that are known
        raises: PluginBroken
        """
        if not isinstance(sampled, Sample):
            self._blame(f"in sample: expected a Sample, got {describe_type(sampled)}")
        tokens = sampled.tokens
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab:
            wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            self._blame(
                f"sampled the token {wrong}, which is not in the vocabulary of {self.vocab}"
            )
        sick = []
        if logits is not None:
            sick.append(~logits.isfinite().any(-1) | logits.isnan().any(-1))
        if hidden is not None:
            sick.append(~hidden.isfinite().all(-1))
        for rows in sick:
            if bool((rows & sampled.healthy).any()):
                at = int((rows & sampled.healthy).nonzero()[0])
                self._blame(f"called logit {at} healthy, although its scores are not finite")
        if logits is not None and self.reference is not None:
            fault = self.reference.find_sampling_fault(sampled, logits, sampling)
            if fault:
                self._blame(fault)
        self.watch.sampled.append(sampled)
        return sampled

    def _check_batch(self, batch: Batch) -> None:
        """Raise PluginBroken when an operation has written to the batch."""
        for name, before in zip(_BATCH_TENSORS, self._batch, strict=False):
            if not torch.equal(getattr(batch, name), before):
                self._blame(f"wrote to the {name} of a batch, which it may only read")

    @property
    def _who(self) -> str:
        """The set, as errors name it."""
        return f"the ops plugin {self.name!r}"

    def _blame(self, fault: str) -> NoReturn:
        """Raise PluginBroken that names the set."""
        raise PluginBroken(f"{self._who} {fault}")


def _describe(value: object) -> str:
    """A tensor's shape, or the type of anything else."""
    return f"{list(value.shape)}" if isinstance(value, Tensor) else describe_type(value)
