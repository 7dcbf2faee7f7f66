"""Recordings of the schedule: written by a running engine, re-run without a device. Never imports
torch.
"""

from headstock.record.file import Recording, read, reserved
from headstock.record.header import describe, limits_of
from headstock.record.moment import Moment
from headstock.record.recorder import Recorder
from headstock.record.replay import Divergence, Replayed, Verdict, replay, replay_whole

__all__ = [
    "Divergence",
    "Moment",
    "Recorder",
    "Recording",
    "Replayed",
    "Verdict",
    "describe",
    "limits_of",
    "read",
    "replay",
    "replay_whole",
    "reserved",
]
