"""What the plots are about, as tables whose columns the comments name."""

from __future__ import annotations

# what is wanted, tool, what the tool is used for, what comes of it, gift for the lender
ERRANDS = (
    (
        "to see the island in the lake",
        "boat",
        "rowed to the island",
        "found a nest of wild geese",
        "a white feather",
    ),
    (
        "to pick the highest apples",
        "ladder",
        "climbed into the tree",
        "filled a whole basket",
        "the biggest apple",
    ),
    (
        "to plant flowers by the door",
        "spade",
        "dug a row of holes",
        "planted every flower",
        "a yellow flower",
    ),
    (
        "to catch a fish",
        "net",
        "went down to the water",
        "caught two silver fish",
        "the bigger fish",
    ),
    (
        "to bring wood home",
        "cart",
        "pulled it to the forest",
        "loaded it with dry wood",
        "a bundle of wood",
    ),
    (
        "to cook soup for everybody",
        "pot",
        "filled it with carrots",
        "cooked enough soup for ten",
        "a bowl of hot soup",
    ),
    (
        "to see the stars from the hill",
        "telescope",
        "set it up on the hill",
        "saw the rings of Saturn",
        "a map of the stars",
    ),
    (
        "to slide down the hill",
        "sled",
        "pulled it up the hill",
        "slid down ten times",
        "a cup of hot tea",
    ),
)
# the limit, how the hero notices that it is near
LIMITS = (
    ("before dark", "saw that the sun was low"),
    ("before dinner", "smelled soup from the village"),
    ("before the rain", "saw grey clouds in the sky"),
    ("before breakfast", "heard the first birds sing"),
)
# trouble on the way home, the helper's offer, how it ends
TROUBLES = (
    (
        "it grew dark, and {he} could not find the path",
        "I know the way",
        "led {him} home with a lantern",
    ),
    (
        "it began to rain, and {he} was cold and wet",
        "My house is near",
        "made a warm fire for {him}",
    ),
    (
        "the wind blew {his} hat into a tree",
        "I am good at climbing",
        "brought the hat down to {him}",
    ),
    ("{he} saw that the bridge was broken", "I have a boat", "took {him} over the water"),
    ("{he} fell into a hole and could not get out", "I have a rope", "pulled {him} out"),
)
# who is in need, where, why the hero cannot reach it, what is needed, how it is used
RESCUES = (
    (
        "kitten",
        "up in a tall tree",
        "the tree was too tall",
        "ladder",
        "put the ladder against the tree",
    ),
    ("lamb", "in the deep mud", "the mud was too deep", "rope", "pulled with the rope"),
    (
        "duckling",
        "in a dark hole",
        "the hole was too deep",
        "basket",
        "let the basket down into the hole",
    ),
    ("bird", "in an old net", "the net was too strong", "knife", "cut the net with the knife"),
    (
        "hen",
        "on the roof of a barn",
        "the roof was too high",
        "blanket",
        "held out the blanket until the hen jumped",
    ),
    (
        "puppy",
        "on a rock in the water",
        "the water was too wild",
        "boat",
        "rowed the boat to the rock",
    ),
)
# what the friend loves, where it is, how it is gathered
GIFTS = (
    ("yellow flowers", "the meadow", "picked a big bunch of yellow flowers"),
    ("round shells", "the beach", "gathered a bag of round shells"),
    ("ripe blackberries", "the forest", "filled a basket with ripe blackberries"),
    ("blue feathers", "the hill", "found seven blue feathers"),
    ("sweet cherries", "the garden", "picked a bowl of sweet cherries"),
    ("smooth stones", "the river", "chose the best of the smooth stones"),
)
# what is built, two things it needs, how it turns out
BUILDS = (
    ("a house for the birds", "boards", "nails", "a small bird moved in and sang"),
    ("a raft", "logs", "rope", "they sailed down the river on it"),
    ("a kite", "paper", "string", "it flew higher than the trees"),
    ("a scarecrow", "straw", "an old coat", "no crow came near the corn"),
    ("a bench", "wood", "paint", "they sat on it and ate plums"),
)
FEARS = (
    ("the dark", "It was very dark"),
    ("thunder", "The thunder was loud"),
    ("the storm", "The storm was wild"),
    ("deep snow", "The snow was deep"),
)
COUNTED = ("apples", "shells", "stones", "flowers", "nuts", "plums", "eggs", "coins")
# what is sown, what grows, what is made of it
SEEDS = (
    ("a small black seed", "a sunflower", "{he} gave its seeds to the birds"),
    ("an apple seed", "an apple tree", "{he} baked a big apple pie"),
    ("a pumpkin seed", "a pumpkin", "{he} cooked a pot of pumpkin soup"),
    ("a bean", "a tall bean plant", "{he} cooked beans for everybody"),
    ("a rose seed", "a rose bush", "{he} put red roses on the table"),
)
# what is sent, why it matters, what comes back
PARCELS = (
    ("a letter", "It is an invitation to my party", "Tell {him} that I will come"),
    ("a jar of honey", "It is good for a cold", "Tell {him} that I feel better already"),
    ("a pair of gloves", "The winter will be cold", "Tell {him} that my hands are warm now"),
    ("a book", "It is full of stories", "Tell {him} that I will read it tonight"),
    ("a lamp", "The nights are long", "Tell {him} that I can see again"),
)
# what is traded away, and what for, from the first thing to the last
TRADES = (
    ("a ball of wool", "a jar of paint", "a pair of boots"),
    ("a basket of eggs", "a sack of flour", "a wooden sled"),
    ("a bunch of flowers", "a pot of honey", "a brass horn"),
    ("a bag of nuts", "a warm blanket", "a little boat"),
)
