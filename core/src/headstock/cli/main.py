"""The command line: `headstock VERB ...`.

A verb's module is imported when the verb is used, so that `--help` stays fast.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType

from headstock.cli.process import (
    CANNOT_WRITE,
    Terminated,
    drop_output,
    exit_at_once,
    handle_signals,
    open_streams,
    pause_collections,
    prepare_torch,
    resume_collections,
)
from headstock.cli.tables import fold_line, terminal_width
from headstock.errors import (
    HeadstockError,
    PluginBroken,
    UsageError,
    compose_error,
    describe_error,
    shorten,
)

VERBS: Mapping[str, str] = MappingProxyType(
    {
        "run": "generate text: one prompt, a file of prompts, or a chat",
        "chat": "talk with a model",
        "models": "list the models on this machine, and whether they can run here",
        "replay": "run a recorded schedule again, without a device",
        "plugins": "list the installed plugins, describe or check one of them",
        "config": "show the settings in effect, the source of each, and the presets",
        "doctor": "check what works on this machine, and say how to fix the rest",
        "completion": "a script with which bash, zsh or fish completes verbs and flags",
    }
)
"""Core's own verbs, with their summaries; the module of one is `headstock.cli.VERB`."""
BEGINNING = """\
headstock chat MODEL          talk with a model; 'demo' is a small one that is installed
headstock run MODEL "TEXT"    continue a text
headstock serve MODEL         serve a model over HTTP, with a page for browsers

MODEL is a directory, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, or the name of an installed
checkpoint.
'headstock models' lists those on this machine, 'headstock --help' what else headstock does."""
"""What `headstock` alone prints."""

RESUMING_VERBS = ("run", "chat")
"""Verbs that resume the collection of garbage themselves, once an engine has started."""

# As shells report signals, 128 and the number: SIGINT, SIGPIPE, SIGTERM. 70 is EX_SOFTWARE of
# sysexits.h.
INTERRUPTED, UNREAD, TERMINATED, DIED, UNWRITTEN = 130, 141, 143, 70, 1
TRACEBACK = "HEADSTOCK_TRACEBACK"


def main(argv: list[str] | None = None) -> int:
    """The exit code of `headstock ARGV`; every error is one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = bool(arguments) and arguments[0] in ("-v", "--verbose")
    if argv is None:  # the process is this command's own
        pause_collections()
    open_streams()
    prepare_torch(os.environ)  # before anything imports torch, which looks at it once
    try:
        with handle_signals():
            return _run_verb(_pass_verbose(arguments[verbose:]) if verbose else arguments)
    except BaseException as error:
        if verbose or os.environ.get(TRACEBACK, "0") not in ("", "0"):
            traceback.print_exc()
        code = _report_error(error, arguments[verbose:][:1])
        if argv is None and code == DIED:
            # The error still holds tensors that a broken device may never free; see `Engine.close`.
            exit_at_once(code)
        return code
    finally:
        if argv is None:
            # The process ends. A last collection over all that torch defined would take 0.6 s.
            gc.freeze()


def _pass_verbose(arguments: list[str]) -> list[str]:
    """The arguments of a verb that says more at its start too, told to do so."""
    verb, rest = arguments[:1], arguments[1:]
    return [*verb, "--verbose", *rest] if verb and verb[0] in RESUMING_VERBS else arguments


def _run_verb(arguments: list[str]) -> int:
    """The exit code of the verb, after its output is flushed; argparse's exits become codes too."""
    try:
        code = _dispatch_verb(arguments)
    except SystemExit as leaving:
        code = (
            leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else DIED
        )
    # Flushed here, where a closed pipe or a full disk still becomes an exit code.
    sys.stdout.flush()
    return code


def _report_error(error: BaseException, verb: list[str]) -> int:
    """The exit code of an error of a verb, after one line about it on standard error."""
    match error:
        case HeadstockError():
            _print_error(str(error))
            return error.exit_code
        case KeyboardInterrupt():
            return INTERRUPTED
        case Terminated():
            return TERMINATED
        # The reader of standard output has gone, as `head` does. Python ignores SIGPIPE, so its
        # exit code is given here.
        case BrokenPipeError():
            drop_output()
            return UNREAD
        case OSError() if error.errno in CANNOT_WRITE:
            where = "output" if error.filename is None else shorten(error.filename)
            _print_error(f"cannot write {where}: {error.strerror}; make room, or write elsewhere")
            drop_output()
            return UNWRITTEN
        case _:
            hint = f"'headstock -v ...' or {TRACEBACK}=1 shows where"
            _print_error(compose_error(_describe_fault(error, verb), hint))
            return DIED


def _describe_fault(error: BaseException, verb: list[str]) -> str:
    """What was raised, and in which plugin if it was in one."""
    # Late: the registry takes 70 ms to import, and an error is rare.
    from headstock.registry import find_culprit

    culprit = find_culprit(error, [("command", name) for name in verb])
    if culprit is None:
        return f"internal error: {describe_error(error)}"
    return f"{culprit.plugin} raised {describe_error(error)} in {culprit.place}"


def _print_error(text: str) -> None:
    """Print one line on standard error, broken between words where a terminal is narrower."""
    print(
        fold_line(f"headstock: {' '.join(text.split())}", terminal_width(sys.stderr), 0),
        file=sys.stderr,
    )


def _dispatch_verb(arguments: list[str]) -> int:
    """The exit code of the verb that comes first, called with what follows it."""
    match arguments:
        case []:
            print(BEGINNING, file=sys.stderr)
            return UsageError.exit_code
        case ["-h" | "--help" | "help", *_]:
            print(_format_usage())
            return 0
        case ["-V" | "--version", *_]:
            print(f"headstock {read_version()}")
            return 0
        case [verb, *rest] if verb in VERBS:
            main_function: Callable[[list[str]], int] = importlib.import_module(
                f"headstock.cli.{verb}"
            ).main
            if verb not in RESUMING_VERBS:
                resume_collections()
            return main_function(rest)
        case [verb, *rest]:
            plugin_function = _load_plugin_verb(verb)
            resume_collections()
            return plugin_function(rest)
    raise AssertionError("a list is empty or has a first element")


def _format_usage() -> str:
    """What `headstock --help` prints."""
    # Core's verbs last: no package can take the place of one.
    verbs = {**list_plugin_commands(), **VERBS}
    width = max(map(len, verbs))
    lines = [f"  {verb:{width}}  {verbs[verb]}" for verb in (*VERBS, *sorted(verbs.keys() - VERBS))]
    return "\n".join(
        [
            "usage: headstock [-v] VERB [options]",
            "",
            "An LLM inference engine whose parts are plugins.",
            "",
            *lines,
            "",
            "Plugins add verbs: 'headstock plugins list command' shows which.",
            "'headstock VERB --help' shows a verb's options, -v where an error came from,",
            "--version the version.",
        ]
    )


def list_plugin_commands() -> dict[str, str]:
    """Installed commands of plugins -> what the summaries of their distributions say of them.

    A distribution with several commands says `NAME: what it does; NAME: what it does`.
    """
    from headstock.distributions import read_distributions

    # `--help` shows what metadata says: a broken plugin cannot stop it, a slow one not slow it
    commands: dict[str, str] = {}
    for distribution in read_distributions():
        # A name that no verb can have is for 'headstock plugins list' to explain.
        names = [
            line.name
            for line in distribution.read_entry_points()
            if line.group == "headstock.command" and line.name.replace("-", "_").isidentifier()
        ]
        summary = " ".join(distribution.header.get("Summary", "").split())
        parts = dict(part.strip().partition(": ")[::2] for part in summary.split(";"))
        for name in names:
            other = f"a command of {distribution.name}; its own --help says what it does"
            commands[name] = summary if len(names) == 1 else parts.get(name, other)
    return commands


def read_version() -> str:
    """The installed version of core."""
    from importlib import metadata

    try:
        return metadata.version("headstock")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _load_plugin_verb(verb: str) -> Callable[[list[str]], int]:
    """The function behind a verb that a plugin provides; `DISTRIBUTION:VERB` picks one of several.

    raises: UsageError with a suggestion if it is unknown, PluginBroken, SpiMismatch, CannotRun
    """
    # Late: the registry takes 70 ms of processor time to import, which core's own verbs need not
    # pay.
    from headstock import registry
    from headstock.errors import suggest_name

    installed = (plugin.name for plugin in registry.list_installed("command"))
    verbs = (*VERBS, *installed, *registry.install_lines("command"))
    if verb.rpartition(":")[2] not in verbs:
        kind = "flag" if verb.startswith("-") else "verb"
        close = suggest_name(shorten(verb), verbs) or "; see 'headstock --help'"
        raise UsageError(f"unknown {kind} '{shorten(verb)}'{close}")
    spec = registry.load_spec("command", verb)
    registry.require_installed(spec)
    if spec.resolve is not None:  # describing the machine takes torch, which most verbs need not
        from headstock.selection.refusals import check_resolve
        from headstock.startup.device import describe_device

        check_resolve(spec, "the command", None, describe_device("auto"))
    run: Callable[[list[str]], object] = registry.import_implementation(spec)
    if not callable(run):
        raise PluginBroken(
            f"verb {verb!r}: {spec.implementation}: expected main(arguments) -> int, got "
            f"{shorten(run)}"
        )

    def run_checked(arguments: list[str]) -> int:
        code = run(arguments)
        # sys.exit(None) would end with 0, and so call a command that forgot its code a success.
        if not isinstance(code, int):
            raise PluginBroken(
                f"verb {verb!r}: {spec.implementation}: expected an exit code, got {shorten(code)}"
            )
        return code

    return run_checked
