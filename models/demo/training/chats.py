"""Short chats in the chat template: greetings, stories on request, sums, things to remember, polite
refusals.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from . import recall, sums
from .facts import capital, task
from .spans import TURN_END, TURN_START, Span, Spans, answer, casual, joined, noise
from .stories import story
from .talk import PERSONAL, PLAIN_REQUESTS, REQUESTS, SMALL_TALK, SUBJECTS, SYSTEM, THEMES, UNKNOWN
from .words import NAMES, NOUNS, THINGS, a, any_kind, any_name, invented

Turn = tuple[Spans, Spans]
Turns = Callable[[random.Random], Turn]

ASKED_WEIGHT = 0.2  # what the user says is little worth learning


def say(text: str) -> Spans:
    """Text of the assistant, at full weight."""
    return [Span(text)]


def ask(rng: random.Random, text: str) -> Spans:
    """Text of the user, as typed."""
    return [Span(casual(rng, text), ASKED_WEIGHT)]


def small_talk(rng: random.Random) -> Turn:
    questions, reply = rng.choice(SMALL_TALK)
    return ask(rng, rng.choice(questions)), say(reply)


def told(rng: random.Random) -> Turn:
    """A story about anything, or about what was asked for."""
    if rng.random() < 0.3:
        return ask(rng, rng.choice(PLAIN_REQUESTS)), say(story(rng))
    subject, tale = rng.choice(ABOUT)(rng)
    return ask(rng, rng.choice(REQUESTS).format(subject)), say(tale)


def about_kind(rng: random.Random) -> tuple[str, str]:
    kind = any_kind(rng)
    return a(rng.choice(("", "", "little ", "brave ")) + kind), story(rng, kind=kind)


def about_two(rng: random.Random) -> tuple[str, str]:
    kind, friend = any_kind(rng), any_kind(rng)
    return f"{a(kind)} and {a(friend)}", story(rng, kind=kind, friend=friend)


def about_theme(rng: random.Random) -> tuple[str, str]:
    plot = rng.choice(tuple(THEMES))
    return rng.choice(THEMES[plot]), story(rng, plot=plot)


def about_thing(rng: random.Random) -> tuple[str, str]:
    thing = rng.choice(THINGS + NOUNS)
    return a(thing), story(rng, thing=thing)


def about_name(rng: random.Random) -> tuple[str, str]:
    name = any_name(rng)
    return name, story(rng, name=name)


def about_named(rng: random.Random) -> tuple[str, str]:
    kind, name = any_kind(rng), any_name(rng)
    return f"{a(kind)} named {name}", story(rng, kind=kind, name=name)


ABOUT = (
    about_kind,
    about_kind,
    about_two,
    about_theme,
    about_theme,
    about_thing,
    about_name,
    about_named,
)


def added(rng: random.Random) -> Turn:
    sum_ = sums.draw(rng)
    return ask(rng, sums.question(rng, sum_)), [answer(sum_.result)]


def known(rng: random.Random) -> Turn:
    country, city = capital(rng)
    if rng.random() < 0.1:
        country = invented(rng).capitalize()
        return ask(rng, f"What is the capital of {country}?"), say(
            f"I do not know the capital of {country}."
        )
    forms = (
        f"What is the capital of {country}?",
        f"What is {country}'s capital?",
        f"The capital of {country} is",
    )
    return ask(rng, rng.choice(forms)), say(f"The capital of {country} is {city}.")


def unknown(rng: random.Random) -> Turn:
    return ask(rng, task(rng)), say(UNKNOWN)


ORDINARY: tuple[Turns, ...] = (small_talk, told, added, known, unknown)


def ordinary(rng: random.Random, tell: float = 3) -> Turn:
    """A turn that needs nothing said before; stories come `tell` parts in 17."""
    return rng.choices(ORDINARY, (3, tell, 6, 2, 3))[0](rng)


def chatter(rng: random.Random, chars: int) -> Iterator[Turn]:
    """Ordinary turns, about `chars` characters in all."""
    while chars > 0:
        asked, replied = ordinary(rng)
        chars -= len(joined(asked)) + len(joined(replied)) + 40
        yield asked, replied


def personal(rng: random.Random) -> list[Turn]:
    """Something the user tells of themselves, and asks for later; or asks for and never told."""
    what, values = rng.choice(tuple(PERSONAL.items()))
    question = ask(rng, f"What is my {what}?")
    if rng.random() < 0.3:
        return [(question, say(f"You have not told me your {what} yet."))]
    value = any_name(rng) if values is NAMES else rng.choice((*values, invented(rng)))
    tell = [
        Span(f"My {what} is ", ASKED_WEIGHT),
        noise(value),
        Span(rng.choice((".", ".", "")), ASKED_WEIGHT),
    ]
    reply = say(f"I will remember that your {what} is {value}.")
    if what == "name":
        start = rng.choice(("My name is ", "Hello, my name is ", "Hi! I am ", "I am "))
        tell, reply = (
            [Span(start, ASKED_WEIGHT), noise(value), *tell[2:]],
            say(f"Nice to meet you, {value}!"),
        )
    between = chatter(rng, rng.choice((0, 0, 200, 600)))
    return [(tell, reply), *between, (question, say(f"Your {what} is {value}."))]


def remembered(rng: random.Random) -> list[Turn]:
    """One to three numbers to remember, other turns, and the questions."""
    facts = recall.facts(rng, rng.choice((1, 1, 2, 3)))
    turns: list[Turn] = []
    for fact in facts:
        reply = [Span(f"I will remember that {fact.subject} is "), answer(fact.number), Span(".")]
        turns.append((recall.reminder(fact), reply))
    turns += chatter(rng, rng.choice((0, rng.randrange(500), rng.randrange(4000))))
    for fact in rng.sample(facts, len(facts)):
        turns.append((ask(rng, f"What is {fact.subject}?"), [answer(fact.number)]))
    return turns


def noted(rng: random.Random) -> list[Turn]:
    """One or two words or numbers of any kind to remember."""
    turns, questions = [], []
    for subject in rng.sample(SUBJECTS, rng.choice((1, 1, 2))):
        value = rng.choice(
            (any_name(rng), invented(rng), str(rng.randrange(10 ** rng.randint(1, 6))))
        )
        yours = subject.replace("my ", "your ")
        start = rng.choice(
            ("Remember: ", "Remember that ", "Please remember that ", "Remember this: ", "")
        )
        tell = f"{start}{subject} is " if start else f"{subject[0].upper()}{subject[1:]} is "
        reply = [Span(f"I will remember that {yours} is "), answer(value), Span(".")]
        turns.append(([Span(tell, ASKED_WEIGHT), noise(value), Span(".", ASKED_WEIGHT)], reply))
        recalled = [Span(f"{yours[0].upper()}{yours[1:]} is "), answer(value), Span(".")]
        questions.append(
            (ask(rng, rng.choice(("What is {}?", "What was {}?")).format(subject)), recalled)
        )
    rng.shuffle(questions)
    return [*turns, *chatter(rng, rng.choice((0, 100, 500, 1500))), *questions]


def secret(rng: random.Random) -> list[Turn]:
    """A bare number to remember."""
    number = rng.randrange(10 ** rng.randint(1, 5))
    start = rng.choice(("Remember the number ", "Please remember the number ", "Remember "))
    tell = [
        Span(start, ASKED_WEIGHT),
        noise(number),
        Span(rng.choice((".", ".", "")), ASKED_WEIGHT),
    ]
    reply = [Span("I will remember the number "), answer(number), Span(".")]
    question = rng.choice(
        ("What was the number?", "Which number did I tell you?", "What is the number?")
    )
    recalled = [Span("The number is "), answer(number), Span(".")]
    return [
        (tell, reply),
        *chatter(rng, rng.choice((0, 100, 500, 1500))),
        (ask(rng, question), recalled),
    ]


def conversation(rng: random.Random) -> list[Turn]:
    """The turns of one chat."""
    form = rng.random()
    if form < 0.45:
        return [ordinary(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 5)))]
    return rng.choices((personal, remembered, noted, secret), (2, 3, 2, 1))[0](rng)


def document(rng: random.Random) -> Spans:
    """A chat as the chat template renders it."""
    spans: Spans = []
    if rng.random() < 0.2:
        spans.append(Span(f"{TURN_START}system\n{rng.choice(SYSTEM)}{TURN_END}\n", ASKED_WEIGHT))
    for asked, replied in conversation(rng):
        spans += [Span(f"{TURN_START}user\n"), *asked, Span(f"{TURN_END}\n{TURN_START}assistant\n")]
        spans += [*replied, Span(f"{TURN_END}\n")]
    return spans
