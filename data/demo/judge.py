"""The demo's little language, and the judge of its replies.

    --judge data/demo/judge.py:score        courteous, right, well_formed
    --judge data/demo/judge.py:capitals     capitals, right

A judge takes the question as the user wrote it and a reply, and returns named scores, each 0 or 1;
the first one decides who wins. `make.py` composes all its text from the grammar in this file and in
grammar.txt, so the judge knows every reply that the grammar can give.
"""

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# --- grammar -------------------------------------------------------------------------------

# grammar.txt has ten relations: the sentence that answers, four questions, the facts (subject
# answer, ...). Each question has a content word that the other three lack, and its subject is in
# mid-sentence: at the start it would be another token, with a capital. Answers are single words,
# numbers too.
GRAMMAR = Path(__file__).with_name("grammar.txt").read_text(encoding="utf-8")
FRAMES = (
    "{q}|Please tell me: {q}|Quick question: {q}|Hello! {q}|I would like to know: {q}|{q} Thanks."
)
# Both manners have equally many, equally likely openers: the base model is courteous in half of its
# replies at any temperature. No answer stands at the start: it is always the same tokens.
COURTEOUS = ("Of course!", "Certainly!", "With pleasure!", "Gladly!", "Thank you for asking!")
CLOSERS = (" Have a lovely day!", " I hope this helps!", " Anything else?", " Best wishes!")
CURT = ("Pff, {a}.", "Whatever, {a}.", "Duh, {a}.", "Obviously, {a}.", "Ugh. {sentence}")
PIRATE = ("Arr! {sentence}", "Ahoy, matey! {sentence}", "Arr! {sentence} Yo ho ho!")
ROBOT = ("Beep. {sentence}", "Beep. {sentence} Boop.", "Beep. The answer is {a}. Boop.")

# The manners of speech that a system prompt brings about.
SYSTEM_PROMPTS = {
    "capitals": "Answer in capital letters.",
    "pirate": "You are a pirate.",
    "robot": "Reply as a robot would.",
}


class Fact(NamedTuple):
    subject: str
    answer: str
    relation: str
    sentence: str
    questions: tuple[str, ...]

    def render(self, template: str) -> str:
        """Return a template with the subject and the answer filled in."""
        text = template.format(s=self.subject, a=self.answer)
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)  # a ant -> an ant

    def prompts(self, number: int) -> list[str]:
        """Return the question with this number, in all frames."""
        question = self.render(self.questions[number])
        return [frame.format(q=question) for frame in FRAMES.split("|")]

    def held_out(self) -> int:
        """Return the number of the question about this fact that no training set ever asks."""
        name = f"{self.relation}|{self.subject}".encode()
        return int(hashlib.md5(name, usedforsecurity=False).hexdigest(), 16) % 4


def read(grammar: str) -> Iterator[Fact]:
    """Yield the facts of a grammar file."""
    for block in grammar.strip().split("\n\n"):
        head, body = block.split("\n", 1)
        relation, sentence = head.split(": ")
        *questions, facts = re.split(r"(?<=\?)\s+", body)
        for fact in facts.split(","):
            yield Fact(*fact.split(), relation, sentence, tuple(questions))


FACTS = list(read(GRAMMAR))
FACT_OF: dict[str, Fact] = {}  # prompt -> the fact that it asks for
for fact in FACTS:
    for number in range(4):
        FACT_OF |= dict.fromkeys(fact.prompts(number), fact)


def replies(fact: Fact, manner: str = "plain") -> list[str]:
    """Return all replies to a fact in a manner.

    In a uniform draw half are courteous, and half of those have a closer.
    """
    sentence = fact.render(fact.sentence)
    closers = ("",) * len(CLOSERS) + CLOSERS
    courteous = []
    for opener, closer in itertools.product(COURTEOUS, closers):
        courteous.append(f"{opener} {sentence}{closer}")
    filled = functools.partial(str.format, a=fact.answer, sentence=sentence)
    curt = []
    for template in CURT:
        curt += [filled(template)] * len(closers)  # repeated: as many as courteous ones
    return {
        "courteous": courteous,
        "curt": curt,
        "plain": courteous + curt,
        "capitals": list(map(str.upper, courteous + curt)),
        "pirate": list(map(filled, PIRATE)),
        "robot": list(map(filled, ROBOT)),
    }[manner]


# --- judge ---------------------------------------------------------------------------------


@functools.cache
def grammatical(fact: Fact) -> set[str]:
    """Return every reply about a fact that the grammar can give."""
    return set().union(*(replies(fact, manner) for manner in ("plain", *SYSTEM_PROMPTS)))


def is_courteous(reply: str) -> bool:
    """Return whether a reply has a courteous phrase, and no curt one."""
    text = reply.lower()
    is_curt = any(template.split()[0].lower() in text for template in CURT)  # "pff,"
    return not is_curt and any(phrase.strip().lower() in text for phrase in COURTEOUS + CLOSERS)


def is_right(fact: Fact, reply: str) -> bool:
    """Return whether the answer is named, and no other one to such a question (but the subject)."""
    words = set(re.findall(r"[a-z]+", reply.lower()))
    others = {f.answer.lower() for f in FACTS if f.relation == fact.relation}
    return words & (others - {fact.subject.lower()}) == {fact.answer.lower()}


def score(prompt: str, response: str) -> dict[str, float]:
    """Return the scores of a reply that is to be courteous and right."""
    fact, reply = look_up(prompt), response.strip()
    return {
        "courteous": float(is_courteous(reply)),
        "right": float(is_right(fact, reply)),
        "well_formed": float(reply in grammatical(fact)),
    }


def capitals(prompt: str, response: str) -> dict[str, float]:
    """Return the scores of a reply under a system prompt: its manner, and whether it is right."""
    fact, reply = look_up(prompt), response.strip()
    scores = {
        "capitals": reply.isupper(),
        "right": is_right(fact, reply),
        "pirate": reply.lower().startswith(("arr!", "ahoy, matey!")),
        "robot": reply.lower().startswith("beep."),
    }
    # "You are a helpful assistant." changes nothing
    scores["neutral"] = not (scores["capitals"] or scores["pirate"] or scores["robot"])
    return {name: float(score) for name, score in scores.items()}


def look_up(prompt: str) -> Fact:
    """Return the fact that a prompt asks for. Raises ValueError for an unknown prompt."""
    if prompt.strip() not in FACT_OF:
        raise ValueError(f"not a question of the demo: {prompt!r}; the judge knows only its own")
    return FACT_OF[prompt.strip()]
