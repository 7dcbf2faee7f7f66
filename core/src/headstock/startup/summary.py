"""Summarize an engine for its start-up print and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from headstock.startup.start_times import format_parts

if TYPE_CHECKING:
    # A process that only shows a summary needs neither torch nor an engine.
    from headstock.startup.build import EngineBuild


@frozen(kw_only=True)
class EngineSummary:
    """What was selected and negotiated at start-up; `proposer` is empty without one.

    no_text: why the model gives vectors alone; empty where it gives text
    placeholders: as in `ModelConfig`
    options: of plugins, as `--opt` has them: what was tuned, and then what was given
    prompt_graphs: token counts of the steps with prompt tokens that graphs are planned for, largest
        first
    start: names and seconds of the start's parts, in order
    other_starts: those of the other ranks, in their order
    """

    model: str
    architecture: str
    device: str
    device_name: str
    dtype: str
    kv_dtype: str
    attention: str
    cache: str
    scheduler: str
    runner: str
    ops: str
    proposer: str
    logits_processors: tuple[str, ...]
    grammar: str
    options: tuple[str, ...]
    page_size: int
    kv_tokens: int
    max_seq_len: int
    max_running_requests: int
    overlap: bool
    prompt_graphs: tuple[int, ...]
    table: tuple[tuple[str, str, str], ...]
    memory: tuple[str, ...]
    notes: tuple[str, ...]
    start: tuple[tuple[str, float], ...]
    other_starts: tuple[tuple[tuple[str, float], ...], ...] = ()
    no_text: str = ""
    placeholders: tuple[tuple[int, str], ...] = ()

    def short_lines(self, *later: tuple[str, float]) -> list[str]:
        """What runs, and where to see more, in two lines; notes follow."""
        seconds = sum(each for _, each in (*self.start, *later))
        return [
            f"{self.model}: {self.architecture} in {self.dtype} on {self.device_name}, requests of "
            f"up to {self.max_seq_len} tokens",
            f"ready after {seconds:.1f} s, with room for {self.kv_tokens} tokens; -v shows "
            "plugins, memory and times",
            *(f"note: {note}" for note in self.notes),
        ]

    def lines(self, *later: tuple[str, float]) -> list[str]:
        """The lines of the start-up print; `later` are parts of the start after the engine's."""
        names = ("attention", "cache", "scheduler", "runner", "ops")
        parts = " | ".join(f"{name} {getattr(self, name)}" for name in names)
        if self.proposer:
            parts += f" | proposer {self.proposer}"
        if self.logits_processors:
            parts += f" | logits processors {', '.join(self.logits_processors)}"
        if self.grammar:
            parts += f" | grammar {self.grammar}"
        wide = max(len(what) for what, *_ in self.table)
        value = max(len(text) for _, text, _ in self.table)
        return [
            f"model     {self.model} ({self.architecture}), sequences up to {self.max_seq_len} "
            f"tokens, {self.max_running_requests} at once",
            f"plugins   {parts}",
            *(f"          {what:{wide}}  {text:{value}}  {who}" for what, text, who in self.table),
            *self.memory,
            f"start     {format_parts((*self.start, *later))}",
            *(
                f"{f'rank {rank}':9} {format_parts(parts)}"
                for rank, parts in enumerate(self.other_starts, start=1)
            ),
            *(f"note      {note}" for note in self.notes),
        ]


def summarize_engine(build: EngineBuild) -> EngineSummary:
    """Summarize an engine made of these parts."""
    parts = build.parts
    return EngineSummary(
        model=build.config.model,
        architecture=build.model.architecture,
        device=build.env.device,
        device_name=build.env.name,
        dtype=build.terms.dtype,
        kv_dtype=build.terms.kv_dtype,
        attention=parts.attention_name,
        cache=parts.cache.name,
        scheduler=parts.scheduler.name,
        runner=parts.runner.name,
        ops=parts.ops.name,
        proposer="" if parts.proposer is None else parts.proposer.spec.name,
        logits_processors=tuple(each.spec.name for each in parts.processors),
        grammar="" if build.grammars is None or parts.grammar is None else parts.grammar.name,
        options=(*parts.tuned_options, *build.config.opt),
        page_size=build.memory.page_size,
        kv_tokens=build.memory.kv_tokens,
        max_seq_len=build.limits.max_len,
        max_running_requests=build.limits.max_rows,
        overlap=build.limits.overlap and not build.parts.drafts_all,
        prompt_graphs=build.graph_sizes.tokens,
        table=(*_list_weights(build), *build.terms.table, *_list_operations(build)),
        memory=tuple(build.memory.lines()),
        notes=tuple(build.notes),
        start=build.start,
        other_starts=build.other_starts,
        no_text=build.no_text,
        placeholders=build.model.placeholders,
    )


def _list_weights(build: EngineBuild) -> list[tuple[str, str, str]]:
    """List what loading made of quantized weights, for the table."""
    return [("weights", build.weights, "quantization_config")] if build.weights else []


def _list_operations(build: EngineBuild) -> list[tuple[str, str, str]]:
    """List which operations the set does itself and which are composed, for the table."""
    return [
        ("operations", line, (f"ops (--ops) {build.config.ops}"))
        for line in build.operations.lines()
    ]
