"""What an executor is built from, but its buffers."""

from __future__ import annotations

from attrs import frozen

from headstock.config import EngineConfig
from headstock.execution.token_masks import MaskSource
from headstock.selection.model_needs import AttentionNeeds
from headstock.selection.select import SelectedPlugins
from headstock.spi import Model, ModelConfig, Params
from headstock.startup.part_hooks import PartHooks


@frozen(kw_only=True, eq=False)
class BuildInputs:
    """The selected plugins and the loaded model: what an executor is built from, but its buffers.

    The profile run and the engine assemble the same inputs over different buffers.
    plain_params: the weights before `prepare`, for `--debug-ops` alone
    masks: knows which tokens rows may sample, where answers may follow a grammar
    """

    config: EngineConfig
    parts: SelectedPlugins
    needs: AttentionNeeds
    family: Model
    model: ModelConfig
    params: Params
    hooks: PartHooks
    plain_params: Params | None = None
    masks: MaskSource | None = None
