"""A recording as a trace for Perfetto and chrome://tracing.

It has a track of steps and one per request.
"""

from __future__ import annotations

import json
from typing import Any, TextIO

from attrs import define, field

from headstock.record import RecordedStep
from headstock.scheduler import Aborted, Arrived, Plan

ENGINE, REQUESTS = 1, 2
"""The two processes of the trace, which viewers show as groups of tracks."""


@define
class Track:
    """The track of a request: its activity and its begin in nanoseconds."""

    number: int
    activity: str = ""
    since: int = 0
    until: int = 0
    tokens: int = 0
    steps: int = 0
    first: int = 0


@define
class Timeline:
    """Writes the trace while reading steps. A step lasts until the next one is planned.

    A request is *queued* until it is admitted, then in a *prefill chunk* or in *decode*; adjacent
    steps of decode are one slice. It is *preempted* from its last step until it is admitted again.
    """

    # Nothing is replayed, so that the tail of a run can be drawn too. A plan does not name
    # the requests that it preempts: the next admission does.

    file: TextIO
    start: int | None = None
    previous: RecordedStep | None = None
    tracks: dict[str, Track] = field(factory=dict)
    by_admission_id: dict[int, str] = field(factory=dict)
    written: int = 0

    def add_step(self, recorded: RecordedStep) -> None:
        """Add the next step."""
        if self.start is None:
            self.start = recorded.at
            self.file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            self._write_name("process_name", ENGINE, 0, "engine")
            self._write_name("thread_name", ENGINE, 0, "steps")
            self._write_name("process_name", REQUESTS, 0, "requests")
        if self.previous is not None and self.previous.plan is not None:
            self._draw_step(self.previous, self.previous.plan, recorded.at)
        self._apply_events(recorded)
        self.previous = recorded

    def _apply_events(self, recorded: RecordedStep) -> None:
        """Begin and end the activities of requests that arrived, were aborted or admitted."""
        for event in recorded.events:
            match event:
                case Arrived(request):
                    track = self._get_track(request.id)
                    self._draw_activity(track, track.until)
                    track.activity, track.since = "queued", recorded.at
                case Aborted(id):
                    if id in self.tracks and self.tracks[id].activity == "queued":
                        self._draw_activity(self.tracks[id], recorded.at)
        if recorded.error:
            self._write_event("i", ENGINE, 0, recorded.at, f"failed: {recorded.error}", s="g")
        if recorded.plan is None:
            return
        admission_ids = dict(
            zip(recorded.plan.rows.tolist(), recorded.plan.admission_ids.tolist(), strict=True)
        )
        for admission in recorded.admissions:
            track = self._get_track(admission.id)
            if admission.preemptions:
                self._draw_activity(track, track.until)
                track.activity, track.since = "preempted", track.until
            self._draw_activity(track, recorded.at)
            track.activity = ""
            self.by_admission_id[admission_ids.get(admission.row, 0)] = admission.id

    def _draw_step(self, recorded: RecordedStep, plan: Plan, end: int) -> None:
        """Draw a step that lasted until `end`."""
        if not len(plan.rows):
            return
        counts = plan.stops - plan.starts
        facts = {
            "step": recorded.number,
            "tokens": int(counts.sum()),
            "rows": len(counts),
            "decode": plan.num_decode,
        }
        self._write_event(
            "X",
            ENGINE,
            0,
            recorded.at,
            f"step {recorded.number}",
            dur=(end - recorded.at) / 1000,
            args=facts,
        )
        self._write_event("C", ENGINE, 0, recorded.at, "step", args={"tokens": facts["tokens"]})
        self._write_event(
            "C",
            ENGINE,
            0,
            recorded.at,
            "rows",
            args={"decode": plan.num_decode, "prefill": len(counts) - plan.num_decode},
        )
        for i, (admission_id, count) in enumerate(
            zip(plan.admission_ids.tolist(), counts.tolist(), strict=True)
        ):
            # the tail of a run has rows without a recorded admission
            id = self.by_admission_id.setdefault(admission_id, f"admitted earlier, {admission_id}")
            self._extend_activity(
                self._get_track(id),
                "decode" if i < plan.num_decode else "prefill chunk",
                recorded,
                end,
                count,
            )

    def _extend_activity(
        self, track: Track, activity: str, recorded: RecordedStep, end: int, count: int
    ) -> None:
        """Record what a request did in a step."""
        goes_on = activity == "decode" and track.activity == activity and track.until == recorded.at
        if not goes_on:
            self._draw_activity(track, track.until)
            track.activity, track.since, track.tokens, track.steps = activity, recorded.at, 0, 0
            track.first = recorded.number
        track.until = end
        track.tokens += count
        track.steps += 1

    def _get_track(self, id: str) -> Track:
        """Return the request's track; a new one gets a name."""
        if id not in self.tracks:
            # Perfetto takes a track with its process's number for the main thread and shows it
            # first.
            number = REQUESTS + 1 + len(self.tracks)
            self.tracks[id] = Track(number)
            self._write_name("thread_name", REQUESTS, number, id)
        return self.tracks[id]

    def _draw_activity(self, track: Track, end: int) -> None:
        """Draw the activity of a request, which lasted until `end`."""
        if track.activity and end > track.since:
            facts = (
                {"tokens": track.tokens, "steps": track.steps, "first step": track.first}
                if track.steps
                else {}
            )
            span = (end - track.since) / 1000
            self._write_event(
                "X", REQUESTS, track.number, track.since, track.activity, dur=span, args=facts
            )
        track.activity, track.since, track.tokens, track.steps = "", end, 0, 0

    def finish(self) -> None:
        """Draw the unfinished activities and end the trace."""
        for track in self.tracks.values():
            last = self.previous.at if self.previous is not None else track.until
            self._draw_activity(track, last if track.activity == "queued" else track.until)
        self.file.write(("" if self.start is not None else '{"traceEvents":[') + "\n]}\n")

    def _write_name(self, what: str, process: int, thread: int, name: str) -> None:
        """Name a process or a thread of the trace."""
        self._write_event("M", process, thread, self.start or 0, what, args={"name": name})

    def _write_event(
        self, phase: str, process: int, thread: int, at: int, name: str, **more: Any
    ) -> None:
        """Write one event of the trace; times are microseconds since the first step."""
        event = {
            "ph": phase,
            "pid": process,
            "tid": thread,
            "ts": (at - (self.start or 0)) / 1000,
            "name": name,
            **more,
        }
        self.file.write((",\n" if self.written else "") + json.dumps(event, separators=(",", ":")))
        self.written += 1
