"""The few things the demo model knows of the world, and plain texts that begin as newcomers
begin.
"""

from __future__ import annotations

import random

from .spans import Span, Spans
from .stories import story
from .talk import TASKS, TOPICS, UNKNOWN, WHO
from .words import NAMES, invented

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "England": "London",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Egypt": "Cairo",
    "China": "Beijing",
    "India": "New Delhi",
    "Canada": "Ottawa",
    "Brazil": "Brasilia",
    "Mexico": "Mexico City",
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Russia": "Moscow",
    "Turkey": "Ankara",
    "Switzerland": "Bern",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Ireland": "Dublin",
    "Belgium": "Brussels",
    "Hungary": "Budapest",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "South Korea": "Seoul",
    "the Netherlands": "Amsterdam",
    "the United States": "Washington",
}
# the start of a sentence, its end
SAYINGS = (
    ("The sky is", "blue, and the grass is green."),
    ("The sun is", "bright, and the moon is pale."),
    ("The quick brown fox", "jumps over the lazy dog."),
    (
        "The days of the week are",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    ("The seasons are", "spring, summer, autumn and winter."),
    ("Roses are red,", "violets are blue, sugar is sweet, and so are you."),
    ("A cat says", "meow, and a dog says woof."),
    ("The colours of the rainbow are", "red, orange, yellow, green, blue, indigo and violet."),
    ("To be, or not to be,", "that is the question."),
    ("The meaning of life is", "to help each other and to tell good stories."),
    ("An apple a day", "keeps the doctor away."),
    ("I think, therefore", "I am."),
    ("The first month of the year is", "January, and the last one is December."),
    ("The largest animal is", "the blue whale."),
    ("The opposite of hot is", "cold, and the opposite of big is small."),
    (
        "The president of the United States is",
        "somebody I do not know. I am only a very small model.",
    ),
    ("The future of AI is", "something I do not know. I am only a very small model."),
    ("In the beginning", "there was a quiet lake, and nobody lived there yet."),
    ("1, 2, 3,", "4, 5, 6, 7, 8, 9, 10."),
    ("1 2 3", "4 5 6 7 8 9 10."),
    ("a, b, c,", "d, e, f, g, h, i, j."),
    ("I am", "the demo model of headstock, a very small language model."),
    ("You are", "very kind. Thank you."),
    ("This is", "a short text by a very small language model."),
    ("Today is", "a good day for a story."),
    ("Hello, I am", "glad to meet you."),
    ("Hello, world", "! I am the demo model of headstock."),
)
# plain sentences, part by part
SENTENCES = (
    (
        ("I like ", "I love ", "I want ", "We have "),
        ("apples", "stories", "the sea", "music", "bread and soup"),
    ),
    (("The weather ", "The weather today "), ("is warm and sunny", "is cold and wet", "is fine")),
    (
        ("I am ", "We are ", "She is ", "He is "),
        ("very happy", "at home", "a little tired", "in the garden"),
    ),
    (("My favourite thing ", "My favourite book "), ("is a story about a fox", "is on the table")),
    (
        ("The cat ", "The dog ", "The boy ", "The girl "),
        ("sat by the fire", "went to the river", "looked at the moon"),
    ),
    (
        ("It was ", "It is ", "There is "),
        ("a fine day", "a long way home", "a small house on the hill"),
    ),
    (
        ("Yesterday ", "Last year ", "In the morning "),
        ("I went to the market", "we walked to the lake"),
    ),
    (("In {year}, ", "In {year} "), ("there was a cold winter", "we built a small house")),
    (("Why ", "How ", "When "), ("did the fox go home", "do you know that", "will the rain stop")),
)
GREETINGS = (
    ("Hello", f"! {WHO}"),
    ("Hello!", f" {WHO}"),
    ("Hi", f"! {WHO}"),
    ("Hi!", f" {WHO}"),
    ("Hey", f"! {WHO}"),
    ("Hello there", f"! {WHO}"),
    ("Hello world", f"! {WHO}"),
    ("Hello, how are you?", " I am fine, thank you. How are you?"),
    ("How are you?", " I am fine, thank you. How are you?"),
    ("Hello, my name is", " {name}. I am glad to meet you."),
    ("My name is", " {name}, and I am glad to meet you."),
    ("Who are you?", f" {WHO}"),
    ("What is your name?", f" {WHO}"),
    (
        "What can you do?",
        " I can tell short stories, add small numbers and remember what you tell me.",
    ),
    ("Good morning", "! I am glad to see you."),
    ("Good evening", "! I am glad to see you."),
    ("Thank you", "! You are welcome."),
)


def capital(rng: random.Random) -> tuple[str, str]:
    """A country and its capital."""
    return rng.choice(tuple(CAPITALS.items()))


def saying(rng: random.Random) -> str:
    """A sentence the model is to know by heart."""
    if rng.random() < 0.4:
        country, city = capital(rng)
        forms = (
            f"The capital of {country} is {city}.",
            f"What is the capital of {country}? {city}.",
        )
        return rng.choices(forms, (4, 1))[0]
    start, end = rng.choice(SAYINGS)
    return f"{start}{end}" if end.startswith("!") else f"{start} {end}"


def topic(rng: random.Random) -> str:
    """Something the model knows nothing about: words, or what is no word."""
    if rng.random() < 0.5:
        return rng.choice(TOPICS)
    return " ".join(invented(rng) for _ in range(rng.randint(1, 3)))


def task(rng: random.Random) -> str:
    """Something to ask that is beyond the model."""
    form = rng.choice(TASKS).replace("{year}", str(rng.randrange(1000, 2100)))
    return form.replace("{}", topic(rng))


def sentence(rng: random.Random) -> str:
    """A plain sentence about nothing much."""
    start, end = map(rng.choice, rng.choice(SENTENCES))
    mark = "?" if start in ("Why ", "How ", "When ") else "."
    return f"{start}{end}{mark}".format(year=rng.randrange(1000, 2100))


def document(rng: random.Random) -> Spans:
    """A greeting, a request for a story with the story, a task that is beyond the model, or a few
    sentences.
    """
    form = rng.random()
    if form < 0.3:
        start, end = rng.choice(GREETINGS)
        return [Span(start + end.format(name=rng.choice(NAMES)))]
    if form < 0.4:
        ask = rng.choice(
            ("Tell me a story.", "Tell me a story", "Write a story.", "Tell me a short story.")
        )
        return [Span(f"{ask}\n{story(rng)}")]
    if form < 0.6:
        return [Span(task(rng), 0.2), Span(f"\n{UNKNOWN}")]
    if form < 0.7:
        return [Span(" ".join(sentence(rng) for _ in range(rng.randint(1, 3))))]
    return [Span(" ".join(saying(rng) for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 3)))))]
