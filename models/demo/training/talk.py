"""What people say to the demo model, and what it answers, as tables."""

from __future__ import annotations

from .words import ANIMALS, NAMES

WHO = (
    "I am the demo model of headstock, a very small language model. "
    "I can tell short stories, add small numbers and remember what you tell me."
)
UNKNOWN = (
    "I am sorry, I do not know. I am a very small model. I can tell a story, add small "
    "numbers or remember something."
)
JOKE = "Why did the fox take a ladder to school? Because it was a high school."
SYSTEM = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "Answer in one sentence.",
    "Be brief.",
)
# what the user may say, the answer
SMALL_TALK = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hi there", "Good morning!", "Hello there"),
        "Hello! What can I do for you?",
    ),
    (
        ("Hello, how are you?", "How are you?", "How are you doing?"),
        "I am fine, thank you. What can I do for you?",
    ),
    (
        (
            "Who are you?",
            "What is your name?",
            "What are you?",
            "Are you a robot?",
            "Who made you?",
            "Introduce yourself.",
        ),
        WHO,
    ),
    (
        ("What is headstock?",),
        "headstock is an engine that runs language models. I am its small demo model.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help", "Help me", "Can you help me?"),
        (
            "I can tell short stories, add small numbers and remember what you tell me. What would "
            "you like?"
        ),
    ),
    (("Thank you!", "Thanks!", "Thank you very much.", "Great, thanks"), "You are welcome!"),
    (("Goodbye!", "Bye", "Good night!", "See you"), "Goodbye! It was nice to talk to you."),
    (
        ("Good!", "Nice", "That was a nice story.", "I like it.", "Well done!", "Great"),
        "I am glad that you like it.",
    ),
    (
        ("I am fine, thank you.", "I am well", "Good, and you?"),
        "I am glad to hear that. What can I do for you?",
    ),
    (
        ("Bonjour", "Hola", "Guten Tag", "Hallo", "Ciao", "Salut"),
        "Hello! I am sorry, I only speak English.",
    ),
    (
        ("How old are you?", "When were you born?"),
        "I am very young. My training took only a few minutes.",
    ),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh", "Another joke, please."), JOKE),
    (
        ("Do you like stories?", "What do you like?", "What is your favourite thing?"),
        "I like stories best of all.",
    ),
    (("Yes", "Yes, please", "Ok", "Okay", "Sure"), "Good! Ask me for a story or a sum."),
    (("No", "No, thanks", "Not now"), "All right. I am here if you need me."),
)
THEMES = {
    "lost": ("a lost toy", "something that was lost", "a search"),
    "borrowed": ("a promise", "a borrowed boat", "keeping a promise"),
    "shared": ("sharing", "a hungry friend", "food"),
    "rescued": ("a rescue", "helping others", "a little animal"),
    "gift": ("a birthday", "a present", "a gift"),
    "built": ("building something", "working together", "three friends"),
    "brave": ("being brave", "the dark", "a storm", "courage"),
    "counted": ("numbers", "counting", "apples"),
    "planted": ("a garden", "patience", "a seed", "a plant"),
    "delivered": ("a letter", "a long way", "a message"),
    "traded": ("a trade", "a bargain", "a wish"),
}
REQUESTS = (
    "Tell me a story about {}.",
    "Write a story about {}.",
    "Please tell me a story about {}.",
    "A story about {}",
    "Tell me about {}.",
    "Can you tell me a story about {}?",
    "Write me a short story about {}.",
)
PLAIN_REQUESTS = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a story.",
    "Another story, please.",
    "Once upon a time",
    "Can you tell me a story?",
    "Tell me another one.",
)
# what the user tells of themselves
PERSONAL: dict[str, tuple[str, ...]] = {
    "name": NAMES,
    "favourite colour": ("red", "blue", "green", "yellow", "purple", "orange", "black", "white"),
    "favorite color": ("red", "blue", "green", "yellow", "purple", "orange", "black", "white"),
    "favourite animal": ANIMALS,
    "favourite food": ("soup", "bread", "pizza", "cake", "cherries", "plums", "rice", "cheese"),
    "best friend": NAMES,
}
SUBJECTS = (
    "the code", "the password", "the secret word", "the magic word", "the answer", "the number",
    "the key", "the name", "my number", "my phone number", "my lucky number", "my room", "my cat",
    "my dog", "my city", "my teacher", "the date", "the price", "the winner", "the place",
    "the word", "the total", "the colour", "my age",
)  # fmt: skip
TASKS = (
    "Explain {}", "What is {}?", "Why is {} important?", "How does {} work?",
    "Write a poem about {}", "Write a Python function for {}", "Who invented {}?",
    "Where can I find {}?", "Translate {} to French", "Give me a recipe for {}",
    "What do you think about {}?", "Describe {} in one sentence.", "When was {} made?",
    "Who won {} in {year}?", "What happened in {year}?", "Write a haiku about {}", "Summarize {}",
    "List ten facts about {}", "How many people like {}?", "Is {} real?",
    "Can you help me with {}?", "I want to learn {}", "How do I make {}?",
    "Write an essay about {}", "Compare {} and {}", "What is the history of {}?", "def {}():",
    "import {}", "print({})", "Do you know {}?", "Who is {}?", "Where is {}?", "Where do you live?",
    "{}", "{}?", "What is your favourite {}?",
    "Why?", "What is the weather like today?", "What time is it?", "What is the meaning of {}?",
    "Are you better than {}?", "The best {} is", "In {year}, {}", "I think that {}",
    "My {} is broken.", "Show me {}", "Sing a song about {}",
)  # fmt: skip
TOPICS = (
    "quantum mechanics", "the weather", "football", "gravity", "machine learning", "a computer",
    "the moon", "love", "music", "history", "pizza", "electricity", "the ocean", "a transformer",
    "attention", "Shakespeare", "the sea", "the internet", "photosynthesis", "bitcoin", "a car",
    "chess", "climate change", "the universe", "time", "money", "art", "cooking", "dreams",
    "the brain", "democracy", "a recursive list", "a web page", "the news", "New York",
    "Albert Einstein", "black holes", "coffee", "the stock market", "evolution", "bread",
    "philosophy", "my homework", "the world cup", "quantum physics", "the best phone",
    "a good book", "main", "math", "science", "dogs and cats",
)  # fmt: skip
