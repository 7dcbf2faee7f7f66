"""Models: a decoder described as data, its parameters declared once, and pure functions over
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from headstock.spi.attention import Feature
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    from torch import Tensor

    from headstock.spi.batch import Batch
    from headstock.spi.ops import Ops, Params


@frozen(kw_only=True)
class KVGroup:
    """Layers that share a KV shape and a page table.

    `kind` is "full" (all tokens stay), "window" (only the latest `window` tokens are read) or
    "state" (a fixed size).
    """

    layers: tuple[int, ...]
    kind: str
    kv_heads: int
    head_dim: int
    window: int | None = None

    def page_shape(self, page_size: int) -> tuple[int, int, int, int]:
        """The shape of one page of one layer: [2, page_size, kv_heads, head_dim]."""
        return (2, page_size, self.kv_heads, self.head_dim)


@frozen(kw_only=True)
class Rope:
    """Rotary positions: `theta`, the dimensions turned, and the scaling's name with its own numbers
    (as in config.json).
    """

    theta: float
    dim: int
    scaling: str = "default"
    parameters: Mapping[str, Any] = field(factory=dict, hash=False)


@frozen(kw_only=True)
class Experts:
    """A mixture of experts: how many there are, how many each token uses, their width, and whether
    weights are renormalized.
    """

    count: int
    per_token: int
    intermediate: int
    renormalize: bool


@frozen(kw_only=True)
class LayerConfig:
    """One decoder layer. `prefix` begins its parameters' names; `window` as in `LayerInfo`;
    `experts` is None for a dense layer.
    """

    index: int
    prefix: str
    group: int
    scale: float
    window: int | None = None
    softcap: float = 0.0
    experts: Experts | None = None


@frozen(kw_only=True)
class ModelConfig:
    """A decoder as data: shapes, per-layer differences and KV groups. Sizes count elements, not
    bytes.

    `ignored_fields` names the fields of config.json that may matter to its author and that the
    family does not read.
    """

    architecture: str
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    max_position: int
    rope: Rope
    layers: tuple[LayerConfig, ...]
    kv_groups: tuple[KVGroup, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    activation: str = "silu"
    dtype: str = "float32"
    eos_ids: tuple[int, ...] = ()
    features: frozenset[Feature] = frozenset()
    ignored_fields: tuple[str, ...] = ()


@frozen(kw_only=True)
class ParamSpec:
    """One parameter and the checkpoint tensors it is made of.

    shape: as the model uses it
    axes: one name a dimension ("heads", "hidden", ...), for sharding
    sources: rows of checkpoint names; the names of a row are concatenated on their first dimension,
        rows are stacked
    parts: the sizes of a row's names on that dimension; empty for equal sizes `whole`, where the
    checkpoint has it, is one tensor that is used in place of the sources. `copies` are checkpoint
    names that may hold the first source once more; `ignored` are others that may be there and are
    not read. `dtype` is a torch name, None for the model's. `compute`, in place of sources, makes
    the tensor from the configuration and the length of the longest sequence (rope tables). Dummy
    weights hold `dummy` everywhere, or noise where it is None. A parameter named `NAME.bias`
    becomes the bias in NAME's `Weight`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...] = ()
    stacked: bool = False
    dtype: str | None = None
    compute: Callable[[ModelConfig, int], Tensor] | None = None
    parts: tuple[int, ...] = ()
    whole: str | None = None
    ignored: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    dummy: float | None = None


Attend = Callable[["Tensor", int], "Tensor"]
"""`attend(q, layer_index)`: attention of this step's queries over their rows' KV. q, result:
[tokens, heads, head_dim]
"""


@frozen(kw_only=True)
class Model:
    """A family of models, as functions.

    `config(hf)` reads a parsed config.json and raises ValueError with a reason when it cannot be
    served; `params(config)` declares the parameters; `forward(params, config, batch, attend, ops)`
    gives hidden states [tokens, hidden]; `logits(params, config, hidden, ops)` gives float32 scores
    [n, vocab].
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    params: Callable[[ModelConfig], Mapping[str, ParamSpec]]
    forward: Callable[[Params, ModelConfig, Batch, Attend, Ops], Tensor]
    logits: Callable[[Params, ModelConfig, Tensor, Ops], Tensor]


@frozen(kw_only=True)
class ModelSpec(PluginSpec):
    """A model family as its entry point returns it; the entry point's name is the architecture;
    `implementation` names a `Model`.
    """
