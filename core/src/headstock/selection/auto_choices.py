"""What `auto` means: lists that core owns, one for each setting.

Installing a package changes nothing until it is named, because no plugin can enter a list.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from headstock.spi import DeviceEnv, DeviceRange

ATTENTION: tuple[tuple[DeviceRange, tuple[str, ...]], ...] = (
    (DeviceRange("cpu"), ("sdpa",)),
    (DeviceRange("cuda", (10, 0), (10, 3)), ("trtllm", "fi", "fa,fi", "fa", "triton", "sdpa")),
    # One H200, the 0.6B shape, `headstock tune`: a decode step of 1, 8, 32 and 128 rows takes `fa`
    # 0.72, 0.95, 1.72 and 2.95 ms, and `fa,fi` 1.28, 1.16, 1.63 and 4.29; a prompt of 128 or 2,048
    # tokens 4.44 and 8.08, and 3.95 and 7.35. One run, this shape alone (docs/benchmarks/log.md).
    (DeviceRange("cuda", (9, 0), (9, 0)), ("fa", "fa,fi", "fi", "triton", "sdpa")),
    (DeviceRange("cuda", (8, 0), (8, 9)), ("fa,fi", "fi", "fa", "triton", "sdpa")),
    # `triton` was not measured: it comes after every library, for what none of them serves.
    (DeviceRange("cuda", (11, 0)), ("fi", "fa", "triton", "sdpa")),
    (DeviceRange("cuda"), ("sdpa",)),
)
"""Device -> what `--attn auto` tries, best first; the first range that has the device counts."""

EIGHT_BIT_KV = "float8_e4m3fn"
EIGHT_BIT_ATTENTION: tuple[tuple[DeviceRange, tuple[str, ...]], ...] = (
    # One H200, 32 query heads, 8 KV heads of 128, rows of 300 to 1,400 tokens: decode attention of
    # 8, 128 and 256 rows takes `trtllm` 11, 61 and 114 us, and `fa` 13, 110 and 200.
    (DeviceRange("cuda", (9, 0), (9, 0)), ("fa,trtllm",)),
)
"""Device -> what `--attn auto` tries before that, where keys and values have 8 bits."""

# One stream of the 0.6B shape on an H200: 97 to 126 tokens a second eager, 441 with graphs.
RUNNERS = ("cudagraph", "eager")
"""What `--runner auto` tries, best first."""

# Fastest first: a decode step of one row on a CPU takes 4.1 ms with `onednn`, 2.5 with `fbgemm`
# (docs/decisions/0009-half-weights.md). Each refuses the devices and types that it does not serve.
OPS = ("triton", "fbgemm", "onednn", "torch")
"""What `--ops auto` tries, best first."""

# It has no dependencies, compiles in milliseconds and refuses by name what it does not support.
GRAMMARS = ("llguidance",)
"""What `--grammar auto` looks for among installed plugins, best first."""

# FlashAttention-3 with pages of 128 or 256 reads past a row's end, so that NaN there gets into the
# answer; with 16, 32 and 64 it does not.
PAGE_SIZES = {"cuda": 64, "cpu": 16}
"""What `--page-size auto` tries first, by kind of device."""

TOOL_PARSERS = ("hermes", "qwen3_coder", "mistral", "llama3_json")
"""What `--tool-parser auto` tries on a call that the chat template writes; the first that reads it
counts.
"""

# On a CPU the steps run on a thread, which takes turns at one interpreter with that of the plans: 1
# to 16 rows of the demo model took 1.06 to 1.19 times as long so, 32 prompts as long.
OVERLAP = {"cuda": True, "cpu": False}
"""What `--overlap auto` means, by kind of device."""

OTHER_PAGE_SIZES = (64, 32, 16, 128, 256, 8, 4, 2, 1)
"""What `--page-size auto` tries after that, when a plugin does not serve the first size."""


@frozen(kw_only=True)
class FastestChoices:
    """What `--attn auto` and `--ops auto` try before their lists, because it was measured, and
    what `--cuda-graph-max-tokens auto` means with these.

    options: of these ops, each as `--opt` has it; the ops have them also where they are named
    runner: whose graphs were measured; empty where it makes none
    graph_tokens: the largest size of steps with prompt tokens that keeps its graph by what was
        measured; 0 for none, None where all do
    """

    attn: str
    ops: str
    options: tuple[str, ...] = ()
    runner: str = ""
    graph_tokens: int | None = None

    def list_options(self, ops: str) -> tuple[str, ...]:
        """The options that the ops of this name were measured with."""
        return self.options if ops == self.ops else ()

    def find_graph_tokens(self, attn: str, ops: str, runner: str) -> int | None:
        """The largest size that keeps its graph with these parts; None where all do."""
        parts = (self.attn, self.ops, self.runner)
        return self.graph_tokens if (attn, ops, runner) == parts else None


def list_attention_names(env: DeviceEnv, kv_dtype: str) -> tuple[str, ...]:
    """The list that `--attn auto` goes through on this device for such KV, best first."""
    lists = (EIGHT_BIT_ATTENTION, ATTENTION) if kv_dtype == EIGHT_BIT_KV else (ATTENTION,)
    firsts = [next((names for served, names in each if env in served), ()) for each in lists]
    return tuple(name for names in firsts for name in names)


def move_to_front(names: Sequence[str], first: str | None) -> tuple[str, ...]:
    """The names with `first`, or those that `+` joins there, before the others.

    One that is not in the list is not added.
    """
    front = [name for name in (first or "").split("+") if name in names]
    return tuple(dict.fromkeys((*front, *names)))
