"""Every family cut for two ranks: the parts are those of the whole, and sum up to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from typing import Any

import attrs
import pytest
import torch
import wrappers
from family_cases import CASES
from fp8_checkpoints import quantize_directory
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from packed_ops import PackedOps
from source_tree import PLUGINS, read_project
from torch import Tensor

from headstock.errors import CannotRun, ModelError, PluginBroken
from headstock.nn.decoder import decoder
from headstock.nn.noise import gumbel, random_words
from headstock.nn.sampler import gumbel_scores, join_best, sample
from headstock.nn.shard import shard_config
from headstock.nn.vocab_shard import gather_mask, needs_whole_rows, sample_shard
from headstock.ops.torch_ops import TorchOps
from headstock.spi import (
    DeltaRule,
    Model,
    ModelConfig,
    Params,
    Processing,
    QkNorm,
    Sample,
    Sampling,
    Shard,
    Variant,
    find_variants,
)
from headstock.startup.model_loading import read_model, shard_model, untie_embeddings
from headstock.weights import load_weights
from headstock_conformance.model import parity
from headstock_conformance.model.paged import Paged

BIASES = {"attention_bias": True, "mlp_bias": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": parity.shape("llama", **BIASES),
    "mistral": parity.shape("mistral", sliding_window=6),
    "ministral": parity.shape("mistral")
    | {
        "model_type": "ministral",
        "architectures": ["MinistralForCausalLM"],
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 6,
    },
    "qwen2": parity.shape("qwen2", tie_word_embeddings=True, **WINDOW),
    "qwen3": parity.shape("qwen3", attention_bias=True),
    "qwen3_moe": parity.shape("qwen3_moe", attention_bias=True, mlp_only_layers=[1]),
    **{f"{number} {case}": case.hf for number, case in enumerate(CASES)},
    **{f"{case}": case.hf for case in wrappers.CASES},
}
LAST = {
    config["model_type"]: name for name, config in CONFIGS.items() if "text_config" not in config
}
"""The last configuration of each family. A model beside images has the decoder of one of them."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""The fields of config.json with how many experts a layer has."""
PROMPT = parity.tokens(24)
COUNT = 2
CUT: dict[str, Any] = {
    "architecture": "Any",
    "hidden": 8,
    "heads": 12,
    "kv_heads": 12,
    "head_dim": 2,
    "intermediate": 12,
    "norm_eps": 1e-6,
    "max_position": 8,
    "ropes": (),
    "layers": (),
    "kv_groups": (),
}
"""The fields of a configuration that two, three and four ranks divide, but the vocabulary."""


DELTA_MAPS = ("delta_in", "delta_gate", "delta_gates")


def list_rows(delta: DeltaRule | None, name: str) -> tuple[int, ...]:
    """What a map of a delta rule merges, however its checkpoint stores that."""
    assert delta is not None
    keys = delta.key_heads * delta.key_dim
    rows = {"delta_in": (keys, keys, delta.width), "delta_gate": (delta.width,)}
    return rows.get(name.rpartition(".")[2], (delta.value_heads,) * 2)


class Ranks:
    """Collectives between threads: each brings its part, and all take what they make."""

    def __init__(self, count: int) -> None:
        self.parts: list[Any] = [None] * count
        self.barrier = Barrier(count, timeout=600)

    def join(self, rank: int, part: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.parts[rank] = part
        self.barrier.wait()
        whole = join(self.parts)
        self.barrier.wait()
        return whole


def make_ops(base: type[TorchOps], ranks: Ranks, rank: int) -> TorchOps:
    """Operations whose collectives are those of the ranks."""

    class RankOps(base):  # type: ignore[misc, valid-type]
        def all_reduce(self, x: Tensor) -> Tensor:
            return ranks.join(rank, x, lambda parts: torch.stack(parts).sum(0))

        def all_gather(self, x: Tensor) -> Tensor:
            return ranks.join(rank, x, lambda parts: torch.cat(parts, -1))

    ops: TorchOps = RankOps()
    return ops


def load(
    directory: Path, family: Model, config: ModelConfig, whole: ModelConfig, ops: TorchOps
) -> Params:
    """The parameters of a model, or of a shard of it."""
    return load_weights(
        directory,
        family.params(config),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=len(PROMPT),
        prepare=ops.prepare,
        whole=family.params(whole),
    )


def scores(family: Model, config: ModelConfig, params: Params, ops: TorchOps) -> Tensor:
    """Scores of the prompt, in two steps."""
    paged = Paged.new(family, config, params, ops, sequences=1, length=len(PROMPT))
    return torch.cat([paged.step({0: PROMPT[:17]}), paged.step({0: PROMPT[17:]})])


def read_whole(directory: Path) -> tuple[Model, ModelConfig]:
    family, config = read_model(directory)
    return family, untie_embeddings(directory, family, config)


def write(tmp_path: Path, name: str) -> Path:
    parity.write(tmp_path, CONFIGS[name])
    return tmp_path


def test_every_family_is_cut_here() -> None:
    installed = {
        name
        for folder in PLUGINS
        for name in read_project(folder).get("entry-points", {}).get("headstock.model", {})
    }
    assert installed
    # Families alone: what computes any other architecture has no `shard`, and is refused.
    served = {name for name in installed if name != "transformers"}
    assert {hf["architectures"][0] for hf in CONFIGS.values()} == served


@pytest.mark.parametrize(
    "name", often(len(LAST) + 1, sorted(CONFIGS, key=lambda name: name not in LAST.values()))
)
def test_parts_joined_and_summed_are_the_whole(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path, name)
    family, config = read_whole(directory)
    parts = [shard_model(family, config, Shard(index=i, count=COUNT)) for i in range(COUNT)]
    plain = TorchOps()
    whole = load(directory, family, config, config, plain)
    pieces = [load(directory, family, part, config, plain) for part in parts]

    assert_joined(family, config, parts, whole, pieces)

    expected = scores(family, config, whole, plain)
    for base in (TorchOps, PackedOps):
        ranks = Ranks(COUNT)

        def run(rank: int, base: type[TorchOps] = base, ranks: Ranks = ranks) -> Tensor:
            ops = make_ops(base, ranks, rank)
            params = load(directory, family, parts[rank], config, ops)
            return scores(family, parts[rank], params, ops)

        with ThreadPoolExecutor(COUNT) as pool:
            found = list(pool.map(run, range(COUNT)))
        for each in found:
            torch.testing.assert_close(each, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "experts"),
    # A tensor for all experts, and one for each; numbers that two ranks do not divide.
    often(2, [("mixtral", 3), ("deepseek_v3", 8), ("qwen3_moe", 5), ("mixtral", 4)]),
)
def test_experts_cut_by_number_sum_up_to_the_whole(
    model_type: str, experts: int, tmp_path: Path
) -> None:
    hf = next(each for each in CONFIGS.values() if each["model_type"] == model_type)
    name = next(name for name in EXPERT_COUNTS if name in hf)
    parity.write(tmp_path, hf | {name: experts})
    family, config = read_whole(tmp_path)
    shards = [Shard(index=i, count=COUNT, by_expert=True) for i in range(COUNT)]
    parts = [shard_model(family, config, shard) for shard in shards]
    plain = TorchOps()
    whole = load(tmp_path, family, config, config, plain)
    pieces = [load(tmp_path, family, part, config, plain) for part in parts]

    mixed = [name for name in whole if "experts_" in name]
    assert mixed
    for each in mixed:
        joined = torch.cat([piece[each].tensor for piece in pieces])
        assert len(pieces[0][each].tensor) == -(-experts // COUNT)
        assert torch.equal(joined[:experts], whole[each].tensor)
        assert not joined[experts:].any()

    expected = scores(family, config, whole, plain)
    ranks = Ranks(COUNT)

    def run(rank: int) -> Tensor:
        ops = make_ops(TorchOps, ranks, rank)
        ops.bind(pieces[rank], parts[rank])
        return scores(family, parts[rank], pieces[rank], ops)

    with ThreadPoolExecutor(COUNT) as pool:
        for found in pool.map(run, range(COUNT)):
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_a_rank_reads_its_own_experts_alone(tmp_path: Path) -> None:
    parity.write(tmp_path, parity.shape("qwen3_moe"))
    family, config = read_whole(tmp_path)
    part = shard_model(family, config, Shard(index=1, count=COUNT, by_expert=True))
    read = {
        name
        for parameter, spec in family.params(part).items()
        if "experts_" in parameter
        for row in spec.sources
        for name in row
    }

    experts = part.layers[0].experts
    assert experts is not None
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in read}
    assert numbers == set(experts.own) == set(range(experts.count // 2, experts.count))
    # What other ranks read is no fault, and what nobody reads is one.
    wrong = attrs.evolve(config, layers=config.layers[:1])
    with pytest.raises(ModelError, match=r"unexpected model\.layers\.1"):
        load(tmp_path, family, attrs.evolve(part, layers=part.layers[:1]), wrong, TorchOps())


def assert_joined(
    family: Model,
    config: ModelConfig,
    parts: list[ModelConfig],
    whole: Params,
    pieces: list[Params],
) -> None:
    """Each part of each parameter, concatenated where it was cut, is that of the whole."""
    full_specs, specs = family.params(config), family.params(parts[0])
    cut = 0
    for name, weight in whole.items():
        full_sizes = full_specs[name].parts or (weight.tensor.shape[0],)
        axis = 1 if full_specs[name].stacked and full_specs[name].parts else 0
        sizes = specs[name].parts or (pieces[0][name].tensor.shape[0],)
        if name.endswith("experts_gate_up"):  # gates and ups, also where one tensor has both
            rows = (each[name].tensor.shape[1] // 2 for each in (whole, pieces[0]))
            axis, (full_sizes, sizes) = 1, ((each, each) for each in rows)
        if name.endswith("qk_norm"):
            index = int(name.split(".")[1])
            full_sizes, sizes = (
                (own.heads, own.kv_heads)
                for own in (each.sizes_of(each.layers[index]) for each in (config, parts[0]))
            )
        if name.endswith(DELTA_MAPS):
            index = int(name.split(".")[1])
            full_sizes, sizes = (
                list_rows(each.layers[index].delta, name) for each in (config, parts[0])
            )
        elif full_specs[name].source_shape is not None and full_specs[name].parts:
            if name.endswith("conv"):  # with a row for each tap
                axis = 1
            elif name.endswith(("qkv", "attn_gate")):  # of which half of the queries' rows are
                full_sizes, sizes = ((first // 2, *more) for first, *more in (full_sizes, sizes))
        fulls = weight.tensor.split(full_sizes, axis)
        locals_ = [each[name].tensor.split(sizes, axis) for each in pieces]
        for number, full in enumerate(fulls):
            here = [each[number] for each in locals_]
            axes = [d for d in range(full.dim()) if full.shape[d] != here[0].shape[d]]
            cut += len(axes)
            if not axes:
                assert all(torch.equal(each, full) for each in here), name
            else:
                joined = torch.cat(here, axes[0])
                if name in ("embed", "lm_head"):
                    assert not joined[len(full) :].any()
                    joined = joined[: len(full)]
                assert torch.equal(joined, full), name
        if weight.bias is not None:
            biases = [each[name].bias for each in pieces]
            if pieces[0][name].tensor.shape == weight.tensor.shape:
                assert all(torch.equal(each, weight.bias) for each in biases), name
            elif biases[0].shape == weight.bias.shape:
                assert torch.equal(torch.stack(biases).sum(0), weight.bias), name
            else:
                if axis == 0 and not specs[name].parts:
                    full_sizes, sizes = ((len(each),) for each in (weight.bias, biases[0]))
                cuts = (each.split(sizes, axis) for each in biases)
                for full, *here in zip(weight.bias.split(full_sizes, axis), *cuts, strict=True):
                    # Ranks may share a head of keys and values.
                    is_shared = here[0].shape == full.shape
                    joined = here[0] if is_shared else torch.cat(here, axis)
                    assert torch.equal(joined, full)
    # The embeddings, and at least queries, keys, values, output and two maps of each layer.
    shared = sum(config.sizes_of(layer).kv_heads < COUNT for layer in config.layers)
    assert cut >= 1 + 6 * len(config.layers) - 2 * shared


def test_a_shard_of_a_quantized_checkpoint_cuts_blocks(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    parity.write(plain, parity.shape("qwen3_moe", mlp_only_layers=[1]))
    # Neither heads nor widths are multiples of the blocks.
    quantize_directory(plain, packed, (7, 5), files=2)
    for index in range(COUNT):
        family, config = read_model(packed)
        part = shard_model(family, config, Shard(index=index, count=COUNT))
        found, expected = (load(each, family, part, config, TorchOps()) for each in (packed, plain))
        assert all(torch.equal(found[name].tensor, expected[name].tensor) for name in found)


def test_ranks_may_share_heads_of_keys_and_values(tmp_path: Path) -> None:
    parity.write(tmp_path, parity.shape("qwen3"))
    family, config = read_model(tmp_path)
    whole = load(tmp_path, family, config, config, TorchOps())["layers.0.qkv"].tensor
    keys = whole[64:96].split(16)

    for index in range(4):
        part = shard_model(family, config, Shard(index=index, count=4))
        assert part.kv_groups[0].layout.kv_heads == part.kv_heads == 1
        qkv = load(tmp_path, family, part, config, TorchOps())["layers.0.qkv"].tensor
        assert torch.equal(qkv[16:32], keys[index // 2])


# Of 64 tokens in four parts of a word each, two are padding.
@pytest.mark.parametrize(("vocab", "count"), [(95, 2), (98, 4), (9, 4), (64, 4), (32, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_shards_do_not_divide_is_padded(
    vocab: int, count: int, tied: bool, tmp_path: Path
) -> None:
    shape = parity.shape("llama", vocab_size=vocab, tie_word_embeddings=tied)
    parity.write(tmp_path, shape | {"num_key_value_heads": 4})
    family, config = read_whole(tmp_path)
    prompt = [token % vocab for token in PROMPT]
    plain = TorchOps()
    whole = load(tmp_path, family, config, config, plain)
    expected = Paged.new(family, config, whole, plain, sequences=1, length=len(prompt)).step(
        {0: prompt}
    )
    ranks = Ranks(count)

    def run(rank: int) -> Tensor:
        ops = make_ops(TorchOps, ranks, rank)
        part = shard_model(family, config, Shard(index=rank, count=count))
        params = load(tmp_path, family, part, config, ops)
        return Paged.new(family, part, params, ops, sequences=1, length=len(prompt)).step(
            {0: prompt}
        )

    with ThreadPoolExecutor(count) as pool:
        for found in pool.map(run, range(count)):
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "changes", "count", "message"),
    [
        ("llama", {}, 3, "num_attention_heads: expected .* 3 shards, got 4"),
        ("qwen3", {"intermediate_size": 49}, 2, "intermediate_size: expected .* 2 shards, got 49"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 21},
            2,
            "the width of an expert: expected .* 2 shards, got 21",
        ),
        (
            "llama",
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48},
            4,
            "num_key_value_heads: expected .* 4 shards, got 6",
        ),
    ],
)
def test_a_shard_that_does_not_divide_is_refused(
    model_type: str, changes: dict[str, Any], count: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(parity.json.dumps(parity.shape(model_type, **changes)))
    family, config = read_model(tmp_path)

    with pytest.raises(CannotRun, match=f"cannot be cut into {count} shards: {message}") as error:
        shard_model(family, config, Shard(index=1, count=count))

    assert error.value.exit_code == 5
    with pytest.raises(CannotRun, match="cannot be cut into shards"):
        shard_model(attrs.evolve(family, shard=None), config, Shard(index=1, count=count))


def test_a_shard_without_an_expert_is_refused(tmp_path: Path) -> None:
    shape = parity.shape("qwen3_moe", num_experts=5, num_key_value_heads=4)
    (tmp_path / "config.json").write_text(parity.json.dumps(shape))
    family, config = read_model(tmp_path)

    with pytest.raises(CannotRun, match="expected some for each of 4 shards, got 5"):
        shard_model(family, config, Shard(index=0, count=4, by_expert=True))


def test_a_family_that_cuts_unequally_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path, "llama")
    family, config = read_model(directory)
    part = attrs.evolve(shard_config(config, Shard(count=2)), intermediate=36)

    with pytest.raises(PluginBroken, match="has 36 of 48, but 2 shards cannot have equal slices"):
        load(directory, family, part, config, TorchOps())


def test_shards_count_from_zero() -> None:
    with pytest.raises(ValueError, match="shard 2 of 2: the first is 0"):
        Shard(index=2, count=2)


def test_a_set_is_asked_for_the_embeddings_of_a_shard(tmp_path: Path) -> None:
    directory = write(tmp_path, "llama")
    _, config = read_model(directory)

    assert Variant.VOCAB_SHARD not in find_variants("embed", config, None)
    part = shard_config(config, Shard(count=2))
    assert Variant.VOCAB_SHARD in find_variants("embed", part, None)
    assert decoder(lambda hf: config).shard is shard_config
    assert part.qk_norm is QkNorm.NONE


@pytest.mark.parametrize("cuts", [(0, 5, 11, 40), (0, 4, 8, 40), (0, 39, 40)])
def test_noise_and_best_tokens_of_parts_are_those_of_the_whole(cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    seeds, positions = torch.tensor([5, 1 << 40, 7]), torch.tensor([0, 9, 123])
    logits = torch.randn(3, 40, generator=generator)
    logits[2, 3] = logits[2, 20] = 9.0  # equal scores, of which the first wins at temperature 0
    temperature = torch.tensor([0.8, 1.3, 0.0])
    sampling = Sampling(temperature=temperature, seeds=seeds, positions=positions)
    spans = [(first, stop - first) for first, stop in pairwise(cuts)]

    for make in (random_words, gumbel):
        parts = [make(seeds, positions, size, first) for first, size in spans]
        assert torch.equal(torch.cat(parts, 1), make(seeds, positions, 40))

    whole = gumbel_scores(logits, temperature, sampling)
    highest = logits.amax(-1, keepdim=True)
    found = [
        gumbel_scores(
            logits[:, first : first + size], temperature, sampling, offset=first, highest=highest
        )
        for first, size in spans
    ]
    assert torch.equal(torch.cat(found, 1), whole)
    pairs = [(part.max(-1), first) for part, (first, _) in zip(found, spans, strict=True)]
    best, tokens = join_best(
        torch.stack([each.values for each, _ in pairs]),
        torch.stack([each.indices + first for each, first in pairs]),
    )
    assert torch.equal(tokens, whole.max(-1).indices)
    assert torch.equal(best, whole.max(-1).values)


def settings_of(rows: int, vocab: int, names: Sequence[str], seed: int) -> Sampling:
    """Settings with these fields."""
    generator = torch.Generator().manual_seed(seed)
    heats = torch.tensor([0.0, 0.3, 1.0, 1.7])[torch.randint(4, (rows,), generator=generator)]
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator)
    made: dict[str, Any] = {
        "temperature": heats,
        "mask": words.int(),
        "banned": torch.rand(rows, vocab, generator=generator) < 0.3,
        "bias": torch.randn(rows, vocab, generator=generator),
    }
    numbers = torch.randint(1 << 40, (2, rows), generator=generator)
    return Sampling(
        **{name: made[name] for name in names}, seeds=numbers[0], positions=numbers[1] % 9999
    )


def cut_mask(mask: Tensor | None, part: ModelConfig) -> Tensor | None:
    """The words of a rank's part of the vocabulary."""
    if mask is None:
        return None
    words = part.vocab // 32
    padded = torch.nn.functional.pad(mask, (0, words * part.shard.count - mask.shape[1]))
    return padded.split(words, 1)[part.shard.index]


@settings(max_examples=25)
@given(
    vocab=st.sampled_from([5, 32, 64, 65, 97, 200]),
    count=st.sampled_from([2, 3, 4]),
    names=st.sets(st.sampled_from(["temperature", "mask", "banned", "bias"])),
    levels=st.sampled_from([2, 1000]),
    seed=st.integers(0, 999),
)
def test_ranks_sample_the_token_of_whole_rows(
    vocab: int, count: int, names: set[str], levels: int, seed: int
) -> None:
    rows = 9
    generator = torch.Generator().manual_seed(seed)
    # Of few levels, so that many scores are equal.
    logits = torch.randint(levels, (rows, vocab), generator=generator) / 7
    logits[1, vocab - 1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    logits[4, : vocab // 2] = -torch.inf
    sampling = settings_of(rows, vocab, sorted(names), seed)
    plain = ModelConfig(**CUT | {"vocab": vocab})
    expected = sample(logits.clone(), sampling)
    ranks = Ranks(count)

    def run(rank: int) -> Sample:
        part = shard_config(plain, Shard(index=rank, count=count))
        padded = torch.nn.functional.pad(logits, (0, part.vocab * count - vocab), value=9.0)
        own = padded.split(part.vocab, 1)[rank].clone()

        def gather(x: Tensor) -> Tensor:
            return ranks.join(rank, x, lambda parts: torch.cat(parts, -1))

        settings = attrs.evolve(sampling, mask=cut_mask(sampling.mask, part))
        joined = gather_mask(settings, part, gather).mask
        assert (joined is None) == (sampling.mask is None)
        assert joined is None or torch.equal(joined, sampling.mask)
        return sample_shard(own, settings, part, gather)

    with ThreadPoolExecutor(count) as pool:
        for found in pool.map(run, range(count)):
            assert torch.equal(found.healthy, expected.healthy)
            sound = expected.healthy
            assert torch.equal(found.tokens[sound], expected.tokens[sound])
            assert bool(((found.tokens >= 0) & (found.tokens < vocab)).all())


def test_what_looks_at_whole_rows_gets_them() -> None:
    numbers = torch.ones(1)
    assert not needs_whole_rows(Sampling(temperature=numbers, seeds=numbers, bias=numbers))
    for name in ("top_k", "top_p", "min_p", "repetition", "presence", "frequency", "targets"):
        assert needs_whole_rows(Sampling(**{name: numbers}))
    assert needs_whole_rows(Sampling(top_logprobs=0))
    assert needs_whole_rows(Sampling(processing=Processing(rows=None, parts=())))
