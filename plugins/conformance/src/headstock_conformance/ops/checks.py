"""The cases of a set of operations: whole models compared with torch's operations in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from attrs import evolve, frozen

from headstock import registry
from headstock.errors import CannotRun
from headstock.nn.decoder import forward
from headstock.ops.bound import BoundOps
from headstock.ops.torch_ops import TorchOps
from headstock.selection.refusals import check_resolve, configure_operations
from headstock.spi import (
    DeviceEnv,
    LayoutKind,
    Model,
    ModelConfig,
    Ops,
    OpsSpec,
    PartQuery,
    Sampling,
    WeightKind,
)
from headstock_conformance.attention.comparison import list_arrays
from headstock_conformance.case import Case
from headstock_conformance.device_reads import forbid_device_reads
from headstock_conformance.model.paged import Paged
from headstock_conformance.ops.models import (
    EPS,
    EXPERTS,
    Weights,
    draw_weights,
    list_configs,
    make_deep,
    make_delta_config,
    make_latent_config,
    make_plain,
    make_state_config,
    with_experts,
)
from headstock_conformance.ops.packed import check_packed
from headstock_conformance.ops.sampling import (
    MASK_VOCAB,
    SETTINGS,
    VOCAB,
    check_mask,
    check_processors,
    check_rules,
    check_sampling,
)
from headstock_conformance.ops.settings import (
    CALLS_VOCAB,
    NUM_CALLS,
    SIZES,
    check_each_setting,
    check_head,
    check_many_calls,
    list_samplings,
)
from headstock_conformance.ops.steps import (
    ROUNDING,
    StepResult,
    check_places,
    compare_steps,
    make_batch,
    run_exactly,
    run_step,
    share_off,
)

DTYPES = ("float32", "bfloat16", "float16")
TOKENS = (1, 2, 7, 33)
"""Tokens of a step."""
MANY_TOKENS = (310, 2100)
NUM_SEQUENCES = 270
MAX_SEQ_LEN = 64
LONG_PROMPT = 200
"""Tokens of a prompt whose cuts leave whole runs of 64, and some before and after them."""
NORM_GAIN = 32.0
"""Factor of the norms in a case; residuals grow to thousands."""
EPS_MISTAKES = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3)


@frozen(kw_only=True)
class Subject:
    """A set of operations, and its device."""

    spec: OpsSpec
    env: DeviceEnv
    opt: Sequence[str] = ()

    @property
    def device(self) -> str:
        """The device that it runs on."""
        return self.env.device

    @property
    def loss(self) -> float:
        """The declared tolerance for the set's weights."""
        return self.spec.capabilities.weight_loss

    def make(self, config: ModelConfig, dtype: str) -> Ops:
        """The set as the engine makes it for such a model.   raises: CannotRun, PluginBroken"""
        has_options = self.spec.options is not None
        options = (registry.make_options(self.spec, self.opt),) if has_options else ()
        query = PartQuery(
            model=config,
            dtype=dtype,
            kv_dtype=dtype,
            formats=(),
            contiguous=False,
            max_rows=NUM_SEQUENCES,
            max_batch_tokens=max(MANY_TOKENS),
            max_seq_len=max(MAX_SEQ_LEN, *MANY_TOKENS),
        )
        check_resolve(self.spec, "--ops", query, self.env)
        ops: Ops = registry.make_part(self.spec, Ops, *options)
        configure_operations(self.spec, ops, query, self.env)
        return ops


def list_cases(spec: OpsSpec, env: DeviceEnv, *, opt: Sequence[str] = ()) -> tuple[Case, ...]:
    """All cases for the claims of the spec."""
    subject = Subject(spec=spec, env=env, opt=opt)
    return tuple(Case(name, run) for name, run in list_named(subject))


def list_named(subject: Subject) -> Iterator[tuple[str, Callable[[], object]]]:
    """The cases by name."""
    claims = subject.spec.capabilities
    types = [name for name in DTYPES if name in claims.dtypes] or sorted(claims.dtypes)
    if LayoutKind.FULL in claims.layouts:
        for name, config in list_configs().items():
            yield name, partial(check_model, subject, config, types[0])
        for dtype in types[1:]:
            yield dtype, partial(check_model, subject, make_plain(), dtype)
        for name, config in (
            ("many tokens", make_plain()),
            ("many tokens of experts", with_experts(make_plain(), EXPERTS)),
            ("many layers", make_deep()),
        ):
            sizes = (9,) if name == "many layers" else MANY_TOKENS
            yield name, partial(check_model, subject, config, types[0], sizes)
        yield (
            "large weights of norms",
            partial(check_model, subject, make_plain(), types[0], norm_gain=NORM_GAIN),
        )
        if subject.device == "cpu" and "float32" in claims.dtypes:
            yield "many sequences", partial(check_sequences, subject, make_plain())
        # A set that only runs on a CPU is never captured.
        if any(each.device == "cuda" for each in claims.devices):
            yield "the device is not read", partial(check_reads, subject, types[0])
        yield "nothing else is written", partial(check_inputs, subject, types[0])
        for numbers in sorted(claims.formats, key=lambda each: each.value):
            dtype = next((each for each in types if each != "float32"), types[0])
            yield f"maps in {numbers.value}", partial(run_packed, subject, numbers, dtype)
    for kind, name, config, length in (
        (LayoutKind.LATENT, "latent KV", make_latent_config(), 20),
        (LayoutKind.STATE, "state KV", make_state_config(), 20),
        (LayoutKind.STATE, "delta rules", make_delta_config(), LONG_PROMPT),
    ):
        if kind in claims.layouts:
            yield f"{name}, in chunks", partial(check_chunks, subject, config, length)
            yield f"{name}, many sequences", partial(check_sequences, subject, config)
        if kind is LayoutKind.STATE and kind in claims.layouts:
            yield f"{name}, behind drafts", partial(check_drafts, subject, config)
    if "float32" in claims.dtypes:
        yield (
            "sampling: scores and samples in one call",
            partial(run_check, subject, make_plain().vocab, check_head),
        )
    for name, settings in SETTINGS.items():
        work = partial(check_sampling, settings=settings)
        yield f"sampling: {name}", partial(run_check, subject, VOCAB, work)
    for name, vocab, check in (
        ("mask", MASK_VOCAB, check_mask),
        ("processors", VOCAB, check_processors),
        ("bans, biases, penalties", VOCAB, check_rules),
        (f"{NUM_CALLS} calls", CALLS_VOCAB, check_many_calls),
    ):
        yield f"sampling: {name}", partial(run_check, subject, vocab, check)
    for rows, vocab, top_logprobs in SIZES:
        check_size = partial(check_each_setting, rows=rows, vocab=vocab, top_logprobs=top_logprobs)
        yield (
            f"sampling: each setting, {rows} rows of {vocab} tokens",
            partial(run_check, subject, vocab, check_size),
        )


def check_model(
    subject: Subject,
    config: ModelConfig,
    dtype_name: str,
    sizes: Sequence[int] = TOKENS,
    norm_gain: float = 1.0,
) -> None:
    """Steps of a model agree with torch's operations in float32, as far as torch's do."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    weights = draw_weights(config, dtype, subject.device).multiply_norms(norm_gain)
    for tokens in sizes:
        ours, theirs = (
            run_step(ops, config, weights, make_batch(config, tokens, dtype, subject.device))
            for ops in (subject.make(config, dtype_name), TorchOps())
        )
        truth = run_exactly(config, weights, tokens, subject.device)
        check_places(ours, truth)
        try:
            compare_steps(ours, theirs, truth, ROUNDING[dtype] + subject.loss)
        except AssertionError as error:
            cause = name_cause(ours, config, weights, tokens, dtype, subject.device)
            raise AssertionError(f"{cause}{error} (a step of {tokens} tokens)") from error


def name_cause(
    ours: StepResult,
    config: ModelConfig,
    weights: Weights,
    tokens: int,
    dtype: torch.dtype,
    device: str,
) -> str:
    """The known fault that gives the same numbers; empty if none."""
    off = {
        eps: share_off(
            ours.hidden, run_exactly(evolve(config, norm_eps=eps), weights, tokens, device).hidden
        )
        for eps in EPS_MISTAKES
    }
    nearest = min(off, key=lambda eps: off[eps])
    if off[nearest] <= 4 * ROUNDING[dtype]:
        return f"norms have an eps of {nearest:g}, and ModelConfig.norm_eps says {EPS:g}: "
    truth = run_exactly(config, weights, tokens, device)
    swapped = [
        share_off(pool[:, [1, 0]], exact) <= 4 * ROUNDING[dtype]
        for pool, exact in zip(ours.pools, truth.pools, strict=True)
    ]
    return "keys lie where values belong: " if any(swapped) else ""


def run_packed(subject: Subject, kind: WeightKind, dtype_name: str) -> None:
    """Run `check_packed` on the set as made for such a model."""
    config = make_plain()
    make = partial(subject.make, config, dtype_name)
    check_packed(make, kind, config, getattr(torch, dtype_name), subject.device, subject.loss)


def check_inputs(subject: Subject, dtype_name: str) -> None:
    """The step's tensors and the parameters are only read; pools are only written at slots."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    config = make_plain()
    ops = subject.make(config, dtype_name)
    weights = draw_weights(config, dtype, subject.device)
    params = weights.prepare(ops)
    batch = make_batch(config, 7, dtype, subject.device)

    def snapshot() -> Mapping[str, np.ndarray]:
        inputs = evolve(batch, pools=(), kv=())
        arrays = dict(list_arrays("batch", inputs))
        for name, weight in params.items():
            arrays |= dict(list_arrays(name, weight.tensor))
        return {name: array.copy() for name, array in arrays.items()}

    before = snapshot()
    with torch.inference_mode():
        bound = BoundOps(type(ops).__name__, ops, config)
        bound.bind(params, config)
        hidden = forward(params, config, batch, lambda q, layer: q, bound)
        original = hidden.clone()
        bound.lm_head_sample(hidden, Sampling())
    assert torch.equal(hidden, original), "lm_head_sample writes to the hidden states"
    for name, array in snapshot().items():
        assert np.array_equal(array, before[name]), f"{name} is written, but is read-only"


def check_reads(subject: Subject, dtype_name: str) -> None:
    """No number is read from the device: a graph would repeat the value read at its capture."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    config = make_plain()
    ops = subject.make(config, dtype_name)
    weights = draw_weights(config, dtype, subject.device)
    params = weights.prepare(ops)
    with torch.inference_mode():
        bound = BoundOps(type(ops).__name__, ops, config)
        bound.bind(params, config)
        for tokens in (1, 310):
            batch = make_batch(config, tokens, dtype, subject.device)
            hidden = forward(params, config, batch, lambda q, layer: q, bound)
            logits = bound.lm_head(hidden)
            # Each setting in one row; in many rows all of them, the last but two.
            samplings = [each for _, each in list_samplings(tokens, config.vocab, logits)]
            samplings = samplings if tokens == 1 else samplings[-3:]
            with forbid_device_reads():
                forward(params, config, batch, lambda q, layer: q, bound)
                for sampling in samplings:
                    bound.lm_head_sample(hidden, sampling)


def make_paged(subject: Subject, config: ModelConfig) -> Callable[[Ops, int, int], Paged]:
    """Makes a model over pages, of operations, so many sequences and their tokens.

    raises: CannotRun on a GPU: its driver runs on the CPU
    """
    if subject.device != "cpu" or "float32" not in subject.spec.capabilities.dtypes:
        raise CannotRun("it is checked on a CPU and in float32 alone")
    weights = draw_weights(config, torch.float32, "cpu")
    model = Model(config=lambda hf: config, params=lambda config: weights.specs, forward=forward)

    def make(ops: Ops, sequences: int, length: int) -> Paged:
        params = weights.prepare(ops)
        return Paged.new(model, config, params, ops, sequences=sequences, length=length)

    return make


def check_chunks(subject: Subject, config: ModelConfig, length: int) -> None:
    """A model over pages, its prompt in chunks and with another sequence, agrees with torch's.

    Torch's goes token by token, so that a state that depends on chunks shows.

    length: the prompts' tokens
    raises: as `make_paged`
    """
    make = make_paged(subject, config)
    ours, theirs = (
        make(ops, 2, length + 4) for ops in (subject.make(config, "float32"), TorchOps())
    )
    prompts = [[(7 * at + start) % config.vocab for at in range(length)] for start in (3, 5)]
    cut = length * 9 // 20
    steps = [
        {0: prompts[0][:cut]},
        {0: prompts[0][cut:], 1: prompts[1][:1]},
        {1: prompts[1][1:]},
        {0: [4], 1: [6]},
    ]
    single = [{row: [token]} for work in steps for row, tokens in work.items() for token in tokens]
    scores = [
        torch.cat([paged.step(work) for work in works])
        for paged, works in ((ours, steps), (theirs, single))
    ]
    worst = share_off(*scores)
    most = ROUNDING[torch.float32] + subject.loss
    assert worst <= most, f"scores are off by {worst:.1e} of the largest, {most:.1e} is allowed"


def check_sequences(subject: Subject, config: ModelConfig) -> None:
    """Steps of many rows, of any lengths, agree with torch's.

    raises: as `make_paged`
    """
    prompts = {
        row: [(11 * at + row) % config.vocab for at in range(1 + 5 * row % 7)]
        for row in range(NUM_SEQUENCES)
    }
    scores, make = [], make_paged(subject, config)
    for ops in (subject.make(config, "float32"), TorchOps()):
        paged = make(ops, NUM_SEQUENCES, 12)
        last = {row: [row % config.vocab] for row in reversed(prompts)}
        scores.append(torch.cat([paged.step(prompts), paged.step(last)]))
    worst = share_off(*scores)
    most = ROUNDING[torch.float32] + subject.loss
    assert worst <= most, (
        f"scores of {NUM_SEQUENCES} sequences are off by {worst:.1e} of the largest, {most:.1e} "
        "is allowed"
    )


def check_drafts(subject: Subject, config: ModelConfig) -> None:
    """Sequences go on from the states behind tokens of a step, of which some were rejected.

    raises: as `make_paged`
    """
    prompt, drafts, rest = [(7 * at + 3) % config.vocab for at in range(20)], [5, 9, 2], [4, 6]
    make = make_paged(subject, config)
    ours = make(subject.make(config, "float32"), 3, 28)
    theirs = make(TorchOps(), 1, 28), make(TorchOps(), 1, 28)
    ours.step({0: prompt})
    ours.step({0: drafts}, saved={0: {0: 1, 1: 2}})
    # The longer one first: both write to the same places of other pages.
    for number, alone in zip((2, 1), theirs, strict=True):
        alone.step({0: prompt + drafts[:number]})
        worst = share_off(ours.step({number: rest}), alone.step({0: rest}))
        most = ROUNDING[torch.float32] + subject.loss
        assert worst <= most, (
            f"scores behind draft {number} are off by {worst:.1e} of the largest, {most:.1e} is "
            "allowed; operations write the states behind Batch.saved_tokens to Batch.saved_pages"
        )


def run_check(subject: Subject, vocab: int, check: Callable[[Ops, str], object]) -> None:
    """Sampling by a set as the engine makes it for a model with this vocabulary size."""
    config = evolve(make_plain(), vocab=vocab)
    check(subject.make(config, "float32"), subject.device)
