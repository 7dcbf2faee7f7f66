"""The two settings that name sources of other settings: a file and a preset."""

from __future__ import annotations

from headstock.config.presets import PRESETS
from headstock.config.setting import Setting
from headstock.config.value_types import Text

CONFIG = Setting(
    name="config",
    flag="--config",
    value_type=Text(form="FILE"),
    help="a file of settings: TOML, or by its ending JSON (.json) or YAML (.yaml, .yml)",
    aliases={},
    default=None,
    default_text="none",
    group="sources",
)
PRESET = Setting(
    name="preset",
    flag="--preset",
    value_type=Text(form="NAME"),
    help=f"a named set of values, below file and flags: {', '.join(PRESETS)}",
    aliases={},
    default=None,
    default_text="none",
    group="sources",
)
