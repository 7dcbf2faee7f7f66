"""Models: a decoder described as data, its parameters declared once, and pure functions over
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from headstock.spi.model_config import ModelConfig
from headstock.spi.plugin import PluginSpec

if TYPE_CHECKING:
    from torch import Tensor

    from headstock.spi.batch import Batch
    from headstock.spi.ops import Ops, Params


@frozen(kw_only=True)
class ParamSpec:
    """One parameter and the checkpoint tensors it is made of.

    shape: as the model uses it
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
