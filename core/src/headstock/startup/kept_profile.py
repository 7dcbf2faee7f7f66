"""What a profile run measured, kept on disk: later starts of the same engine need not run it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import attrs
import torch
from attrs import frozen

from headstock.config import EngineConfig
from headstock.config.engine import SETTINGS
from headstock.errors import describe_error
from headstock.logs import log_event
from headstock.spi import DeviceEnv
from headstock.startup.build_inputs import BuildInputs
from headstock.startup.memory_plan import MemoryUse
from headstock.startup.part_hooks import NO_HOOKS
from headstock.startup.tuning_subject import hash_config, read_driver_version

LOG = logging.getLogger(__name__)

_FORMAT = 1
"""The version of the files; those of another version are not read."""

_VARIABLES = ("CUBLAS", "CUDA", "CUDNN", "NVIDIA", "PYTORCH", "TORCH", "TRITON")
"""How names of environment variables begin that libraries on a GPU read."""


@frozen(kw_only=True)
class KeptProfile:
    """The file of an engine's profile run; None for an engine that keeps nothing.

    facts: what the figures depend on, each as text
    """

    path: Path | None = None
    facts: Mapping[str, str] = attrs.field(factory=dict)

    def read(self) -> tuple[MemoryUse, str] | None:
        """What was measured, and when; None where the profile run has to run.

        A profile run also compiles kernels. Where some of those that were compiled are gone, it
        runs again, so that no step waits for a compiler.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            content = json.loads(self.path.read_text())
            if content["format"] != _FORMAT or content["facts"] != dict(self.facts):
                return None
            counts: Mapping[str, int] = content["kernels"]
            if any(now < counts[folder] for folder, now in count_kernels().items()):
                return None
            return MemoryUse(**content["use"] | {"is_kept": True}), str(content["date"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning(
                log_event(
                    "a memory profile is not read", file=self.path, reason=describe_error(error)
                )
            )
            return None

    def write(self, use: MemoryUse) -> None:
        """Keep what was measured; a folder that cannot be written is logged."""
        if self.path is None or not use.capturable:
            return
        content = {
            "format": _FORMAT,
            "facts": dict(self.facts),
            "kernels": count_kernels(),
            "use": attrs.asdict(use),
            "date": date.today().isoformat(),
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, self.path)
        except OSError as error:
            LOG.warning(
                log_event(
                    "a memory profile is not kept", file=self.path, reason=describe_error(error)
                )
            )

    def forget(self) -> None:
        """Drop the saved profile: this start used more memory than it predicts."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def note_failure(self, error: BaseException) -> None:
        """Drop the saved profile if a step ran out of memory."""
        if isinstance(error, torch.OutOfMemoryError):
            self.forget()


def find_kept_profile(
    inputs: BuildInputs, env: DeviceEnv, directory: Path, max_len: int
) -> KeptProfile:
    """Find the file of this engine's profile run, which need not be there.

    Whatever may change what steps take changes the name of the file: the device and its driver,
    the installed distributions, the code of headstock and of the chosen plugins, the model's
    configuration and weights, the settings and the environment.
    """
    config = inputs.config
    # What wrapped parts take says nothing of the engines of users.
    is_wrapped = inputs.hooks is not NO_HOOKS
    if config.memory_profiles is None or env.device != "cuda" or is_wrapped:
        return KeptProfile()
    facts = {
        "device": f"{env.name}, {env.memory_bytes} bytes, driver {read_driver_version()}",
        "distributions": _hash(sorted(env.distributions.items())),
        "torch": f"{env.torch}, CUDA {env.cuda}",
        # What `auto` takes may change without a change of the settings.
        "parts": ", ".join(f"{spec.name} ({spec.implementation})" for spec in inputs.parts.specs),
        "tuned options": ", ".join(inputs.parts.tuned_options),
        "code": _hash(list(_list_code(inputs))),
        "model": f"{hash_config(directory)}, {max_len} tokens",
        "weights": _hash(
            [
                (name, str(weight.tensor.dtype), *weight.tensor.shape, weight.nbytes)
                for name, weight in sorted(inputs.params.items())
            ]
        ),
        "settings": _hash(_list_settings(config)),
        "environment": _hash(
            sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
        ),
    }
    folder = Path(os.path.expanduser(config.memory_profiles))
    return KeptProfile(path=folder / f"{_hash(sorted(facts.items()))}.json", facts=facts)


def count_kernels() -> dict[str, int]:
    """Count what lies in the folders where Triton and FlashInfer keep compiled kernels."""
    variables = os.environ
    flashinfer = variables.get("FLASHINFER_WORKSPACE_BASE") or "~"
    triton = f"{variables.get('TRITON_HOME') or '~'}/.triton/cache"
    folders = (
        Path(os.path.expanduser(variables.get("TRITON_CACHE_DIR") or triton)),
        Path(os.path.expanduser(f"{flashinfer}/.cache/flashinfer")),
    )
    return {str(folder): len(os.listdir(folder)) if folder.is_dir() else 0 for folder in folders}


def _list_settings(config: EngineConfig) -> list[tuple[str, str]]:
    """The settings that may change what steps take, as text. The model counts by what it holds."""
    return [
        (setting.name, repr(getattr(config, setting.name)))
        for setting in SETTINGS.values()
        if setting.shapes_steps
    ]


def _list_code(inputs: BuildInputs) -> Iterator[tuple[str, int, int]]:
    """The files of core and of the plugins in use, with their sizes and times.

    An installation that is edited in place changes without another version.
    """
    modules = [
        "headstock",
        inputs.family.forward.__module__,
        *(spec.implementation for spec in inputs.parts.specs),
    ]
    for package in sorted({module.partition(":")[0].partition(".")[0] for module in modules}):
        found = find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                status = path.stat()
                name = f"{package}/{path.relative_to(folder)}"
                yield name, status.st_size, status.st_mtime_ns


def _hash(value: object) -> str:
    """A short hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
