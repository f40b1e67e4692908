"""Sums in one turn: a question, a number, right or wrong."""

import random
from collections.abc import Sequence
from typing import Any

from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Message, Session

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@register_environment("arithmetic")
class Arithmetic(Environment):
    """`a op b=` with both numbers in 0..`highest`; 1 for the right number, 0 for anything else.

    An example's inputs are `a`, `b` and `op`; what is missing is drawn from the task's seed. `demonstrator_accuracy`
    is the share of right answers in demonstrations.
    """

    def __init__(self, highest: int = 9, operations: str = "+-", demonstrator_accuracy: float = 0.5) -> None:
        unknown = sorted(set(operations) - set(_OPERATIONS))
        if unknown or not operations:
            raise ValueError(f"operations is {operations!r}; known operations: {' '.join(_OPERATIONS)}")
        if not 0 <= demonstrator_accuracy <= 1:
            raise ValueError(f"demonstrator_accuracy is {demonstrator_accuracy}; it must be in 0..1")
        self._highest = highest
        self._operations = operations
        self._accuracy = demonstrator_accuracy
        self._right = 0

    async def run(self, session: Session) -> None:
        """Ask once, compare."""
        question = self._draw(session.task_rng) | session.inputs
        a, b, operation = question["a"], question["b"], question["op"]
        if operation not in _OPERATIONS:
            raise ValueError(f"op is {operation!r}; known operations: {' '.join(_OPERATIONS)}")
        self._right = _OPERATIONS[operation](a, b)
        reply = await session.chat([{"role": "user", "content": f"{a}{operation}{b}="}])
        await session.reward(float(reply.text.strip() == str(self._right)))

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """The right number, or with the rest of the probability one beside it."""
        is_right = session.rng.random() < self._accuracy
        return str(self._right if is_right else self._right + session.rng.choice([-2, -1, 1, 2]))

    def examples(self, num: int, seed: int) -> list[dict[str, Any]]:
        """Questions drawn from the seed; equal ones may come twice."""
        rng = random.Random(seed)
        return [self._draw(rng) for _ in range(num)]

    def _draw(self, rng: random.Random) -> dict[str, Any]:
        return {
            "a": rng.randint(0, self._highest),
            "b": rng.randint(0, self._highest),
            "op": rng.choice(self._operations),
        }
