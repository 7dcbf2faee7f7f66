"""What figures of `headstock tune` depend on: the device, the model and the software."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import frozen

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import HeadstockError
from headstock.selection import auto_choices
from headstock.selection.attention_choice import list_backend_names
from headstock.selection.model_needs import resolve_kv_dtype, resolve_model_dtype
from headstock.spi import AttentionSpec, DeviceEnv, OpsSpec
from headstock.startup.device import read_cpu_name
from headstock.startup.model_loading import locate_model, read_family

_DRIVER = Path("/proc/driver/nvidia/version")
_OWN_WORDS = ("_name_or_path", "transformers_version")
"""Keys of a config.json that change no figure."""


@frozen(kw_only=True)
class TuningSubject:
    """What figures depend on: a device, a model and software, each by the names of its facts."""

    device: Mapping[str, str]
    model: Mapping[str, str]
    software: Mapping[str, str]

    @property
    def file_name(self) -> str:
        """The name of the file that has the choices."""
        facts = [sorted(each.items()) for each in (self.device, self.model, self.software)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16] + ".json"


def read_subject(config: EngineConfig, env: DeviceEnv) -> TuningSubject:
    """What figures of this configuration depend on, without loading weights.

    raises: UsageError, ModelError
    """
    directory = locate_model(config.model, revision=config.revision)
    model = read_family(directory, config.model_family, config.opt, config.model_impl).config
    dtype = resolve_model_dtype(config.dtype, model, env)
    return describe_subject(env, directory, dtype, resolve_kv_dtype(config.kv_dtype, dtype))


def describe_subject(env: DeviceEnv, directory: Path, dtype: str, kv_dtype: str) -> TuningSubject:
    """Describe what figures of this model on this device depend on."""
    device = {"name": env.name, "driver": read_driver_version()}
    if env.device == "cpu":
        device = {"name": env.name, "processor": read_cpu_name()}
    return TuningSubject(
        device=device,
        model={"config": hash_config(directory), "dtype": dtype, "kv_dtype": kv_dtype},
        software={"torch": env.torch, "cuda": env.cuda or ""} | _list_versions(env),
    )


def hash_config(directory: Path) -> str:
    """A hash of what config.json says of the model; empty for a directory without one."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return ""
    kept = {name: value for name, value in config.items() if name not in _OWN_WORDS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def read_driver_version() -> str:
    """The version of NVIDIA's driver; empty without one."""
    try:
        version = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())
    except OSError:
        return ""
    return version[0] if version else ""


def _list_versions(env: DeviceEnv) -> dict[str, str]:
    """The versions of headstock's packages and of those that its lists' plugins need."""
    names = {name for name in env.distributions if name.startswith("headstock")}
    for spec in _load_listed_specs(env):
        for require in spec.requires:
            names |= {each.distribution for each in (require, *require.any_of)}
    return {name: env.distributions[name] for name in sorted(names) if name in env.distributions}


def _load_listed_specs(env: DeviceEnv) -> Iterator[AttentionSpec | OpsSpec]:
    """The specs of the plugins that `auto` may take here; those that are not installed are left
    out.
    """
    # Those of other KV are among them.
    listed = auto_choices.list_attention_names(env, auto_choices.EIGHT_BIT_KV)
    backends = list_backend_names("+".join(listed))
    for kind, name in [("attention", name) for name in sorted(backends)] + [
        ("ops", name) for name in auto_choices.OPS
    ]:
        try:
            yield registry.load_spec(kind, name)
        except HeadstockError:
            continue
