"""A custom environment and reward: counting on from a digit, and the share of digits in the answers.

`run.yaml` names this module under `modules`, so that producers import it and its names are known.
"""

import random
from collections.abc import Sequence
from typing import Any

from rollstream.harness import register_environment, register_reward
from rollstream.producers import Environment, FinishedRollout, Message, Session

DIGITS = 10


@register_environment("count_on")
class CountOn(Environment):
    """Say the `length` digits that follow a digit (3: `456`, 9: `012`). The reward is the share that is right."""

    def __init__(self, length: int = 3, skill: float = 0.5) -> None:
        """`skill`: how often a demonstration's digit is right; the others are at random."""
        if not 1 <= length <= DIGITS:
            raise ValueError(f"length is {length}; give 1 to {DIGITS}")
        self._length = length
        self._skill = skill

    async def run(self, session: Session) -> None:
        """One turn. The digit is the example's `first`, or drawn from the task's seed: the same for the whole group."""
        first = session.inputs.get("first", session.task_rng.randrange(DIGITS))
        reply = await session.chat([{"role": "user", "content": str(first)}])
        wanted = counted(first, self._length)
        await session.tool("compare", reply.text, wanted)
        hits = sum(character == right for character, right in zip(reply.text, wanted, strict=False))
        await session.reward(hits / self._length)

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """Right digits and others, now and then with more of them than were asked for."""
        right = counted(int(messages[-1]["content"]), self._length + session.rng.choice((0, 0, 1, 2)))
        return "".join(_digit(one, self._skill, session.rng) for one in right)

    def examples(self, num: int, seed: int) -> list[dict[str, Any]]:
        """Every digit as often as any other (but for one), in an order that the seed decides."""
        digits = [number % DIGITS for number in range(num)]
        random.Random(seed).shuffle(digits)
        return [{"first": digit} for digit in digits]


@register_reward("digit_share")
def digit_share(rollout: FinishedRollout) -> float | None:
    """Share of digits in the last answer, by the rollout alone. Without an answer there is no score, which is not 0."""
    message = next((messages[-1] for messages in rollout.messages.values() if messages), None)
    if message is None:
        return None
    text = str(message["content"])
    return sum(character.isdigit() for character in text) / max(1, len(text))


def counted(first: int, length: int) -> str:
    """The `length` digits after `first`; 0 follows 9."""
    return "".join(str((first + step) % DIGITS) for step in range(1, length + 1))


def _digit(right: str, skill: float, rng: random.Random) -> str:
    return right if rng.random() < skill else str(rng.randrange(DIGITS))
