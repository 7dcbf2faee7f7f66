"""Select the grammar plugin, and make what follows the answers that it rules."""

from __future__ import annotations

import contextlib
from pathlib import Path

from headstock import registry
from headstock.config import EngineConfig
from headstock.errors import CannotRun, shorten
from headstock.grammar import AdmittedRequests, GrammarCompiler, GrammarRows
from headstock.grammar.trial import NUM_TRIALS, TrialPool, TrialProcess
from headstock.selection import auto_choices
from headstock.selection.refusals import check_resolve
from headstock.spi import (
    DeviceEnv,
    GrammarEngine,
    GrammarSpec,
    ModelConfig,
    PartQuery,
    Vocabulary,
)


def select_grammar(config: EngineConfig, query: PartQuery, env: DeviceEnv) -> GrammarSpec | None:
    """Select the grammar plugin that the configuration names; None for `off`.

    `auto` is the first of the host's list that is installed and can serve, or none.

    raises: UnknownPlugin, PluginBroken, SpiMismatch, CannotRun
    """
    if config.grammar == "off":
        return None
    if config.grammar != "auto":
        spec: GrammarSpec = registry.load_spec("grammar", config.grammar)
        registry.require_installed(spec)
        check_resolve(spec, "grammar (--grammar)", query, env)
        return spec
    installed = {plugin.name for plugin in registry.list_installed("grammar")}
    for name in auto_choices.GRAMMARS:
        if name in installed:
            found: GrammarSpec = registry.load_spec("grammar", name)
            with contextlib.suppress(CannotRun):
                registry.require_installed(found)
                check_resolve(found, "grammar (--grammar)", query, env)
                return found
    return None


def make_grammar_rows(
    config: EngineConfig,
    spec: GrammarSpec | None,
    directory: Path,
    model: ModelConfig,
    admitted: AdmittedRequests,
) -> GrammarRows | None:
    """Make what follows the answers of an engine; None where no grammar can be served.

    admitted: the engine's live requests
    raises: CannotRun when a plugin is named, and the model has no tokenizer that it could read
    """
    if spec is None:
        return None
    file = directory / "tokenizer.json"
    if not file.is_file():
        if config.grammar == "auto":
            return None
        raise CannotRun(
            f"grammar (--grammar) {spec.name} needs the model's tokenizer.json, and "
            f"{shorten(directory.name)} has none; set it to off"
        )
    vocabulary = Vocabulary(tokenizer_file=str(file), size=model.vocab, end_ids=model.eos_ids)
    options = () if spec.options is None else (registry.make_options(spec, config.opt),)

    def make_engine() -> GrammarEngine:
        engine: GrammarEngine = registry.make_part(
            spec, GrammarEngine, vocabulary, *options, expected=(ValueError,)
        )
        return engine

    assignments = [each for each in config.opt if _is_for(spec, each)]
    trials = [
        TrialProcess(spec.name, assignments, vocabulary, config.grammar_timeout)
        for _ in range(NUM_TRIALS)
    ]
    compiler = GrammarCompiler(spec.name, make_engine, TrialPool(trials))
    return GrammarRows(compiler, model.vocab, admitted)


def _is_for(spec: GrammarSpec, assignment: str) -> bool:
    """Whether `--opt` gives this plugin an option."""
    return not registry.find_unclaimed([assignment], [spec])


def explain_no_grammar(config: EngineConfig, spec: GrammarSpec | None) -> str:
    """Explain why no grammar can be served."""
    if config.grammar == "off":
        return "grammar (--grammar) off turns it off"
    if spec is None:
        name = auto_choices.GRAMMARS[0]
        return f"no grammar plugin is installed; {registry.install_lines('grammar')[name]}"
    return "the model has no tokenizer.json"
