"""Short stories: a cast, an opening and one of the plots; every later sentence follows from what
was said.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

from . import plots
from .words import (
    ANIMALS,
    BOYS,
    FEMALE_KINDS,
    GIRLS,
    MALE_KINDS,
    NAMES,
    RARE_BOYS,
    RARE_GIRLS,
    Character,
    a,
    any_kind,
)

Option = TypeVar("Option")

# Each option is drawn this much more rarely than the one before it. Uneven odds give the model's
# choice a clear winner, so that greedy text has wide margins.
RATIO = 0.4
HOMES = (
    "in a small house by the river",
    "at the edge of the forest",
    "in a village by the sea",
    "on a green hill",
    "near a quiet lake",
    "in an old mill",
)
CHILDREN = ("girl", "boy")
ADJECTIVES = ("little", "kind", "clever", "cheerful", "curious", "brave")


class Scene:
    """The cast of one story and its choices; who the hero is decides what is likely, so heroes
    differ in taste.

    The hero's companions are a friend, of a given kind or any, and a helper.
    """

    def __init__(
        self,
        rng: random.Random,
        hero: Character,
        friend: str | None = None,
        thing: str | None = None,
    ) -> None:
        self.rng = rng
        self.hero = hero
        self.thing = thing
        self.friend = self.companion("friend", {hero.name}, {hero.kind}, friend)
        self.helper = self.companion(
            "helper", {hero.name, self.friend.name}, {hero.kind, self.friend.kind}
        )

    def pick(self, slot: str, options: Iterable[Option]) -> Option:
        """One of the options, by odds that depend on the hero and the slot."""
        return favour(self.rng, f"{self.hero.name} {slot}", tuple(options))

    def say(self, slot: str, *sentences: str) -> str:
        """One of several ways to put the same thing."""
        return self.pick(slot, sentences)

    def companion(
        self, slot: str, names: set[str], kinds: set[str], kind: str | None = None
    ) -> Character:
        """A character whose name, and kind unless given, are not taken."""
        kind = kind or self.pick(f"{slot} kind", [kind for kind in ANIMALS if kind not in kinds])
        name = self.pick(f"{slot} name", [name for name in names_for(kind) if name not in names])
        return Character(name, kind)


def names_for(kind: str) -> tuple[str, ...]:
    """The names that a character of the kind may have."""
    return GIRLS if kind in FEMALE_KINDS else BOYS if kind in MALE_KINDS else NAMES


def favour(rng: random.Random, key: str, options: Sequence[Option]) -> Option:
    """An option drawn with geometric odds, whose order is fixed by `key`."""
    order = sorted(range(len(options)), key=lambda index: zlib.crc32(f"{key} {index}".encode()))
    weights = [RATIO**place for place in range(len(options))]
    return options[rng.choices(order, weights)[0]]


def hero(rng: random.Random, kind: str | None = None, name: str | None = None) -> Character:
    """The main character, a child or an animal, seldom something else; `kind` and `name` fix what
    is given.
    """
    children = (0, 24) if name in BOYS + RARE_BOYS else (24, 0) if name else (14, 10)
    if kind is None and name is None and rng.random() < 0.1:
        kind = any_kind(rng)
    kind = kind or rng.choices(("girl", "boy", *ANIMALS), (*children, *([2] * len(ANIMALS))))[0]
    if name is None and rng.random() < 0.1:
        rare = (
            RARE_GIRLS
            if kind in FEMALE_KINDS
            else RARE_BOYS
            if kind in MALE_KINDS
            else RARE_GIRLS + RARE_BOYS
        )
        name = rng.choice(rare)
    return Character(name or favour(rng, f"name of a {kind}", names_for(kind)), kind)


def opening(scene: Scene) -> str:
    """The first sentence: who the hero is and where they live."""
    who = scene.hero
    adjective = scene.pick("adjective", ADJECTIVES)
    home = scene.pick("home", HOMES)
    comma = "," if scene.rng.random() < 0.85 else ""
    named = f"{a(f'{adjective} {who.kind}')} named {who.name}"
    return scene.rng.choices(
        (
            f"Once upon a time{comma} there was {named}. {who.he.capitalize()} lived {home}.",
            f"There was once {named} who lived {home}.",
            f"A long time ago, {named} lived {home}.",
            f"{who.name if who.kind in CHILDREN else who.full} lived {home}.",
        ),
        (12, 3, 2, 1),
    )[0]


def story(
    rng: random.Random,
    *,
    kind: str | None = None,
    name: str | None = None,
    friend: str | None = None,
    plot: str | None = None,
    thing: str | None = None,
) -> str:
    """A whole story of one paragraph; what is given is fixed: the hero's kind and name, the
    friend's kind, the plot, the thing lost."""
    scene = Scene(rng, hero(rng, kind, name), friend, thing)
    names = [name for name in plots.PLOTS if not (friend and name in plots.FRIENDLESS)]
    tell = plots.PLOTS["lost" if thing else plot or scene.pick("plot", names)]
    return " ".join([opening(scene), *tell(scene)])
