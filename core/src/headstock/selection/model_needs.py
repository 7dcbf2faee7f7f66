"""What a model needs of the parts that serve it: types, and what it asks of attention."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from headstock.config import EngineConfig
from headstock.spi import (
    AttentionQuery,
    DeviceEnv,
    Feature,
    GroupQuery,
    KVGroup,
    LayoutKind,
    ModelConfig,
    Phase,
    WeightFormat,
    WeightKind,
)


@frozen(kw_only=True)
class AttentionNeeds:
    """What a model asks of its parts, before phases are divided among attention backends."""

    model: ModelConfig
    dtype: str
    kv_dtype: str
    page_size: int | None
    contiguous: bool
    max_rows: int
    max_seq_len: int
    formats: tuple[WeightFormat, ...] = ()

    @property
    def token_groups(self) -> tuple[int, ...]:
        """The numbers of the KV groups that attention reads: those that keep no state."""
        return tuple(
            number
            for number, group in enumerate(self.model.kv_groups)
            if group.layout.kind is not LayoutKind.STATE
        )

    def split_groups(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of those groups, in parts of one shape each."""
        parts: dict[tuple[object, ...], tuple[int, ...]] = {}
        for number in self.token_groups:
            shape = describe_shape(self._make_group_query(self.model.kv_groups[number]))
            parts[shape] = (*parts.get(shape, ()), number)
        return tuple(parts.values())

    def make_query(
        self, phases: frozenset[Phase], groups: Sequence[int] | None = None
    ) -> AttentionQuery:
        """Make the query for one backend, which serves these phases.

        groups: the numbers of the KV groups that it serves; None for all that attention reads
        """
        return AttentionQuery(
            phases=phases,
            groups=tuple(
                self._make_group_query(self.model.kv_groups[number])
                for number in (self.token_groups if groups is None else groups)
            ),
            page_size=self.page_size,
            contiguous=self.contiguous,
            max_rows=self.max_rows,
            max_seq_len=self.max_seq_len,
        )

    def _make_group_query(self, group: KVGroup) -> GroupQuery:
        """Make the query for the layers of one group."""
        layers = [layer for layer in self.model.layers if layer.index in group.layers]
        features = self.model.features
        features |= (
            {Feature.SLIDING_WINDOW} if any(one.window is not None for one in layers) else set()
        )
        features |= {Feature.SOFTCAP} if any(one.softcap for one in layers) else set()
        features |= {Feature.SINKS} if any(one.sinks is not None for one in layers) else set()
        return GroupQuery(
            layout=group.layout,
            heads=self.model.sizes_of(layers[0]).heads,
            q_dtype=self.dtype,
            kv_dtype=self.kv_dtype if group.dtype is None else group.dtype,
            window=group.window,
            features=features,
        )

    @property
    def layouts(self) -> frozenset[LayoutKind]:
        """The layouts of the model's KV groups."""
        return frozenset(group.layout.kind for group in self.model.kv_groups)


def describe_shape(group: GroupQuery) -> tuple[object, ...]:
    """Describe what a kernel is compiled for."""
    return group.layout, group.heads, group.q_dtype, group.kv_dtype


def resolve_model_dtype(requested: str, model: ModelConfig, env: DeviceEnv) -> str:
    """Resolve the type of weights and activations.

    On a CPU it is float32 whatever the checkpoint; on CUDA the checkpoint's, float16 for float32.
    """
    if requested != "auto":
        return requested
    # Decode attention on a CPU is fast in float32 alone (docs/decisions/0003-cpu-decode.md);
    # weights may still be kept in 16 bits (docs/decisions/0009-half-weights.md).
    if env.device == "cpu":
        return "float32"
    # FlashAttention has no float32 kernels.
    return "float16" if model.dtype == "float32" else model.dtype


def resolve_kv_dtype(requested: str, dtype: str) -> str:
    """Resolve the type of keys and values in the pool, by torch name."""
    return {"auto": dtype, "fp8_e4m3": "float8_e4m3fn"}.get(requested, requested)


def find_quant_kind(config: EngineConfig) -> WeightKind | None:
    """Find the numbers that `--quant` asks for."""
    return {
        "off": None,
        "fp8": WeightKind.FP8_E4M3,
        "int8": WeightKind.INT8,
        "int4": WeightKind.INT4,
    }[config.quant]


def find_attention_needs(
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    max_len: int,
    formats: tuple[WeightFormat, ...] = (),
) -> AttentionNeeds:
    """Find what the model asks of its parts under this configuration.

    formats: of the checkpoint's packed matrices
    """
    kind = find_quant_kind(config)
    if kind is not None and not formats:
        formats = (WeightFormat(kind=kind),)
    exact = isinstance(config.page_size, int) and not config.page_size_or_less
    return AttentionNeeds(
        model=model,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(config.kv_dtype, dtype),
        page_size=int(config.page_size) if exact else None,
        contiguous=config.paged_attn == "off",
        max_rows=config.max_running_requests,
        max_seq_len=max_len,
        formats=formats,
    )
