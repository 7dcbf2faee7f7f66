"""Which plugin is broken in which way, and what makes it show."""

from __future__ import annotations

import re

from attrs import frozen


@frozen
class Broken:
    """A broken plugin.

    path: of its implementation in this package, "module:Name"
    fault: what is wrong with it, as the page says
    resolve: of an attention backend, the path of its `resolve`
    clears: the prefix cache is reset at the end of the run
    is_undefined: what a plain run answers is what the memory held
    """

    kind: str
    path: str
    fault: str
    resolve: str = ""
    clears: bool = False
    is_undefined: bool = False

    @property
    def name(self) -> str:
        """The name of the plugin; of a family its architecture."""
        word = self.path.partition(":")[2]
        if self.kind == "model":
            return "".join(part.capitalize() for part in word.split("_")) + "ForCausalLM"
        if word.isupper():
            return word.lower().replace("_", "-")
        return re.sub(r"(?<!^)(?=[A-Z])|_", "-", word).lower()


def of_kind(kind: str, module: str, *faults: tuple[str, str], clears: bool = False) -> list[Broken]:
    """The broken plugins of a module."""
    return [Broken(kind, f"{module}:{name}", fault, clears=clears) for name, fault in faults]


CASES: tuple[Broken, ...] = (
    *of_kind(
        "attention",
        "attention",
        ("CannotBeMade", "its constructor raises"),
        ("Raises", "`forward` raises"),
        ("Exits", "`forward` calls `sys.exit`"),
        ("PageOff", "page off by one"),
        ("SlotOff", "slot off by one"),
        ("HeadsSwapped", "KV heads swapped"),
        ("SeesFuture", "prompts see the future"),
        ("ForgetsOwnToken", "forgets the row's own token"),
        ("WrongScale", "another scale"),
        ("WrongWindow", "a window where there is none"),
        ("RowsSwapped", "decode rows in another order"),
        ("ZeroesTables", "zeroes the page tables"),
        ("WritesLengths", "writes the host's lengths"),
        ("ScalesQueries", "scales the queries in place"),
        ("WritesPool", "writes keys to the pool"),
        ("SharesPlan", "one plan object for all steps"),
        ("LatestLengths", "decodes with the lengths of the step before"),
        ("Overflows", "infinite in layer 2 from 15 tokens on"),
    ),
    Broken(
        "attention", "attention:NamesOutput", "`out = ...` in place of a write", is_undefined=True
    ),
    Broken("attention", "attention:Sound", "`resolve` raises", "attention:resolve_raises"),
    *of_kind(
        "ops",
        "ops",
        ("PreparesTensor", "`prepare` returns a tensor"),
        ("CannotPrepare", "`prepare` raises"),
        ("TakesNothing", "replaces `mlp` and has no `takes`"),
        ("WrongEps", "another eps in norms"),
        ("SlotOff", "keys and values a slot too far"),
        ("KeysForValues", "keys in the place of values"),
        ("OtherLayer", "keys and values in another layer's pool"),
        ("MovesPositions", "rotations of the token before"),
        ("WritesPositions", "writes the batch's positions"),
        ("ForgetsResidual", "`mlp` forgets the stream"),
        ("ReturnsTensor", "`mlp` returns a tensor"),
        ("Overflows", "infinite activations"),
        ("NegativeToken", "samples -1"),
        ("UnknownToken", "samples ids past the vocabulary"),
        ("SecondBest", "samples the second best token"),
        ("HealthyOverNan", "NaN in scores is called healthy"),
        ("CallsAllHealthy", "NaN in hidden states is called healthy"),
        ("WritesOtherPages", "writes to pages of earlier tokens too"),
        ("OtherNoise", "noise of another seed"),
        ("OtherLogprobs", "other log-probabilities"),
    ),
    *of_kind(
        "cache",
        "caches",
        ("CannotBeMade", "its constructor raises"),
        ("NoIndex", "`new_index` raises"),
        ("Raises", "`match_prefix` raises"),
        ("MatchesNone", "matches None"),
        ("MatchesList", "matches a list"),
        ("MatchesPastPool", "matches a page that does not exist"),
        ("MatchesLatest", "matches pages of other tokens"),
        ("IgnoresNamespaces", "ignores namespaces"),
        ("WritesKeys", "sorts the keys that it is given"),
        ("CountsNone", "`count_evictable` returns None"),
        ("CountsTooMany", "counts pages that it cannot evict"),
        ("InsertsNothing", "`insert_each` returns None"),
        ("NeverReleases", "ignores `release`"),
        ("ReversesPages", "matches pages in reverse order"),
        ("FirstForAll", "puts the first page in the place of all others"),
    ),
    *of_kind(
        "cache",
        "caches",
        ("EvictsTwice", "evicts each page twice"),
        ("EvictsUnknown", "evicts a page that it does not have"),
        clears=True,
    ),
    *of_kind(
        "scheduler",
        "schedulers",
        ("NOT_A_FUNCTION", "a number, not a function"),
        ("raises", "raises"),
        ("exits", "calls `sys.exit`"),
        ("returns_none", "returns None"),
        ("lists", "lists in its decision"),
        ("fractions", "fractions in its decision"),
        ("twice", "a row twice"),
        ("too_many", "more tokens than a row has"),
        ("unknown_position", "admits a request that does not exist"),
        ("writes_view", "writes the view"),
        ("preempts_free", "preempts a row that is free"),
    ),
    *of_kind(
        "runner",
        "runners",
        ("CannotBeMade", "its constructor raises"),
        ("Raises", "`run` raises"),
        ("ReturnsNone", "`run` returns None"),
        ("TooFew", "returns fewer samples"),
        ("MovesRows", "gives rows the tokens of others"),
        ("StoresNothing", "stores no token"),
        ("StoresOthers", "stores the tokens of other rows"),
        ("StoresInPrompts", "stores a token over the next one of a prompt"),
        ("CallsAllHealthy", "NaN is called healthy"),
        ("ReturnsLists", "tokens in a list"),
        ("TokensAsFractions", "tokens as fractions"),
    ),
    *of_kind(
        "model",
        "models",
        ("NO_MODEL", "a dictionary, not a Model"),
        ("CONFIG_NONE", "`config` returns None"),
        ("CONFIG_TYPE_ERROR", "`config` raises TypeError"),
        ("CONFIG_MISSING", "`config` reads a field that is not there"),
        ("TWO_GROUPS", "a layer in two KV groups"),
        ("PARAMS_RAISE", "`params` raises"),
        ("FORWARD_NONE", "`forward` returns None"),
        ("FORWARD_RAISES", "`forward` raises"),
        ("FORWARD_SHORT", "`forward` leaves out a token"),
        ("FORWARD_WIDE", "`forward` returns wider states"),
    ),
    *of_kind(
        "proposer",
        "proposers",
        ("NoDrafts", "`max_drafts` is 0"),
        ("Raises", "`propose` raises"),
        ("ReturnsList", "returns a list"),
        ("UnknownToken", "drafts ids past the vocabulary"),
        ("TooMany", "more drafts than there is room for"),
        ("WritesTokens", "writes the tokens that it is given"),
    ),
    *of_kind(
        "logits",
        "processors",
        ("Raises", "`apply` raises"),
        ("ReturnsNone", "`apply` returns None"),
        ("Halves", "`apply` returns float16"),
        ("OtherDevice", "`apply` returns a tensor of another device"),
        ("UnknownColumn", "`row` gives a column that it does not have"),
        ("MixesRows", "gives rows the scores of others"),
        ("WritesPositions", "writes the positions that it is given"),
        ("MovesBest", "moves the best token, though `changes_argmax` is False"),
        ("LeavesNan", "NaN in its scores"),
    ),
    *of_kind(
        "grammar",
        "grammars",
        ("CannotBeMade", "its constructor raises"),
        ("CompilesNone", "`compile` returns None"),
        ("Exits", "`fill_mask` calls `sys.exit`"),
        ("FillsNothing", "a mask without a token"),
        ("FollowsNothing", "`advance` follows no token"),
    ),
    *of_kind(
        "tools",
        "parsers",
        ("CannotBeMade", "its constructor raises"),
        ("Exits", "`feed` calls `sys.exit`"),
        ("EndsNoCall", "ends a call that did not begin"),
        ("KeepsText", "keeps text that is no call"),
    ),
    *of_kind(
        "checkpoint",
        "checkpoints",
        ("MISSING", "a directory that is not there"),
        ("NUMBER", "a number, not a directory"),
    ),
    *of_kind(
        "command",
        "commands",
        ("NOT_A_FUNCTION", "a text, not a function"),
        ("raises", "raises"),
        ("returns_none", "returns None"),
    ),
)
