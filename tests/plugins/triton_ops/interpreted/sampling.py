"""Sampling against torch's: tokens, noise and log-probabilities."""

from __future__ import annotations

import itertools

import ops_cases
import pytest
import sampling_cases as cases
import torch
import triton
import triton.language as tl
from often import often
from sampling_cases import SETTINGS

from headstock.nn.noise import gumbel, random_words
from headstock.spi import Sampling
from headstock_triton.sampling import noise
from headstock_triton.sampling.sampler import fused_sample

# numpy, which interprets, warns of what is meant: infinity less infinity in rows that are not
# sound.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero) encountered:RuntimeWarning"
)

TYPES = (torch.bfloat16, torch.float32)


@triton.jit
def guess_kernel(words, guesses, exact, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    word = tl.load(words + at, at < count, other=0).to(tl.uint32)
    tl.store(guesses + at, noise.guess_gumbel(word), at < count)
    tl.store(exact + at, noise.gumbel_of(word), at < count)


@triton.jit
def noise_kernel(seeds, positions, words, values, vocab, BLOCK: tl.constexpr):
    row, start = tl.program_id(0), tl.program_id(1) * BLOCK
    at = start + tl.arange(0, BLOCK)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    tl.store(
        words + row * vocab + at,
        noise.philox_words(seed, position, start, BLOCK).to(tl.int64),
        at < vocab,
    )
    tl.store(
        values + row * vocab + at,
        noise.gumbel_of(noise.philox_words(seed, position, start, BLOCK)),
        at < vocab,
    )


def test_noise_is_torchs_word_for_word() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
    positions = torch.tensor([0, 1, 7, 40_959, 2**31, 2**32 - 1])
    words = torch.empty(6, 500, dtype=torch.int64)
    values = torch.empty(6, 500)

    noise_kernel[(6, 2)](seeds, positions, words, values, 500, BLOCK=256)

    assert torch.equal(words, random_words(seeds, positions, 500))
    torch.testing.assert_close(values, gumbel(seeds, positions, 500), atol=2e-7, rtol=1e-6)


def test_guesses_of_noise_are_near_it_for_all_sizes_of_words() -> None:
    sizes = torch.arange(0, 32, 1 / 64, dtype=torch.float64).exp2().long()
    words = torch.cat((torch.arange(300), sizes, 2**32 - 1 - torch.arange(300), 2**32 - sizes))
    guesses, exact = torch.empty(2, len(words))

    guess_kernel[(1,)](words, guesses, exact, len(words), BLOCK=8192)

    assert float((guesses - exact).abs().max()) < noise.SLACK.value / 4


@pytest.mark.parametrize("vocab", [37, 1500])
def test_the_best_of_sums_that_are_nearly_equal_is_drawn(vocab: int) -> None:
    seeds, positions = torch.tensor([3, 1 << 40]), torch.tensor([5, 77])
    drawn = gumbel(seeds, positions, vocab)
    order = torch.stack([torch.randperm(vocab, generator=torch.manual_seed(i)) for i in range(2)])
    # All sums within 5e-4, the best by 1e-5: more than float32 rounds, and less than a guess is off
    sums = (order - vocab).clamp(min=-50) * 1e-5
    heat = torch.tensor([1.0, 0.5])
    asked = Sampling(temperature=heat, seeds=seeds, positions=positions)

    found = fused_sample((sums - drawn) * heat[:, None], asked)

    assert torch.equal(found.tokens, order.argmax(-1))


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    often(1, [(1000, TYPES[1]), (37, TYPES[0]), (5, TYPES[0]), (5, TYPES[1]), (4099, TYPES[0])]),
)
@pytest.mark.parametrize("asked", often(2, ["all", *(name for name in SETTINGS if name != "all")]))
def test_tokens_are_torchs(asked: str, vocab: int, dtype: torch.dtype) -> None:
    for rows in (1, 9):  # those of few rows are sorted
        assert cases.sampling_case(rows, vocab, dtype, "cpu", SETTINGS[asked]) == 0


@pytest.mark.parametrize("vocab", often(2, [300, 5, 4099]))
@pytest.mark.parametrize("asked", ["greedy", "temperature"])
def test_ranks_join_their_parts_of_the_vocabulary(asked: str, vocab: int) -> None:
    assert cases.shard_case(7, vocab, torch.bfloat16, "cpu", SETTINGS[asked]) == 0


@pytest.mark.parametrize("asked", ["greedy", "temperature"])
def test_ranks_apply_their_parts_of_rules(asked: str) -> None:
    rows, vocab = 7, 300
    generator = torch.Generator().manual_seed(2)
    mask = torch.randint(-(2**31), 2**31, (rows, 10), generator=generator).int()
    banned = torch.rand(rows, vocab, generator=generator) < 0.5
    bias = torch.randn(rows, vocab, generator=generator)
    for rules in ({"mask": mask}, {"mask": mask, "banned": banned, "bias": bias}):
        assert cases.shard_case(rows, vocab, torch.bfloat16, "cpu", SETTINGS[asked], **rules) == 0


@pytest.mark.full
def test_more_rows_are_shared_out_otherwise() -> None:
    assert cases.sampling_case(17, 5000, torch.bfloat16, "cpu", SETTINGS["temperature"]) == 0


@pytest.mark.parametrize("temperature", often(1, [1e-30, 50.0, 1e-6, 1e-3]))
def test_cold_and_hot_rows(temperature: float) -> None:
    assert cases.sampling_case(7, 300, torch.bfloat16, "cpu", {"temperature": temperature}) == 0
    assert (
        cases.sampling_case(
            9, 300, torch.bfloat16, "cpu", {"temperature": temperature, "top_p": 0.7}
        )
        == 0
    )


@pytest.mark.parametrize("asked", often(1, ["all", "greedy", "temperature"]))
@pytest.mark.parametrize("alternatives", often(1, [3, 0]))
def test_log_probabilities(asked: str, alternatives: int) -> None:
    targets = torch.tensor([-1, 5, -1, 0, 2, 3, -1])
    for each in (None, targets):
        cases.sampling_case(
            7, 300, torch.bfloat16, "cpu", SETTINGS[asked], top_logprobs=alternatives, targets=each
        )


def test_penalties_bans_and_bias() -> None:
    rows, vocab = 7, 300
    history = (torch.arange(rows * 20).view(rows, 20) * 31) % vocab
    rules = {
        "repetition": torch.full((rows,), 1.3),
        "presence": torch.full((rows,), 0.5),
        "frequency": torch.full((rows,), 0.2),
        "history": history,
        "history_lens": torch.full((rows,), 18),
        "prompt_lens": torch.full((rows,), 4),
        "banned": torch.arange(vocab).expand(rows, -1) % 3 == 0,
        "bias": ops_cases.noise(rows, vocab, dtype=torch.float32, device="cpu", seed=9),
        "top_logprobs": 2,
    }
    for asked in ("greedy", "temperature", "all"):
        assert cases.sampling_case(rows, vocab, torch.float32, "cpu", SETTINGS[asked], **rules) == 0


@pytest.mark.parametrize("asked", often(1, ["all", "greedy", "temperature"]))
@pytest.mark.parametrize(
    ("rows", "vocab"), often(1, [(9, 70), (3, 37), (9, 300), (1, 4099), (9, 64)])
)
def test_masks(asked: str, rows: int, vocab: int) -> None:
    words = -(-vocab // 32)
    mask = torch.randint(-(2**31), 2**31, (rows, words), dtype=torch.int32)
    mask[0] = -1
    mask[-1, 1:] = 0
    for dtype, most in ((torch.bfloat16, -1), (torch.float32, 0), (torch.float32, 2)):
        case = cases.sampling_case(
            rows, vocab, dtype, "cpu", SETTINGS[asked], mask=mask, top_logprobs=most
        )
        assert case == 0


PROCESSED_ROWS = ((9, 300, [0, 5, 3, 3]), (9, 1500, [8]), (3, 37, [2, 0, 2]))
"""Rows, the vocabulary, and which rows are processed."""


@pytest.mark.parametrize(
    ("asked", "names", "shape"),
    often(
        1,
        [
            ("temperature", "near lift", PROCESSED_ROWS[0]),
            *itertools.product(
                ("temperature", "all", "greedy", "top_p", "min_p"),
                ("near", "lift", "near lift"),
                PROCESSED_ROWS,
            ),
        ],
    ),
)
def test_processed_rows_are_sampled_with_the_others(
    asked: str, names: str, shape: tuple[int, int, list[int]]
) -> None:
    rows, vocab, which = shape
    mask = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32)
    mask[which[0]] = 0x55555555
    mask[1] = 0x33333333
    for dtype in TYPES:
        case = (rows, vocab, dtype, "cpu", SETTINGS[asked], names, which)
        cases.processed_case(*case)
        cases.processed_case(*case, mask=mask)


def test_many_processed_rows_and_those_with_rules() -> None:
    many = [row % 9 for row in range(9)]
    for which, more in ((many, {}), ([1], {"top_logprobs": 2}), ([1], {"bias": torch.ones(9, 70)})):
        settings = SETTINGS["temperature"]
        cases.processed_case(9, 70, TYPES[0], "cpu", settings, "near", which, **more)


def test_no_rows() -> None:
    found = fused_sample(torch.empty(0, 20), Sampling(top_logprobs=0))
    assert found.tokens.shape == found.healthy.shape == found.logprobs.shape == (0,)
    assert found.tokens.dtype == torch.int64 and found.healthy.dtype == torch.bool
