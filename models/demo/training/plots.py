"""What happens in the stories: each plot yields the sentences after the opening, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from . import props
from .sums import Sum
from .words import PLACES, SPOTS, THINGS, TREATS, at, the

if TYPE_CHECKING:
    from .stories import Scene

Plot = Callable[["Scene"], Iterator[str]]


def lost(scene: Scene) -> Iterator[str]:
    """Something is lost; the friend knows who may have seen it; the helper has."""
    hero, friend, helper = scene.hero, scene.friend, scene.helper
    he, thing, place = (
        hero.he,
        scene.thing or scene.pick("thing", THINGS),
        scene.pick("place", PLACES),
    )
    spot, treat = scene.pick(f"spot {place}", SPOTS[place]), scene.pick("treat", TREATS)
    yield scene.say(
        "has",
        f"{he.capitalize()} had a {thing} and took it everywhere.",
        f"{hero.name} loved a {thing}.",
    )
    yield scene.say(
        "loss",
        f"One day, {he} played {at(place)}, and when {he} came home, the {thing} was gone.",
        f"One evening, {he} came home from {place} and could not find the {thing}.",
    )
    yield f'"Where is my {thing}?" cried {hero.name}.'
    yield scene.say(
        "ask",
        f"{he.capitalize()} ran to {friend.full}.",
        f"{he.capitalize()} asked {friend.full} for help.",
    )
    yield (
        f'"I have not seen your {thing}," said {friend.name}, "but {helper.full} was '
        f'{at(place)} today."'
    )
    yield (
        f'So {hero.name} went to {helper.name}. "I saw your {thing} {at(place)}, {spot}," said '
        f"{helper.name}."
    )
    yield f"They went to {place} together, and there it was, {spot}."
    yield f'"Thank you, {helper.name}!" said {hero.name}, and {he} gave {helper.him} {treat}.'
    yield scene.say(
        "end",
        f"That night, the {thing} lay beside {hero.his} bed, and {hero.name} slept well.",
        f"From that day on, {hero.name} took good care of the {thing}.",
    )


def borrowed(scene: Scene) -> Iterator[str]:
    """A tool is lent on a promise, and the promise is kept."""
    hero, friend, he = scene.hero, scene.friend, scene.hero.he
    wish, tool, use, result, present = scene.pick("errand", props.ERRANDS)
    limit, sign = scene.pick("limit", props.LIMITS)
    yield f"One day, {hero.name} wanted {wish}, but {he} had no {tool}."
    yield scene.say(
        "goes",
        f"So {he} went to {friend.full}.",
        f"{he.capitalize()} knew that {friend.full} had one.",
    )
    yield (
        f'"May I borrow your {tool}?" asked {hero.name}. "Yes," said {friend.name}, "but bring '
        f'it back {limit}."'
    )
    yield scene.say("vow", f'"I promise," said {hero.name}.', f'"I will," said {hero.name}.')
    yield f"{hero.name} took the {tool}, {use} and {result}."
    yield f"Then {he} {sign}. {he.capitalize()} remembered the promise and hurried back."
    yield f'"Here is your {tool}, and here is {present} for you," said {hero.name}.'
    yield f'"You came back {limit}, as you said," said {friend.name}.'
    yield scene.say(
        "end",
        f'"You may borrow my {tool} whenever you like."',
        f'"Next time, let us take the {tool} and go together."',
    )


def shared(scene: Scene) -> Iterator[str]:
    """The hero shares food, and is helped in turn."""
    hero, helper, he = scene.hero, scene.helper, scene.hero.he
    treat, place = scene.pick("treat", TREATS), scene.pick("place", PLACES)
    trouble, offer, deed = (
        part.format(he=he, him=hero.him, his=hero.his)
        for part in scene.pick("need", props.TROUBLES)
    )
    yield scene.say(
        "walk",
        f"One morning, {hero.name} walked to {place} with {treat} in {hero.his} bag.",
        f"One day, {he} packed {treat} and went to {place}.",
    )
    yield f"On the way, {he} met {helper.full}, who looked sad."
    yield (
        f'"What is wrong?" asked {hero.name}. "I am hungry, and I have nothing to eat," said '
        f"{helper.name}."
    )
    yield f"So {hero.name} took {the(treat)} out of the bag and gave {helper.him} half of it."
    yield scene.say("eat", "They sat on a stone and ate together.", "It tasted better than ever.")
    yield f"On the way home, {trouble}."
    yield (
        f'Then {helper.name} came by. "{offer}," said {helper.name}. "You helped me, and now I '
        'will help you."'
    )
    yield f"And {helper.name} {deed}."
    yield scene.say(
        "end",
        f"{hero.name} and {helper.name} have been friends ever since.",
        (
            f'"Thank you, {helper.name}," said {hero.name}. "Tomorrow I will bring {treat} for '
            'each of us."'
        ),
    )


def rescued(scene: Scene) -> Iterator[str]:
    """A small animal is in need, and a friend's tool saves it."""
    hero, friend, he = scene.hero, scene.friend, scene.hero.he
    animal, where, reason, tool, use = scene.pick("rescue", props.RESCUES)
    yield scene.say(
        "hear", f"One day, {he} heard a small voice.", f"One morning, {he} heard somebody cry."
    )
    yield f'"Help me!" cried a little {animal}. It sat {where}.'
    yield f"{hero.name} wanted to help, but {reason}."
    yield f'"Do not be afraid. I will come back," said {hero.name}, and {he} ran to {friend.full}.'
    yield (
        f'"{friend.name}, do you have a {tool}? A little {animal} sits {where}!" "I do," said '
        f"{friend.name}."
    )
    yield (
        f"They ran back with the {tool}. {hero.name} and {friend.name} {use}, and soon the "
        f"{animal} was safe."
    )
    yield scene.say(
        "thanks",
        f'"Thank you both," said the {animal}.',
        f"The {animal} was so happy that it danced.",
    )
    yield scene.say(
        "end",
        f"Every morning after that, the {animal} came to say hello to {hero.name}.",
        f"{friend.name} gave {hero.name} the {tool}, in case somebody needed help again.",
    )


def gift(scene: Scene) -> Iterator[str]:
    """The helper knows what the friend would like for a birthday."""
    hero, friend, helper = scene.hero, scene.friend, scene.helper
    loved, place, gather = scene.pick("gift", props.GIFTS)
    yield (
        f"{hero.his.capitalize()} best friend was {friend.full}, and tomorrow was "
        f"{friend.name}'s birthday."
    )
    yield scene.say(
        "think", f"{hero.name} did not know what to give.", f"But {hero.name} had no present yet."
    )
    yield f'{hero.he.capitalize()} asked {helper.full}, "What does {friend.name} like?"'
    yield f'"{friend.name} loves {loved}," said {helper.name}. "You can find them {at(place)}."'
    yield f"So {hero.name} went to {place} and {gather}."
    yield f"The next day, {hero.he} gave them to {friend.name}."
    yield (
        f'"Oh, {loved}! How did you know?" asked {friend.name}. "{helper.name} told me," said '
        f"{hero.name}."
    )
    yield scene.say(
        "end",
        f"Then {hero.name}, {friend.name} and {helper.name} ate cake until the stars came out.",
        f"{friend.name} said that it was the best birthday of all.",
    )


def built(scene: Scene) -> Iterator[str]:
    """Two friends give what is missing, and all three enjoy what is built."""
    hero, friend, helper, he = scene.hero, scene.friend, scene.helper, scene.hero.he
    work, first, second, result = scene.pick("build", props.BUILDS)
    bare = second.removeprefix("an ")
    yield f"One day, {hero.name} wanted to build {work}."
    yield f"{he.capitalize()} needed {first} and {second}, but {he} had neither."
    yield f'First, {he} went to {friend.full}. "Do you have {first}?" asked {hero.name}.'
    yield f'"Yes, take what you need," said {friend.name}, "but I have no {bare}."'
    yield (
        f'Then {he} went to {helper.full}. "{friend.name} gave me {first}. Do you have '
        f'{second}?" asked {hero.name}.'
    )
    yield scene.say(
        "gives",
        f'"Of course," said {helper.name}.',
        f'"I do, and I will help you," said {helper.name}.',
    )
    yield f"With {friend.name}'s {first} and {helper.name}'s {bare}, they built {work}."
    yield f"The next morning, {result}."
    yield scene.say(
        "end", f'"We made it together," said {hero.name}.', f"{hero.name} was very proud of it."
    )


def brave(scene: Scene) -> Iterator[str]:
    """The hero goes out in spite of a fear, because somebody needs help."""
    hero, friend, helper, he = scene.hero, scene.friend, scene.helper, scene.hero.he
    fear, setting = scene.pick("fear", props.FEARS)
    place = scene.pick("place", PLACES)
    spot = scene.pick(f"spot {place}", SPOTS[place])
    yield f"{hero.name} was afraid of {fear}."
    yield f"One night, {friend.full} knocked at the door."
    yield f'"{helper.full} went to {place} and has not come home," said {friend.name}.'
    yield f"{setting}, and {hero.name} was afraid, but {he} took a lantern and went to {place}."
    yield scene.say(
        "call",
        f'"{helper.name}! Where are you?" called {hero.name}.',
        f"{he.capitalize()} looked everywhere.",
    )
    yield f'At last, {he} found {helper.name} {spot}. "I hurt my foot," said {helper.name}.'
    yield f"{hero.name} helped {helper.him} up, and slowly they walked home."
    yield f'"Were you not afraid of {fear}?" asked {friend.name}.'
    yield scene.say(
        "end",
        f'"I was," said {hero.name}, "but {helper.name} needed me."',
        f'"Yes," said {hero.name}, "but now I am not afraid any more."',
    )


def counted(scene: Scene) -> Iterator[str]:
    """A few things are found, some more are given, some are given away, and the numbers agree."""
    hero, friend, helper, he = scene.hero, scene.friend, scene.helper, scene.hero.he
    thing, place = scene.pick("counted", props.COUNTED), scene.pick("place", PLACES)
    found, more = scene.pick(
        "found",
        [(a, b) for a in range(2, 10) for b in range(2, 10) if not Sum(a, "+", b).is_held_out],
    )
    total = found + more
    away = scene.pick(
        "away", [away for away in range(2, total - 1) if not Sum(total, "-", away).is_held_out]
    )
    left = total - away
    yield f"One day, {he} found {found} {thing} {at(place)}."
    yield f"On the way home, {he} met {friend.full}."
    yield (
        f'"I have {more} {thing}, but I do not need them," said {friend.name}. "You may have them."'
    )
    yield f"So {hero.name} had {total} {thing}, because {found} + {more} = {total}."
    yield f'Then {helper.full} came by. "I would like some {thing} too," said {helper.name}.'
    yield (
        f"{hero.name} gave {helper.him} {away} of them and kept {left}, because {total} - "
        f"{away} = {left}."
    )
    yield scene.say(
        "end",
        f'"Thank you, {hero.name}," said {helper.name}, and all three went home happy.',
        f"{hero.name} put the {thing} that were left on the table and smiled.",
    )


def planted(scene: Scene) -> Iterator[str]:
    """The helper's seed needs patience; the friend doubts it and is asked to the table."""
    hero, friend, helper, he = scene.hero, scene.friend, scene.helper, scene.hero.he
    seed, plant, use = scene.pick("seed", props.SEEDS)
    yield f"One spring day, {helper.full} gave {hero.name} {seed}."
    yield f'"Put it in the ground and be patient," said {helper.name}.'
    yield f"{hero.name} put {the(seed)} behind the house and watered it every day."
    yield f'"Nothing will ever grow there," said {friend.full}.'
    yield scene.say(
        "wait", f"But {hero.name} did not give up.", f"But {hero.name} went on and waited."
    )
    yield f"In the summer, {the(seed)} had become {plant}, and {use.format(he=he)}."
    yield (
        f'"I was wrong," said {friend.name}. "{helper.name} was right," said {hero.name}. "I '
        'only had to be patient."'
    )
    yield scene.say(
        "end",
        f"And the next spring, {friend.name} put {seed} in the ground too.",
        f"{hero.name}, {friend.name} and {helper.name} sat in the sun until the evening.",
    )


def delivered(scene: Scene) -> Iterator[str]:
    """The friend sends something through the hero, and the helper sends an answer back."""
    hero, friend, helper, he = scene.hero, scene.friend, scene.helper, scene.hero.he
    parcel, reason, reply = scene.pick("parcel", props.PARCELS)
    place = scene.pick("place", PLACES)
    yield (
        f'One morning, {friend.full} gave {hero.name} {parcel}. "Please take it to '
        f'{helper.full} {at(place)}."'
    )
    yield f'"{reason}," said {friend.name}. So {hero.name} set out for {place}.'
    yield scene.say(
        "way",
        f"The way was long, and it rained, but {he} kept {the(parcel)} dry under {hero.his} coat.",
        f"The wind was strong, but {he} held {the(parcel)} with both hands.",
    )
    yield f'"{helper.name}, I have {parcel} for you," said {hero.name}. "It is from {friend.name}."'
    yield f'"How kind!" said {helper.name}. "{reply.format(him=friend.him)}."'
    yield f"{hero.name} went back and told {friend.name} what {helper.name} had said."
    yield scene.say(
        "end",
        f'"Thank you, {hero.name}," said {friend.name}. "What would I do without you?"',
        f"{friend.name} smiled and gave {hero.name} {scene.pick('treat', TREATS)}.",
    )


def traded(scene: Scene) -> Iterator[str]:
    """One thing is traded for another, and that for a third, which is shared."""
    hero, friend, helper, he = scene.hero, scene.friend, scene.helper, scene.hero.he
    first, second, third = scene.pick("trade", props.TRADES)
    yield f"{he.capitalize()} wished for {third}, but {he} had only {first}."
    yield (
        f'One day, {he} met {friend.full}. "I need {first}," said {friend.name}. "I will give '
        f'you {second} for it."'
    )
    yield f"So {hero.name} gave {the(first)} to {friend.name} and went on with {the(second)}."
    yield (
        f'Then {he} met {helper.full}, who had {third}. "Would you like {second}?" asked '
        f"{hero.name}."
    )
    yield f'"Yes! I have looked for {second} all week," said {helper.name}, and they traded.'
    yield (
        f"Now {friend.name} had {the(first)}, {helper.name} had {the(second)}, and {hero.name} "
        f"had {the(third)}."
    )
    yield scene.say("end", "Everybody was happy.", f'"What a good day," said {hero.name}.')


FRIENDLESS = ("shared",)  # plots without the friend
PLOTS: dict[str, Plot] = {
    plot.__name__: plot
    for plot in (
        lost,
        borrowed,
        shared,
        rescued,
        gift,
        built,
        brave,
        counted,
        planted,
        delivered,
        traded,
    )
}
