"""A proposer for measurements: it drafts tokens that were recorded, a share of them falsified."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from attrs import frozen

from headstock.spi import Proposer, ProposerSpec, SpiRange
from headstock.spi.arrays import Ints

ENTRY_POINTS = "[headstock.proposer]\nrecorded = recorded_proposer:spec\n"


@frozen(kw_only=True)
class RecordedOptions:
    """The recording, as `write_recording` makes it, and the share of drafts that is right."""

    path: str = ""
    right: float = 1.0
    drafts: int = 4


def spec() -> ProposerSpec:
    """The proposer `recorded`."""
    return ProposerSpec(
        name="recorded",
        spi=SpiRange(0, 3),
        summary="tokens of an earlier run",
        implementation="recorded_proposer:RecordedProposer",
        options="recorded_proposer:RecordedOptions",
    )


def install(folder: Path) -> None:
    """Make `folder`, which is to be on `sys.path`, a distribution with this proposer."""
    info = folder / "headstock_recorded-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = "Metadata-Version: 2.1\nName: headstock-recorded\nVersion: 0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")


def write_recording(path: Path, sequences: Sequence[Sequence[int]]) -> None:
    """Write prompts with their outputs, which begin differently."""
    path.write_text(json.dumps([list(sequence) for sequence in sequences]), encoding="utf-8")


class RecordedProposer(Proposer):
    """Looks a row up by its first tokens.

    Which drafts are wrong depends on their positions alone, so that a run repeats itself exactly.
    """

    def __init__(self, options: RecordedOptions) -> None:
        self.options = options
        self.read_at = 0
        self.sequences: dict[tuple[int, ...], Ints] = {}

    @property
    def max_drafts(self) -> int:
        """As the options say."""
        return self.options.drafts

    def propose(self, tokens: Sequence[Ints], room: Ints, ids: Ints) -> tuple[Ints, Ints]:
        """The tokens at the positions that follow, some of them one too high."""
        self.read()
        drafts = [
            self.draft(self.sequences.get(tuple(row[:8].tolist()), row), len(row), most)
            for row, most in zip(tokens, room.tolist(), strict=True)
        ]
        counts = np.array([len(draft) for draft in drafts], np.int32)
        return counts, np.concatenate([np.zeros(0, np.int32), *drafts])

    def draft(self, sequence: Ints, start: int, room: int) -> Ints:
        """The drafts of one row from position `start` on."""
        positions = np.arange(start, min(start + room, len(sequence)))
        # A hash of the position: 0 to 1, and as good as random.
        is_wrong = (positions * 2654435761 % 2**32) / 2**32 >= self.options.right
        right = sequence[positions]
        return np.where(is_wrong, np.maximum(right - 1, 0) + (right == 0), right).astype(np.int32)

    def read(self) -> None:
        """Read the recording when it has changed."""
        path = Path(self.options.path)
        changed = path.stat().st_mtime_ns
        if changed != self.read_at:
            self.read_at = changed
            self.sequences = {
                tuple(sequence[:8]): np.array(sequence, np.int32)
                for sequence in json.loads(path.read_text("utf-8"))
            }
