"""Recordings of the schedule: an engine writes them, `replay` runs them again without a device.

The package never imports torch.
"""

from headstock.record.file import Recording, read_recording, reserve_file
from headstock.record.header import make_header, restore_limits
from headstock.record.recorded_step import RecordedStep
from headstock.record.recorder import Recorder
from headstock.record.replay import (
    Divergence,
    ReplayedStep,
    ReplayResult,
    replay_recording,
    replay_steps,
)

__all__ = [
    "Divergence",
    "RecordedStep",
    "Recorder",
    "Recording",
    "ReplayResult",
    "ReplayedStep",
    "make_header",
    "read_recording",
    "replay_recording",
    "replay_steps",
    "reserve_file",
    "restore_limits",
]
