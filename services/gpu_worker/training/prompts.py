"""Prompts that a model writes its training text for: built in, or a user's.

The built-in ones are subjects put into tasks, drawn from a seed: what people ask an assistant, and texts to go on with.
"""

from __future__ import annotations

import json
import random
from typing import Any

Prompt = str | list[dict[str, Any]]  # to be continued, or messages to be answered

SUBJECTS = (
    "the water cycle", "photosynthesis", "the French Revolution", "black holes", "baking bread", "learning a language",
    "renewable energy", "the human heart", "jazz music", "chess openings", "sleep", "bees", "volcanoes", "inflation",
    "the Roman Empire", "healthy breakfasts", "running a marathon", "climate change", "artificial intelligence",
    "public transport", "gardening on a balcony", "the history of writing", "space travel", "vaccines", "coffee",
    "a small village by the sea", "an old lighthouse keeper", "a lost dog", "two friends who start a company",
    "time management", "job interviews", "saving money", "the stock market", "electric cars", "the moon landing",
    "ancient Egypt", "the solar system", "gravity", "DNA", "evolution", "the immune system", "whales", "rainforests",
    "earthquakes", "democracy", "the printing press", "the internet", "computer viruses", "passwords", "recycling",
    "painting with watercolors", "playing the guitar", "meditation", "yoga", "friendship", "honesty", "moving abroad",
    "a trip to Japan", "a weekend in Paris", "camping in the mountains", "a birthday party", "a school library",
    "working from home", "reading books", "social media", "video games", "football", "swimming", "cooking pasta",
    "vegetarian food", "dogs and cats", "horses", "migrating birds", "snow", "deserts", "rivers", "bridges", "trains",
    "clocks", "mirrors", "glass", "steel", "plastic", "paper", "salt", "sugar", "chocolate", "tea", "wine", "cheese",
    "mathematics", "probability", "prime numbers", "triangles", "sorting a list", "a linked list", "a binary search",
    "a bank account", "a shopping cart", "a to-do list", "a weather station", "a text file", "dates and times",
    "a new neighbour", "a broken washing machine", "an interview with a singer", "a farm", "a castle",
    "a young inventor", "a dragon who is afraid of fire", "a robot that learns to dance", "a detective and a cat",
    "a shy ghost", "a circus", "a long winter", "a grandmother and her garden", "the last day of school",
    "a ship in a storm", "a treasure map", "choosing a laptop", "choosing a school", "renting a flat",
    "a used camera", "a first car", "a family budget", "healthy snacks", "losing weight", "back pain",
    "stress at work", "getting up early", "public speaking", "negotiating", "writing a CV", "learning to draw",
    "learning to swim", "raising children", "teaching a puppy", "house plants", "wind", "thunder", "the seasons",
    "the moon", "stars", "comets", "magnets", "electricity", "light", "sound", "atoms", "bacteria", "teeth",
    "the brain", "memory", "dreams", "dinosaurs", "sharks", "butterflies", "ants", "owls", "elephants",
    "bread and butter", "soup", "pizza", "apples", "breakfast for two", "a picnic", "a wedding", "a farewell party",
    "the Renaissance", "the Silk Road", "the Vikings", "the industrial revolution", "Marie Curie",
    "Leonardo da Vinci", "Shakespeare", "Mozart", "money", "taxes", "insurance", "marketing", "teamwork",
    "leadership", "a small bakery", "an online shop", "customer service", "a product launch", "privacy",
    "open source software", "databases", "spreadsheets", "a web page", "recursion", "strings in Python",
    "a random number", "fractions", "percentages", "areas and volumes",
)  # fmt: skip
QUESTIONS = (
    "Explain {} to a child.", "Explain {} in simple terms.", "What is important to know about {}?",
    "Write a short story about {}.", "Write a poem about {}.", "Give me five tips about {}.",
    "List ten facts about {}.", "What are the advantages and disadvantages of {}?", "Write an essay about {}.",
    "Summarize what is known about {} in three sentences.", "Write an email to a colleague about {}.",
    "Write a dialogue between two people who talk about {}.", "Create a quiz with five questions about {}.",
    "Write a Python function that has to do with {}, and explain it.", "Make a table about {}.",
    "How would you begin to learn about {}?", "Write a blog post with headings about {}.",
    "Describe {} as a JSON object with several fields.", "Why do people care about {}?",
    "What are common mistakes and misunderstandings about {}?", "Write a step-by-step guide on {}.",
    "Compare {} with {other}.", "What does {} have in common with {other}?", "Write a speech about {}.",
    "Write a product description that has to do with {}.", "Invent three riddles about {}.",
    "Tell me about {}.", "Tell me a joke about {}.", "Tell me a story about {} and {other}.", "What is {}?",
    "What should I know before I deal with {}?", "What should I pay attention to with {}?", "How does {} work?",
    "Can you help me with {}?", "I have a question about {}. Where should I start?", "Why is {} important?",
    "Write a letter to a newspaper about {}.", "Write a letter to my aunt and tell her about {}.",
    "Write a message to my boss about {}.", "Write a short review of a book about {}.", "Write a diary entry about {}.",
    "Write a scene of a film about {}.", "Write a conversation between a teacher and a student about {}.",
    "Explain the difference between {} and {other}.", "Explain how {} changes over time.",
    "Explain {} in one paragraph.", "Give me an example of {} in everyday life.", "Plan a day around {}.",
    "Make a checklist for {}.", "Outline a talk on {}.", "What do beginners get wrong about {}?",
    "Is {} better than {other}? Explain your choice.", "What questions should I ask an expert on {}?",
)  # fmt: skip
BEGINNINGS = (
    "# {}\n\n", "An introduction to {}\n\n", "When we think of {}, ",
    "It was a cold morning, and everybody talked about {}. ",
    "Q: What is special about {}?\nA:", "The following list shows what matters about {}:\n1.",
    'def main():\n    """An example about {}."""\n',
)  # fmt: skip
SYSTEM = ("", "", "You are a helpful assistant.", "Answer briefly.", "You are a patient teacher.")
CHATS = 0.9  # share of prompts with messages


def built_in(count: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [_drawn(rng) for _ in range(count)]


def _drawn(rng: random.Random) -> Prompt:
    subject, other = rng.sample(SUBJECTS, 2)
    if rng.random() >= CHATS:
        return rng.choice(BEGINNINGS).format(subject)
    messages = [{"role": "user", "content": rng.choice(QUESTIONS).format(subject, other=other)}]
    system = rng.choice(SYSTEM)
    return [{"role": "system", "content": system}, *messages] if system else messages


def parse(text: str) -> list[Prompt]:
    """A prompt a line: of JSON an object with `messages` or `prompt`; else the line is a user's message. ValueError
    names the line."""
    found: list[Prompt] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("{"):
            found.append(_of_json(line, number))
        elif line.strip():
            found.append([{"role": "user", "content": line.strip()}])
    if not found:
        raise ValueError("there is no prompt in it")
    return found


def _of_json(line: str, number: int) -> Prompt:
    try:
        values = json.loads(line)
    except ValueError as e:
        raise ValueError(f"line {number}: {e}") from e
    prompt, messages = values.get("prompt"), values.get("messages")
    if isinstance(prompt, str) and prompt:
        return prompt
    if (
        isinstance(messages, list) and messages
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
                for m in messages)
    ):  # fmt: skip
        return messages
    raise ValueError(f"line {number}: neither a prompt (text) nor messages (a list with role and content)")
