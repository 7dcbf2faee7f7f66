"""The cases of a runner: small models beside the eager reference, step by step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.spi import (
    DeviceEnv,
    GraphSupport,
    LayoutKind,
    ModelConfig,
    Planning,
    Program,
    ReplayLimits,
    Runner,
    RunnerSpec,
)
from headstock_conformance.case import Case
from headstock_conformance.ops.models import (
    make_delta_config,
    make_latent_config,
    make_plain,
    make_state_config,
)
from headstock_conformance.runner import workloads
from headstock_conformance.runner.drive import Drive
from headstock_conformance.runner.rig import (
    VERIFY_LEN,
    EagerReference,
    Rig,
    Setup,
    Subject,
    ToyModel,
    make_drafting,
    make_windowed,
)

LIMITS = ReplayLimits(max_rows=7, max_tokens=24, full_tokens=40)
"""Replays for some of the steps: others have more rows or tokens."""


@frozen(kw_only=True)
class Mode:
    """What comes before the steps of a workload.

    limits: of `prepare`; None where it is not called
    """

    name: str
    limits: ReplayLimits | None = None
    planning: Planning = Planning.NONE


MODES = (
    Mode(name="without prepare"),
    Mode(name="after prepare", limits=LIMITS),
    Mode(name="after prepare, the rest between steps", limits=evolve(LIMITS, may_defer=True)),
    Mode(
        name="after prepare, attention planned on the host",
        limits=LIMITS,
        planning=Planning.PER_STEP,
    ),
)


PLAIN = Setup()


@frozen(kw_only=True)
class Workload:
    """Steps, and the engine that they need.

    limits: of `prepare`, instead of a mode's
    modes: those in which it is run
    """

    name: str
    run: Callable[[Drive], None]
    setup: Setup = PLAIN
    make_config: Callable[[], ModelConfig] = make_plain
    limits: ReplayLimits | None = None
    modes: tuple[Mode, ...] = MODES


VERIFYING = Setup(verify_len=VERIFY_LEN)
WORKLOADS = (
    Workload(name="decode rows, in any number and order", run=workloads.decode_in_any_order),
    Workload(name="many decode rows, a dozen steps", run=workloads.decode_many),
    Workload(name="whole prompts", run=workloads.whole_prompts),
    Workload(name="prompts in chunks, steps that sample nothing", run=workloads.chunks),
    Workload(name="decode rows beside prompts", run=workloads.beside_prompts),
    Workload(name="rows that sit out steps and change hands", run=workloads.come_and_go),
    Workload(name="temperatures, top-k, top-p, min-p", run=workloads.settings),
    Workload(name="penalties and biases", run=workloads.rules),
    Workload(name="log-probabilities, of prompts too", run=workloads.log_probabilities),
    Workload(name="drafts", run=workloads.drafts, setup=VERIFYING),
    Workload(
        name="drafts beside prompts and settings",
        run=workloads.drafts_beside_others,
        setup=VERIFYING,
    ),
    Workload(
        name="masks",
        run=workloads.masked,
        setup=evolve(VERIFYING, masks=workloads.OddRowsMasked()),
    ),
    Workload(
        name="a logits processor",
        run=workloads.processed,
        setup=Setup(processors=MappingProxyType({"ban": workloads.BanTokens()})),
    ),
    Workload(
        name="rows that share leading pages",
        run=workloads.shared_pages,
        setup=Setup(shares_prefixes=True),
        limits=evolve(LIMITS, max_rows=12),
    ),
    Workload(
        name="hundreds of rows",
        run=workloads.hundreds_of_rows,
        setup=Setup(max_rows=270, max_seq_len=16),
        limits=ReplayLimits(max_rows=260),
        modes=MODES[:2],
    ),
    Workload(
        name="two KV groups, one with a window",
        run=workloads.everything,
        make_config=make_windowed,
    ),
    Workload(name="a step that raises", run=workloads.failed_step),
    Workload(name="a row of NaN", run=workloads.unsound_row),
)
OTHER_LAYOUTS = (
    (
        LayoutKind.LATENT,
        Workload(
            name="latent KV",
            run=workloads.latent,
            setup=VERIFYING,
            make_config=make_latent_config,
        ),
    ),
    (
        LayoutKind.STATE,
        Workload(name="state KV", run=workloads.everything, make_config=make_state_config),
    ),
    (
        LayoutKind.STATE,
        Workload(name="delta rules", run=workloads.everything, make_config=make_delta_config),
    ),
)
POOLED = Workload(name="pooled prompts", run=workloads.pooled)
OWN_DRAFTS = Workload(
    name="drafts of the model's own layers",
    run=workloads.own_drafts,
    setup=evolve(VERIFYING, has_own_drafts=True),
    make_config=make_drafting,
)


def list_cases(spec: RunnerSpec, env: DeviceEnv, *, opt: Sequence[str] = ()) -> tuple[Case, ...]:
    """All cases of what the spec claims."""
    subject, claims = Subject(spec=spec, env=env, opt=opt), spec.capabilities
    listed = [*WORKLOADS, *([POOLED] if claims.pooling else [])]
    listed += [OWN_DRAFTS] if claims.drafts else []
    listed += [workload for layout, workload in OTHER_LAYOUTS if layout in claims.layouts]
    named: dict[str, Callable[[Subject], object]] = {
        "what is prepared": check_prepare,
        "prepare that is broken off": check_broken_off,
        "two runners in turn": check_two_runners,
        "memory": check_memory,
    }
    return (
        *(Case(each.name, partial(run_workload, subject, each)) for each in listed),
        *(Case(name, partial(check, subject)) for name, check in named.items()),
    )


@contextmanager
def drive_beside(
    subject: Subject, toy: ToyModel, setup: Setup, make: Callable[[Program], Runner] | None = None
) -> Iterator[Drive]:
    """The runner beside the reference; afterwards the runner is closed.

    raises: AssertionError when parameters of the model are written
    """
    device = torch.device(subject.env.device)
    with torch.inference_mode():
        drive = Drive(
            Rig.make(toy, device, setup, make or subject.make_runner),
            Rig.make(toy, device, setup, EagerReference),
        )
        try:
            yield drive
        finally:
            drive.subject.executor.close()
    for name, weight in toy.params.items():
        assert torch.equal(weight.tensor, toy.saved[name]), f"the parameter {name} is written"


def run_workload(subject: Subject, workload: Workload) -> None:
    """Run a workload in each mode that the runner claims.   raises: AssertionError, CannotRun"""
    toy = ToyModel.make(subject, workload.make_config())
    for mode in workload.modes:
        if mode.planning is Planning.PER_STEP:
            # Such a backend claims graphs of decode rows and no more.
            if subject.spec.capabilities.needs_graph > GraphSupport.DECODE:
                continue
            setup = evolve(workload.setup, graph=GraphSupport.DECODE, planning=mode.planning)
        else:
            setup = workload.setup
        with drive_beside(subject, toy, setup) as drive, naming(mode.name):
            if mode.limits is not None:
                # It inherits `prepare`: the steps would be run again as they were.
                if type(drive.subject.runner).prepare is Runner.prepare:
                    return
                limits = workload.limits or mode.limits
                drive.prepare(evolve(limits, may_defer=mode.limits.may_defer))
            workload.run(drive)


@contextmanager
def naming(text: str) -> Iterator[None]:
    """Say when a difference comes."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{text}: {error}") from error


def check_prepare(subject: Subject) -> None:
    """`prepare` keeps to its limits, replaces what was made before, and leaves rows alone."""
    toy = ToyModel.make(subject, make_plain())
    for may_defer in (False, True):
        with drive_beside(subject, toy, PLAIN) as drive:
            workloads.fill_rows(drive, 6)
            assert drive.prepare(ReplayLimits(may_defer=may_defer)).rows == ()
            drive.step(0, 1)
            # In the midst of requests: replays must not be made of live rows.
            sizes = drive.prepare(evolve(LIMITS, may_defer=may_defer))
            for count in [each for each in sizes.rows if each <= 6]:
                before = drive.num_replays
                drive.step(*range(count))
                assert drive.num_replays > before, (
                    f"prepare says that steps of {count} rows are replayed, and such a step is not"
                )
            while drive.num_left:
                drive.prepare_next()
            assert drive.subject.executor.prepare_next() == 0, "prepare_next goes on after 0"
            drive.step(5, 0, 3)
            drive.prepare(evolve(LIMITS, max_rows=2, may_defer=may_defer))
            drive.step(1, 2)
            drive.step(2, 4, 1)
            drive.prepare(ReplayLimits(may_defer=may_defer))
            assert not drive.may_replay, "prepare makes replays though max_rows is 0"
            drive.step(4, 3)


def check_broken_off(subject: Subject) -> None:
    """After `prepare` has raised, steps are right, and none is a replay."""
    toy = ToyModel.make(subject, make_plain())
    for which in (1, 2, 3):

        def interrupt(done: int, total: int, which: int = which) -> None:
            if done == which:
                raise InterruptedError("broken off")

        with drive_beside(subject, toy, PLAIN) as drive:
            workloads.fill_rows(drive, 3)
            drive.prepare(LIMITS)
            drive.step(0, 1)
            try:
                drive.subject.runner.prepare(LIMITS, interrupt)
            except InterruptedError:
                drive.may_replay = False
            drive.step(2, 0)
            drive.step(0, 1, 2)
            drive.admit(3, workloads.request(9, 14))
            drive.step(3, 1)


def check_two_runners(subject: Subject) -> None:
    """Two engines of one process run in turn, and the end of one leaves the other as it is."""
    toy = ToyModel.make(subject, make_plain())
    with drive_beside(subject, toy, PLAIN) as first:
        with drive_beside(subject, toy, PLAIN) as second:
            for drive, count in ((first, 5), (second, 3)):
                drive.prepare(LIMITS)
                workloads.fill_rows(drive, count)
            for rows in ((0, 1), (2, 1, 0), (1,), (0, 2)):
                first.step(*rows)
                second.step(*reversed(rows))
        for rows in ((4, 0), (2, 1, 0), (3,)):
            first.step(*rows)


def check_memory(subject: Subject) -> None:
    """Steps that come again and again take no more memory; `close` frees what was prepared."""
    toy = ToyModel.make(subject, make_plain())
    device = torch.device(subject.env.device)
    with drive_beside(subject, toy, PLAIN) as drive:
        drive.prepare(LIMITS)
        while drive.num_left:
            drive.prepare_next()
        used = []
        for _ in range(6):
            for row in range(5):
                drive.admit(row, workloads.request(row, 3 + row))
            drive.step(0, 1, 2, 3, 4)
            for rows in ((0,), (1, 0), (2, 4, 3), (0, 1, 2, 3, 4)):
                drive.step(*rows)
            used.append(count_bytes(device))
        assert used[-1] <= used[2], (
            f"the same steps again take {used[-1] - used[2]} bytes more each time they run"
        )
        before = count_bytes(device)
        other = subject.make_runner(drive.subject.program)
        other.prepare(LIMITS, lambda done, total: None)
        other.close()
        left = count_bytes(device) - before
        assert left <= 0, f"close leaves {left} bytes of what was prepared"
        drive.step(3, 1)


def count_bytes(device: torch.device) -> int:
    """The bytes of all live tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    # By type: some objects only claim to be of a class, and warn when they are asked.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = {}
    for tensor in tensors:
        if tensor.device.type == device.type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
