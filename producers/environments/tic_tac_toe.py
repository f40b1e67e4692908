"""Tic-tac-toe against a random or a perfect opponent: several turns, and a reward at every move."""

import random
from collections.abc import Sequence
from typing import Any, Literal

from rollstream.producers.environments import tic_tac_toe_board as rules
from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Message, Reply, Session

ILLEGAL_SCORE = -2.0
"""Below a position that is lost."""


@register_environment("tic_tac_toe")
class TicTacToe(Environment):
    """The agent plays X and names a free cell by its digit; the opponent plays O.

    Rewards: `outcome` at the end (1 win, 0.5 draw, 0 loss, `illegal_penalty` for anything but a free cell, which ends
    the game), and at every legal move, for its step, `move`: `move_weight` times the change of the position's value
    under perfect play. The best move earns 0 and a blunder loses, so that a longer game earns nothing. With several
    `candidates` a turn has so many answers, each with a score: the value of its position for X under perfect play (1, 0
    or -1), and less for an illegal move. The best of them `plays`, or the first: a plain sample. An example may give
    `board` (X to move) and `first` (`X` or `O`).
    """

    def __init__(
        self,
        opponent: Literal["random", "perfect"] = "random",
        first: Literal["X", "O"] = "X",
        move_weight: float = 0.1,
        illegal_penalty: float = -0.5,
        candidates: int = 1,
        plays: Literal["best", "first"] = "best",
    ) -> None:
        _check_one_of("opponent", opponent, ("random", "perfect"))
        _check_one_of("first", first, ("X", "O"))
        _check_one_of("plays", plays, ("best", "first"))
        if candidates < 1:
            raise ValueError(f"candidates is {candidates}; it must be at least 1")
        self._opponent = opponent
        self._first = first
        self._move_weight = move_weight
        self._illegal_penalty = illegal_penalty
        self._candidates = candidates
        self._plays = plays
        self._board = rules.EMPTY

    async def run(self, session: Session) -> None:
        """Move by move until somebody has won, no cell is free or a move is illegal."""
        self._board = rules.checked(session.inputs.get("board", rules.EMPTY))
        if session.inputs.get("first", self._first) == "O":
            self._board = rules.place(self._board, self._answer(session.task_rng), "O")
        messages: list[Message] = [{"role": "user", "content": self._board}]
        while not rules.is_over(self._board):
            reply = await self._reply(session, messages)
            if not await self._move(session, reply):
                await session.reward(self._illegal_penalty, "outcome")
                return
            if not rules.is_over(self._board):
                cell = self._answer(session.task_rng)
                self._board = rules.place(self._board, cell, "O")
                await session.tool("opponent", reply.text, self._board)
            messages += [{"role": "assistant", "content": reply.text}, {"role": "tool", "content": self._board}]
        await session.reward({"X": 1.0, None: 0.5, "O": 0.0}[rules.winner(self._board)], "outcome")

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """Any free cell."""
        return str(session.rng.choice(rules.free_cells(self._board)))

    def examples(self, num: int, seed: int) -> list[dict[str, Any]]:
        """The seat that begins, drawn from the seed; the opponent's moves follow from each task's own seed."""
        rng = random.Random(seed)
        return [{"first": rng.choice("XO")} for _ in range(num)]

    async def _reply(self, session: Session, messages: Sequence[Message]) -> Reply:
        """The answer that is played."""
        if self._candidates == 1:
            return await session.chat(messages)
        replies = await session.sample(messages, self._candidates)
        scores = [self._score(reply) for reply in replies]
        selected = scores.index(max(scores)) if self._plays == "best" else 0
        await session.score(replies, scores, selected=selected)
        return replies[selected]

    def _score(self, reply: Reply) -> float:
        cell = rules.cell_of(reply.text, self._board)
        return ILLEGAL_SCORE if cell is None else -rules.value(rules.place(self._board, cell, "X"), "O")

    async def _move(self, session: Session, reply: Reply) -> bool:
        """Play and value the agent's move; False if it is illegal."""
        cell = rules.cell_of(reply.text, self._board)
        if cell is None:
            return False
        before = rules.value(self._board, "X")
        self._board = rules.place(self._board, cell, "X")
        after = -rules.value(self._board, "O")
        await session.reward(self._move_weight * (after - before), "move", step_index=reply.step_index)
        return True

    def _answer(self, rng: random.Random) -> int:
        perfect = self._opponent == "perfect"
        return rng.choice(rules.best_moves(self._board, "O") if perfect else rules.free_cells(self._board))


def _check_one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; known values: {', '.join(known)}")
