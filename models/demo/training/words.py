"""The names, animals, places and things of the demo model's world."""

from __future__ import annotations

import random
from typing import NamedTuple

GIRLS = (
    "Mia",
    "Anna",
    "Lily",
    "Rosa",
    "Nora",
    "Ella",
    "Sara",
    "Zoe",
    "Ida",
    "Emma",
    "Clara",
    "Luna",
)
BOYS = ("Ben", "Tom", "Max", "Leo", "Sam", "Finn", "Otto", "Paul", "Jack", "Hugo", "Oscar", "Theo")
NAMES = GIRLS + BOYS
# Names and kinds met only now and then, so that the model learns to take over a word rather than to
# know it.
RARE_GIRLS = (
    "Mary", "Alice", "Jane", "Eva", "Julia", "Laura", "Sophie", "Kate", "Hannah", "Maria",
    "Olivia", "Grace", "Lucy", "Marta", "Greta", "Helen", "Ruth", "Amy", "Chloe", "Priya", "Yuki",
    "Fatima", "Ingrid", "Carla", "Diana", "Vera",
)  # fmt: skip
RARE_BOYS = (
    "Peter", "John", "David", "James", "Michael", "Robert", "William", "Thomas", "Daniel", "Simon",
    "Martin", "Mark", "Henry", "George", "Charlie", "Bob", "Alex", "Chris", "Kevin", "Ali",
    "Kenji", "Ravi", "Pedro", "Ivan", "Lars", "Karl",
)  # fmt: skip
ANIMALS = (
    "fox",
    "bear",
    "rabbit",
    "mouse",
    "owl",
    "cat",
    "dog",
    "duck",
    "frog",
    "hedgehog",
    "dragon",
    "squirrel",
)
RARE_KINDS = (
    "robot", "wizard", "pirate", "knight", "king", "prince", "lion", "wolf", "elephant", "monkey",
    "horse", "cow", "pig", "penguin", "bee", "turtle", "snail", "giant", "monster", "goat",
    "tiger", "crocodile", "farmer", "baker", "ghost", "princess", "queen", "fairy", "unicorn",
    "witch", "mermaid", "ant", "whale", "teacher", "sailor", "parrot", "alien",
)  # fmt: skip
FEMALE_KINDS = ("girl", "princess", "queen", "fairy", "witch", "mermaid", "cow")
MALE_KINDS = ("boy", "wizard", "king", "prince")

THINGS = (
    "red kite",
    "blue ball",
    "little drum",
    "wooden boat",
    "yellow umbrella",
    "silver bell",
    "green scarf",
    "paper lantern",
    "toy train",
    "golden key",
    "small mirror",
    "warm hat",
)
SPOTS = {
    "the river": ("under the old bridge", "among the reeds", "on a flat stone"),
    "the forest": ("behind a tall tree", "in a hollow log", "beside the mushrooms"),
    "the beach": ("behind a big rock", "next to a boat", "in the white sand"),
    "the garden": ("under the rose bush", "behind the shed", "between the beans"),
    "the hill": ("under a lonely tree", "in the long grass", "on top of a wall"),
    "the market": ("behind the flower cart", "under a table", "next to the well"),
    "the meadow": ("among the daisies", "beside the fence", "in a pile of hay"),
    "the lake": ("at the end of the pier", "in an old boat", "beside the water lilies"),
}
PLACES = tuple(SPOTS)
INSIDE = {"the forest": "in", "the garden": "in", "the meadow": "in", "the hill": "on"}
TREATS = (
    "a honey cake",
    "a berry pie",
    "a warm bun",
    "a basket of plums",
    "a jar of jam",
    "a red apple",
    "a bowl of soup",
    "a slice of bread",
)
NOUNS = (
    "boat",
    "car",
    "kite",
    "ball",
    "book",
    "guitar",
    "bike",
    "hat",
    "doll",
    "train",
    "ring",
    "map",
    "drum",
    "star",
)
SYLLABLES = (
    "ba", "ke", "lo", "mi", "nu", "ra", "se", "ti", "vo", "za", "chu", "dre", "fli", "gan", "hor",
    "jin", "pel", "qua", "sto", "win", "ex", "ou", "ly", "ment", "tion", "ing", "er", "as", "df",
    "gh", "x", "w", "kr", "bo", "do", "el", "in",
)  # fmt: skip
NUMBERED = (
    "boat",
    "house",
    "box",
    "key",
    "cart",
    "bike",
    "room",
    "bag",
    "lamp",
    "bell",
    "ticket",
    "train",
)


class Character(NamedTuple):
    """Somebody in a story, with the words that stand for them."""

    name: str
    kind: str

    @property
    def is_girl(self) -> bool:
        return self.kind in FEMALE_KINDS or (
            self.kind not in MALE_KINDS and self.name in GIRLS + RARE_GIRLS
        )

    @property
    def he(self) -> str:
        return "she" if self.is_girl else "he"

    @property
    def him(self) -> str:
        return "her" if self.is_girl else "him"

    @property
    def his(self) -> str:
        return "her" if self.is_girl else "his"

    @property
    def full(self) -> str:
        return f"{self.name} the {self.kind}"


def invented(rng: random.Random) -> str:
    """A word that is none."""
    return "".join(rng.choices(SYLLABLES, k=rng.randint(2, 3)))


def any_name(rng: random.Random) -> str:
    """A name of the stories, a rarer one, or an invented one."""
    form = rng.random()
    if form < 0.4:
        return rng.choice(NAMES)
    return rng.choice(RARE_GIRLS + RARE_BOYS) if form < 0.7 else invented(rng).capitalize()


def any_kind(rng: random.Random) -> str:
    """A kind of character; seldom an invented one."""
    form = rng.random()
    if form < 0.35:
        return rng.choice((*ANIMALS, "girl", "boy"))
    return rng.choice(RARE_KINDS) if form < 0.85 else invented(rng)


def at(place: str) -> str:
    """The place with its preposition."""
    return f"{INSIDE.get(place, 'at')} {place}"


def the(noun: str) -> str:
    """The noun with the definite article in place of the indefinite."""
    return f"the {noun.split(' ', 1)[1]}"


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
