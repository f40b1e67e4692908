"""Guess a number, told higher or lower: short enough for a tiny character model to learn binary search."""

import random
from collections.abc import Sequence
from typing import Any

from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Message, Session

MAX_DIGITS = 100
"""Digits of a guess that counts as a number: Python reads 4,300."""
ASK, HIGHER, LOWER, FOUND, INVALID = "?", "H", "L", "=", "X"
FALL = 0.9
"""Share of the reward that a guess in (nearly) the last turn loses, compared with the first."""


@register_environment("guess_number")
class GuessNumber(Environment):
    """Find the secret of `low`..`high` in at most `max_turns` guesses.

    A hit at guess g earns 1 - 0.9 (g - 1) / max_turns, no hit 0. With ten numbers and six turns that is 0.715 on
    average for binary search and 0.314 for guessing at random.
    """

    def __init__(self, low: int = 0, high: int = 9, max_turns: int = 6, heeding: float = 0.0) -> None:
        """`heeding`: share of a demonstration's guesses that heed the answers before; the others are at random."""
        if low > high:
            raise ValueError(f"low ({low}) is above high ({high}); lower low")
        if not 0 <= heeding <= 1:
            raise ValueError(f"heeding is {heeding}; it must be in 0..1")
        self._heeding = heeding
        self._low = low
        self._high = high
        self._max_turns = max_turns

    async def run(self, session: Session) -> None:
        """Guess until found or out of turns. The secret is the example's `secret`, or drawn from the task's seed."""
        secret = session.inputs.get("secret")
        secret = session.task_rng.randint(self._low, self._high) if secret is None else secret
        messages: list[Message] = [{"role": "user", "content": ASK}]
        for turn in range(min(self._max_turns, session.max_turns)):
            reply = await session.chat(messages)
            answer = compare(reply.text, secret)
            await session.tool("compare", reply.text, answer)
            if answer == FOUND:
                await session.reward(1.0 - FALL * turn / self._max_turns)
                return
            messages += [{"role": "assistant", "content": reply.text}, {"role": "tool", "content": answer}]
        await session.reward(0.0)

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """A number of the range, heeding the answers so far or not: the form is right, the play is left to learn."""
        low, high = self._low, self._high
        if session.rng.random() < self._heeding:
            low, high = bounds(messages, low, high)
        return str(session.rng.randint(low, high))

    def examples(self, num: int, seed: int) -> list[dict[str, Any]]:
        """Secrets, each number of the range as often as any other (but for one), in an order that the seed decides."""
        rng = random.Random(seed)
        numbers: list[int] = []
        while len(numbers) < num:
            numbers += rng.sample(range(self._low, self._high + 1), self._high - self._low + 1)
        return [{"secret": number} for number in numbers[:num]]


def bounds(messages: Sequence[Message], low: int, high: int) -> tuple[int, int]:
    """The range of the secret after the guesses and answers so far."""
    guess = 0
    for message in messages:
        text = str(message["content"])
        if message["role"] == "assistant":
            number = number_of(text)
            guess = guess if number is None else number
        elif message["role"] == "tool" and text in (HIGHER, LOWER):
            low, high = (max(low, guess + 1), high) if text == HIGHER else (low, min(high, guess - 1))
    return low, high


def compare(guess: str, secret: int) -> str:
    """The answer to a guess: `H` higher, `L` lower, `=` found, `X` if the guess is not a number."""
    number = number_of(guess)
    if number is None:
        return INVALID
    return FOUND if number == secret else HIGHER if secret > number else LOWER


def number_of(guess: str) -> int | None:
    """The number that a guess is; None if it is not one, or has more than `MAX_DIGITS`."""
    digits = guess.strip()
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS
    return int(digits) if is_number else None
