"""The page docs/configuration.md, made from the settings."""

from __future__ import annotations

from collections.abc import Iterable
from string import Template

from headstock.config.catalog import engine_settings, sampling_settings
from headstock.config.flags import GROUP_TITLES
from headstock.config.presets import PRESETS
from headstock.config.setting import Setting
from headstock.config.setting_rules import POOL_SIZES
from headstock.config.source_settings import CONFIG, PRESET
from headstock.config.value_types import Choice, Switch

PAGE = Template("""\
# Configuration

Every setting has four names:

| where | example |
| --- | --- |
| a flag | `--page-size 32` |
| a keyword of the Python API | `LLM(page_size=32)` |
| an environment variable | `HEADSTOCK_PAGE_SIZE=32` |
| a key of a TOML, JSON or YAML file | `page_size = 32` |

In Python, sampling settings belong to `SamplingParams`, and the keyword of `--engine-seed` is
`seed` or `engine_seed`.

The order is flag (or keyword), environment, file, preset, default: the first that gives a value
wins. `headstock config show` takes the flags of `headstock run`. It prints each effective value and
where it came from, with `--json` for programs.

- A name that no setting has is an error, with a suggestion; a misspelt environment variable is only
  pointed out.
- An empty environment variable counts as not set. `LOG_LEVEL` stands for `HEADSTOCK_LOG_LEVEL`
  where that is not set.
- Switches take `on`, `off`, `1`, `0`, `true`, `false`; `--no-overlap` is `--overlap off`, and
  `no_overlap = true` says so in a file.
- YAML is read by the rules of YAML 1.2, so that `off` is a word and `010` is ten. A key that comes
  twice, an alias (`*name`) and a tag are errors.
- Options of a plugin may also be tables in a file: `[opt.fa]` with `num_splits = 4` is `--opt
  fa.num_splits=4`.
- The sizes of the pool are one choice: $sizes.
  A source may give only one of them, and one of higher precedence replaces the others.
- Messages name a setting for Python and the command line alike: `page_size (--page-size)`.
- A `max_seq_len` above the model's own limit is an error, unless `max_seq_len_or_less` has it cut;
  one above what the KV pool holds is cut, with a warning.
- `max_seq_len` must be at least `page_size`. `max_batch_tokens` must be at least
  `max_running_requests` when both are set explicitly; otherwise the running requests are cut to the
  budget, and a line says so.
- The other names are those of mini-sglang, SGLang, vLLM, mistral.rs and Hetero-Paged-Infer. One
  that means something else there is noted below, and a line says so when it is used.

$tables
## Presets

`--preset NAME` sets several values below file, environment and flags.

$presets
This page is made by `headstock config reference`; a test compares the two.
""")


def render_page() -> str:
    """The page as Markdown."""
    sizes = ", ".join(f"`{engine_settings()[name].flag}`" for name in POOL_SIZES)
    settings = (CONFIG, PRESET, *engine_settings().values())
    groups = {
        title: [setting for setting in settings if setting.group == group]
        for group, title in GROUP_TITLES.items()
    }
    groups["sampling"] = list(sampling_settings().values())
    tables = "\n".join(
        f"## {title.capitalize()}\n\n{_render_table(group)}" for title, group in groups.items()
    )
    return PAGE.substitute(sizes=sizes, tables=tables, presets=_render_preset_table())


def _render_table(settings: Iterable[Setting]) -> str:
    """A Markdown table of settings, and the notes on their aliases."""
    settings = tuple(settings)
    rows = [
        ("flag", "other names", "values", "default", "meaning"),
        ("---",) * 5,
        *map(_render_row, settings),
    ]
    notes = [
        f"`{alias}`: taken as `{setting.flag}`, {note}.\n"
        for setting in settings
        for alias, note in setting.aliases.items()
        if note
    ]
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in rows), "", *notes])


def _render_row(setting: Setting) -> tuple[str, ...]:
    """The cells of one setting."""
    flag = f"`{setting.flag}`" + (f", `{setting.negative}`" if setting.negative else "")
    match setting.value_type:
        case Choice() as choice:
            values = _list_choices(choice)
        case Switch(word=word):
            values = "switch" if word is None else f"switch, or '{word}'"
        case value_type:
            values = value_type.describe().replace("|", " or ")
    aliases = ", ".join(f"`{alias}`" for alias in setting.aliases)
    return flag, aliases, values, setting.default_text, setting.help


def _list_choices(choice: Choice) -> str:
    """The names of a choice, each with its other spellings."""
    others = {
        name: [
            f"`{spelling}`"
            for spelling, choice_name in choice.spellings.items()
            if choice_name == name
        ]
        for name in choice.names
    }
    return ", ".join(
        f"`{name}`" + (f" ({', '.join(also)})" if also else "") for name, also in others.items()
    )


def _render_preset_table() -> str:
    """The Markdown table of presets."""
    lines = ["| preset | sets |", "| --- | --- |"]
    for name, values in PRESETS.items():
        value_types = {key: engine_settings()[key].value_type for key in values}
        shown = ", ".join(
            f"`{key} = {value_types[key].show(value_types[key].read(raw))}`"
            for key, raw in values.items()
        )
        lines.append(f"| `{name}` | {shown} |")
    return "\n".join(lines) + "\n"
