"""Workloads: seeded prompts of token ids and output lengths, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

from attrs import evolve, field, frozen

from headstock.errors import format_count

SEED = 0
MAX_TOKEN_ID = 10_000
"""The largest id in a prompt, below the vocabulary size of published models."""


@frozen(kw_only=True)
class Workload:
    """Requests that are all submitted at once; end-of-sequence tokens do not end them.

    prompts: token ids, by request    outputs: tokens to generate, by request
    seed: of the prompts, and of the first request's sampling; request i samples with seed + i
    """

    name: str
    prompts: tuple[tuple[int, ...], ...] = field(repr=False)
    outputs: tuple[int, ...] = field(repr=False)
    temperature: float
    seed: int = SEED

    @property
    def warm_up(self) -> Workload:
        """The workload that runs once before the timed runs."""
        return self

    @property
    def tokens_in(self) -> int:
        """Prompt tokens of all requests."""
        return sum(map(len, self.prompts))

    @property
    def tokens_out(self) -> int:
        """Tokens to generate, of all requests."""
        return sum(self.outputs)

    @property
    def max_request_tokens(self) -> int:
        """The maximum tokens of a request, prompt and output together."""
        return max(
            len(prompt) + output for prompt, output in zip(self.prompts, self.outputs, strict=True)
        )

    @property
    def length_summary(self) -> str:
        """Lengths of prompts and outputs, as text."""
        spans = [
            format_span(list(map(len, self.prompts)), "in"),
            format_span(list(self.outputs), "out"),
        ]
        return (
            f"{format_count(len(self.prompts), 'request')}, {spans[0]} ({self.tokens_in}), "
            f"{spans[1]} ({self.tokens_out})"
        )

    def fit_vocab(self, vocab: int) -> Workload:
        """The workload with ids modulo the vocabulary; lengths, and so its speed, stay the same."""
        return evolve(
            self, prompts=tuple(tuple(token % vocab for token in prompt) for prompt in self.prompts)
        )


def format_span(counts: list[int], noun: str) -> str:
    """The smallest and the largest count, as text."""
    low, high = min(counts), max(counts)
    return f"{low} {noun}" if low == high else f"{low}-{high} {noun}"


def draw_tokens(rng: Random, count: int) -> tuple[int, ...]:
    """`count` random ids."""
    return tuple(rng.randint(0, MAX_TOKEN_ID) for _ in range(count))


def draw_lengths(rng: Random, count: int, low: int, high: int) -> list[int]:
    """`count` lengths, uniform from `low` to `high`."""
    return [rng.randint(low, high) for _ in range(count)]


def draw_gpu_workloads() -> dict[str, Workload]:
    """The workloads that compare engines on a GPU.

    One generator draws them in this order, so changing one changes all after it.
    """
    rng = Random(SEED)
    varied = (
        tuple(draw_tokens(rng, rng.randint(100, 1024)) for _ in range(256)),
        draw_lengths(rng, 256, 100, 1024),
    )
    single = (draw_tokens(rng, 128),), [512]
    shared = draw_tokens(rng, 2048)
    prefix = tuple(shared + draw_tokens(rng, 128) for _ in range(256)), [64] * 256
    prefill = tuple(draw_tokens(rng, 4000) for _ in range(32)), [1] * 32
    # After the original four, on which other engines were measured.
    eight = tuple(draw_tokens(rng, 256) for _ in range(8)), [256] * 8
    thirty_two = tuple(draw_tokens(rng, 512) for _ in range(32)), [256] * 32
    requests = {
        "offline256": varied,
        "single": single,
        "prefix256": prefix,
        "prefill32x4k": prefill,
        "batch8": eight,
        "batch32": thirty_two,
    }
    return {
        name: Workload(name=name, prompts=prompts, outputs=tuple(outputs), temperature=0.6)
        for name, (prompts, outputs) in requests.items()
    }


def draw_cpu32() -> Workload:
    """A batch for a small model on a CPU."""
    rng = Random(SEED)
    prompts = tuple(draw_tokens(rng, length) for length in draw_lengths(rng, 32, 16, 512))
    return Workload(
        name="cpu32",
        prompts=prompts,
        outputs=tuple(draw_lengths(rng, 32, 16, 256)),
        temperature=0.0,
    )


def draw_cpu1() -> Workload:
    """One request."""
    # Greedy, like `cpu32`: only then can tokens be compared with another engine's.
    return Workload(
        name="cpu1", prompts=(draw_tokens(Random(SEED), 128),), outputs=(200,), temperature=0.0
    )


def draw_shared_prefix() -> Workload:
    """Requests with a common prefix, for a prefix index.

    There are more than one step admits: the first ones fill the index, and later ones hit it.
    """
    rng = Random(SEED)
    shared = draw_tokens(rng, 512)
    prompts = tuple(shared + draw_tokens(rng, 16) for _ in range(64))
    return Workload(name="shared-prefix", prompts=prompts, outputs=(8,) * 64, temperature=0.0)


def make_gpu_drawer(name: str) -> Callable[[], Workload]:
    """A function that draws one workload of `draw_gpu_workloads`."""
    return lambda: draw_gpu_workloads()[name]


WORKLOADS: Mapping[str, Callable[[], Workload]] = MappingProxyType(
    {
        name: make_gpu_drawer(name)
        for name in ("offline256", "single", "prefix256", "prefill32x4k", "batch8", "batch32")
    }
    | {"cpu32": draw_cpu32, "cpu1": draw_cpu1, "shared-prefix": draw_shared_prefix}
)

DEFAULT_WORKLOADS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("cpu32", "cpu1"), "cuda": ("offline256", "single", "prefix256", "prefill32x4k")}
)
"""Device -> its default workloads."""


class Prompts:
    """Random prompts without common prefixes, except by chance."""

    def __init__(self, vocab: int, seed: int = SEED) -> None:
        self.rng, self.vocab = Random(seed), vocab

    def draw(self, length: int) -> list[int]:
        """The next prompt, with this length."""
        return [token % self.vocab for token in draw_tokens(self.rng, length)]
