"""What a profile run measured serves later starts of the same engine, and of no other."""

from __future__ import annotations

import json
import logging
import os
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patience
import pytest
import torch
from attrs import evolve

from headstock.config import EngineConfig
from headstock.execution.buffers import BufferShape
from headstock.spi import DeviceEnv, Ranks
from headstock.startup import kept_profile, pool_memory
from headstock.startup.kept_profile import KeptProfile, find_kept_profile
from headstock.startup.memory_plan import MemoryUse
from headstock.startup.part_hooks import NO_HOOKS, PartHooks
from headstock.startup.ranks import OneRank

USE = MemoryUse(activations=5 << 20, workspaces=6 << 20, graphs=7 << 20)
ENV = DeviceEnv(
    device="cuda", name="GPU", memory_bytes=1 << 37, torch="2.11", cuda="13.0",
    distributions={"headstock": "0.1.0", "triton": "3.5"},
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of compiled kernels, which has two of them."""
    for kernel in ("a", "b"):
        (tmp_path / "kernels" / kernel).mkdir(parents=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    return tmp_path / "kernels"


def forward() -> None:
    """The family's function, whose module counts."""


class Subject:
    """An engine that is about to start, in `folder`."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        (folder / "config.json").write_text('{"hidden_size": 8}')
        self.env, self.max_len = ENV, 512
        self.settings = {"memory_profiles": str(folder / "kept"), "device": "cuda"} | settings
        self.weight = torch.zeros(4, 8)
        self.spec = SimpleNamespace(name="fa", implementation="headstock_sdpa.backend:Backend")
        self.tuned_options: tuple[str, ...] = ()
        self.hooks = NO_HOOKS

    def find(self) -> KeptProfile:
        """Its profile."""
        weight = SimpleNamespace(tensor=self.weight, nbytes=self.weight.nbytes)
        inputs: Any = SimpleNamespace(
            config=EngineConfig(**self.settings),  # type: ignore[arg-type]
            family=SimpleNamespace(forward=forward),
            parts=SimpleNamespace(specs=[self.spec], tuned_options=self.tuned_options),
            params={"norm": weight},
            hooks=self.hooks,
        )
        return find_kept_profile(inputs, self.env, self.folder, self.max_len)


def change(**settings: Any) -> Callable[[Subject], None]:
    """A change of settings."""
    return lambda subject: subject.settings.update(settings)


def change_env(**fields: Any) -> Callable[[Subject], None]:
    """A change of the machine."""
    return lambda subject: setattr(subject, "env", evolve(subject.env, **fields))


CHANGES = {
    "device": change_env(name="another GPU"),
    "device memory": change_env(memory_bytes=1 << 36),
    "distribution": change_env(distributions={"headstock": "0.1.0", "triton": "3.6"}),
    "torch": change_env(torch="2.12"),
    "part": lambda subject: setattr(subject.spec, "name", "fi"),
    "implementation": lambda subject: setattr(subject.spec, "implementation", "headstock_demo:x"),
    "model": lambda subject: (subject.folder / "config.json").write_text('{"hidden_size": 16}'),
    "length": lambda subject: setattr(subject, "max_len", 513),
    "weights": lambda subject: setattr(subject, "weight", torch.zeros(4, 9)),
    "weights' type": lambda subject: setattr(subject, "weight", torch.zeros(4, 16).half()),
    "rows": change(max_running_requests=3),
    "tokens": change(max_batch_tokens=1024),
    "graphs": change(cuda_graph_max_bs=4),
    "order of captures": change(defer_graphs=False),
    "option": change(opt=("fa.num_splits=2",)),
    "tuned option": lambda subject: setattr(subject, "tuned_options", ("triton.pdl=off",)),
    "variable": lambda subject: os.environ.update({"PYTORCH_ALLOC_CONF": "x"}),
}


@pytest.mark.feature("V7")
def test_the_next_start_of_the_same_engine_knows_what_was_measured(tmp_path: Path) -> None:
    profile = Subject(tmp_path).find()
    assert profile.read() is None
    profile.write(USE)

    again = Subject(tmp_path).find().read()
    assert again is not None and again[0] == evolve(USE, is_kept=True)


@pytest.mark.feature("V7")
@pytest.mark.parametrize("what", CHANGES)
def test_whatever_may_change_the_figures_has_them_measured_again(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    subject = Subject(tmp_path)
    subject.find().write(USE)
    assert subject.find().read() is not None

    CHANGES[what](subject)  # type: ignore[operator]
    assert subject.find().read() is None


def test_code_that_is_edited_in_place_has_them_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "my_backend" / "inner" / "kernels.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1")
    (tmp_path / "my_backend" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    subject = Subject(tmp_path)
    subject.spec.implementation = "my_backend.inner:Backend"
    subject.find().write(USE)
    assert subject.find().read() is not None

    module.write_text("x = 22")
    assert subject.find().read() is None


@pytest.mark.parametrize(
    "settings",
    [{"model": "elsewhere"}, {"log_level": "DEBUG"}, {"record": "x"}, {"max_queued_requests": 7}],
)
def test_what_changes_no_figure_leaves_them(tmp_path: Path, settings: dict[str, Any]) -> None:
    Subject(tmp_path).find().write(USE)
    assert Subject(tmp_path, **settings).find().read() is not None


@pytest.mark.parametrize(
    ("hooks", "settings"), [(NO_HOOKS, {"memory_profiles": None}), (PartHooks(), {})]
)
def test_nothing_is_kept_when_it_is_off_or_parts_are_wrapped(
    tmp_path: Path, hooks: PartHooks, settings: dict[str, Any]
) -> None:
    subject = Subject(tmp_path, **settings)
    subject.hooks = hooks
    profile = subject.find()
    profile.write(USE)
    profile.forget()
    assert profile.read() is None and not (tmp_path / "kept").exists()


def test_nothing_is_kept_on_a_cpu_or_where_graphs_failed(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    subject.find().write(evolve(USE, capturable=False))
    subject.env = evolve(ENV, device="cpu")
    subject.find().write(USE)
    assert not (tmp_path / "kept").exists()


def test_kernels_that_are_gone_are_compiled_again_by_a_profile_run(
    tmp_path: Path, no_kernels: Path
) -> None:
    profile = Subject(tmp_path).find()
    profile.write(USE)
    (no_kernels / "c").mkdir()
    assert profile.read() is not None
    (no_kernels / "a").rmdir()
    (no_kernels / "b").rmdir()
    assert profile.read() is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}', '{"format": 9}'])
def test_a_damaged_file_is_measured_anew(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    profile = Subject(tmp_path).find()
    profile.write(USE)
    assert profile.path is not None
    profile.path.write_text(content)
    with caplog.at_level(logging.WARNING, "headstock"):
        assert profile.read() is None
    assert bool(caplog.records) is (json.loads(content or "0") != {"format": 9})
    profile.write(USE)
    assert profile.read() is not None


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kept").write_text("a file")
    with caplog.at_level(logging.WARNING, "headstock"):
        Subject(tmp_path).find().write(USE)
    assert "a memory profile is not kept" in caplog.messages[0]


def test_a_step_without_memory_has_the_next_start_measure_again(tmp_path: Path) -> None:
    profile = Subject(tmp_path).find()
    profile.write(USE)
    profile.note_failure(ValueError("something else"))
    assert profile.read() is not None
    profile.note_failure(torch.OutOfMemoryError("of 2 GiB"))
    assert profile.read() is None
    profile.note_failure(torch.OutOfMemoryError("again"))


class Planning:
    """Plans memory with a profile run that only counts.   calls: its runs    notes: for the user"""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.notes: list[str] = []

    def measure(self, *inputs: object) -> MemoryUse:
        """The profile run."""
        self.calls.append(inputs)
        return USE

    def plan(self, profile: KeptProfile, ranks: Ranks) -> Any:
        """The plan of a rank."""
        inputs: Any = SimpleNamespace(
            config=EngineConfig(),
            model=None,
            needs=SimpleNamespace(dtype="bfloat16"),
            parts=SimpleNamespace(max_drafts=0),
            params={},
        )
        shape = BufferShape(
            groups=(), device=torch.device("cuda"), kv_dtype=torch.bfloat16, page_size=16, rows=4
        )
        return pool_memory.plan_device_memory(
            inputs, shape, 64, 1 << 30, profile, self.notes, ranks, None
        )


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> Planning:
    """Plans memory; of what the plan is made of, the bytes of steps alone."""
    planning = Planning()
    monkeypatch.setattr(pool_memory, "profile_memory_use", planning.measure)
    monkeypatch.setattr(
        pool_memory,
        "plan_memory",
        lambda *inputs, **uses: SimpleNamespace(use=uses["other_use"], kv_tokens=16),
    )
    return planning


def test_a_start_measures_once_and_says_when(tmp_path: Path, planning: Planning) -> None:
    plans = [planning.plan(Subject(tmp_path).find(), OneRank()) for _ in range(2)]

    assert [plan.use for plan in plans] == [USE, evolve(USE, is_kept=True)]
    assert len(planning.calls) == 1
    (note,) = planning.notes
    assert "were measured on 2" in note and "memory_profiles (--memory-profiles) off" in note


class OneOfTwoRanks(OneRank):
    """A rank that a thread plays.   channel: what rank 0 has shared and rank 1 has not read yet"""

    count = 2

    def __init__(self, index: int, channel: queue.SimpleQueue[Any]) -> None:
        self.index = index
        self.channel = channel

    def share(self, value: Any) -> Any:
        if self.index:
            return self.channel.get(timeout=patience.seconds)
        self.channel.put(value)
        return value


@pytest.mark.feature("S19")
@pytest.mark.parametrize(
    ("kept", "runs"),
    [((True, False), 0), ((True, True), 0), ((False, True), 2), ((False, False), 2)],
    ids=["rank 0", "both", "rank 1", "none"],
)
def test_all_ranks_measure_or_none_as_rank_0_has_measured_before(
    kept: tuple[bool, bool], runs: int, tmp_path: Path, planning: Planning
) -> None:
    channel: queue.SimpleQueue[Any] = queue.SimpleQueue()
    profiles = []
    for index, has_measured in enumerate(kept):
        folder = tmp_path / f"rank {index}"
        folder.mkdir()
        profiles.append(Subject(folder).find())
        if has_measured:
            # A rank's own figures are not those of rank 0.
            profiles[-1].write(evolve(USE, graphs=(9 + index) << 20))

    plans = [
        planning.plan(profile, OneOfTwoRanks(index, channel))
        for index, profile in enumerate(profiles)
    ]

    assert len(planning.calls) == runs
    expected = USE if runs else evolve(USE, graphs=9 << 20, is_kept=True)
    assert [plan.use for plan in plans] == [expected] * 2


def test_kept_names_are_short_and_have_no_path_of_a_model(tmp_path: Path) -> None:
    profile = Subject(tmp_path, model=str(tmp_path)).find()
    profile.write(USE)
    assert profile.path is not None and len(profile.path.name) == 21
    assert str(tmp_path / "config") not in profile.path.read_text()


def test_the_folders_of_kernels_are_those_that_libraries_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert [*kept_profile.count_kernels()] == [
        str(tmp_path / ".triton" / "cache"),
        str(tmp_path / ".cache" / "flashinfer"),
    ]
