"""The contract between headstock and its plugins. Importing it does not import torch."""

from headstock.spi.attention import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    AttentionQuery,
    AttentionSpec,
    AttentionStep,
    Feature,
    GraphSupport,
    LayerInfo,
    Phase,
    Planning,
)
from headstock.spi.batch import Batch, Sample, Sampling
from headstock.spi.cache import (
    CacheCapabilities,
    CachePolicy,
    CacheSpec,
    CacheStats,
    Inserted,
    Match,
)
from headstock.spi.checkpoint import CheckpointSpec
from headstock.spi.command import CommandSpec
from headstock.spi.environment import DeviceEnv, DeviceRange
from headstock.spi.int_set import IntSet
from headstock.spi.kv import FullKV, KVGroup, LatentKV, Layout, LayoutKind, StateKV, StateTensor
from headstock.spi.model import Attend, Model, ModelSpec, ParamSpec, Role
from headstock.spi.model_config import (
    Activation,
    Experts,
    Head,
    LayerConfig,
    ModelConfig,
    QkNorm,
    Rope,
)
from headstock.spi.ops import (
    LAYER_OPERATIONS,
    OPERATIONS,
    Ops,
    OpsCapabilities,
    OpsSpec,
    Params,
    Stream,
    Weight,
)
from headstock.spi.plugin import PluginSpec, Rejection, Require
from headstock.spi.row_tables import PromptInputs, RowTables
from headstock.spi.runner import (
    CaptureProgress,
    DecodeAttention,
    Program,
    Runner,
    RunnerCapabilities,
    RunnerSpec,
)
from headstock.spi.scheduler import Budget, ScheduleDecision, ScheduleFunction, SchedulerSpec, View
from headstock.spi.steps import AttendInto, DecodeStep, PromptStep
from headstock.spi.variants import Variant, find_variants
from headstock.spi.versions import RESERVED, SPI, SpiRange

__all__ = [
    "LAYER_OPERATIONS",
    "OPERATIONS",
    "RESERVED",
    "SPI",
    "Activation",
    "Attend",
    "AttendInto",
    "AttentionBackend",
    "AttentionCapabilities",
    "AttentionContext",
    "AttentionQuery",
    "AttentionSpec",
    "AttentionStep",
    "Batch",
    "Budget",
    "CacheCapabilities",
    "CachePolicy",
    "CacheSpec",
    "CacheStats",
    "CaptureProgress",
    "CheckpointSpec",
    "CommandSpec",
    "DecodeAttention",
    "DecodeStep",
    "DeviceEnv",
    "DeviceRange",
    "Experts",
    "Feature",
    "FullKV",
    "GraphSupport",
    "Head",
    "Inserted",
    "IntSet",
    "KVGroup",
    "LatentKV",
    "LayerConfig",
    "LayerInfo",
    "Layout",
    "LayoutKind",
    "Match",
    "Model",
    "ModelConfig",
    "ModelSpec",
    "Ops",
    "OpsCapabilities",
    "OpsSpec",
    "ParamSpec",
    "Params",
    "Phase",
    "Planning",
    "PluginSpec",
    "Program",
    "PromptInputs",
    "PromptStep",
    "QkNorm",
    "Rejection",
    "Require",
    "Role",
    "Rope",
    "RowTables",
    "Runner",
    "RunnerCapabilities",
    "RunnerSpec",
    "Sample",
    "Sampling",
    "ScheduleDecision",
    "ScheduleFunction",
    "SchedulerSpec",
    "SpiRange",
    "StateKV",
    "StateTensor",
    "Stream",
    "Variant",
    "View",
    "Weight",
    "find_variants",
]
