"""What `--runner` means beside the settings and the machine."""

from __future__ import annotations

import logging

from headstock import registry
from headstock.config import EngineConfig
from headstock.logs import log_event
from headstock.spi import DeviceEnv, GraphSupport, RunnerSpec

LOG = logging.getLogger(__name__)


def needs_graphs(spec: RunnerSpec) -> bool:
    """Whether the runner needs graphs."""
    return spec.capabilities.needs_graph > GraphSupport.NEVER


def resolve_runner_name(config: EngineConfig, env: DeviceEnv) -> str:
    """Resolve the name of the runner.

    It is `auto`, with a log line, when the configuration wants graphs where none can be captured:
    in contiguous mode, and on a CPU, where a preset may want them. A named runner that does not
    serve the device keeps its name, so that `select_plugins` refuses it.
    """
    spec = None if config.runner == "auto" else registry.load_spec("runner", config.runner)
    if spec is not None and not any(env in devices for devices in spec.capabilities.devices):
        return config.runner
    named_graphs = spec is not None and needs_graphs(spec)
    flag = (
        f"runner (--runner) {config.runner}"
        if named_graphs
        else f"cuda_graph_max_bs (--cuda-graph-max-bs) {config.cuda_graph_max_bs}"
    )
    if config.paged_attn == "off" and (
        named_graphs or (config.cuda_graph_max_bs and env.device != "cpu")
    ):
        LOG.warning(
            log_event(
                "no graphs in contiguous mode",
                because="paged_attn (--paged-attn) off",
                ignored=flag,
            )
        )
        return "auto"
    several = (config.cuda_graph_max_bs or 0) > 1  # a chat sets 1 by itself
    if env.device == "cpu" and not named_graphs and several:
        LOG.info(
            log_event(
                "no graphs on a CPU",
                because=f"device (--device) {config.device}",
                ignored=flag,
            )
        )
    return config.runner
