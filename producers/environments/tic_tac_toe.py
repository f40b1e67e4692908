"""Tic-tac-toe against a random or a perfect opponent: several turns, and a reward at every move."""

import random
from collections.abc import Sequence
from typing import Any, Literal

from rollstream.producers.environment import Environment
from rollstream.producers.environments import tic_tac_toe_board as rules
from rollstream.producers.registry import register_environment
from rollstream.producers.session import Message, Reply, Session


@register_environment("tic_tac_toe")
class TicTacToe(Environment):
    """The agent plays X and names a free cell by its digit; the opponent plays O.

    Rewards: `outcome` at the end (1 win, 0.5 draw, 0 loss, `illegal_penalty` for anything but a free cell, which ends
    the game), and at every legal move, for its step, `move`: `move_weight` times the change of the position's value
    under perfect play. The best move earns 0 and a blunder loses, so that a longer game earns nothing.
    An example may give `board` (X to move) and `first` (`X` or `O`).
    """

    def __init__(
        self,
        opponent: Literal["random", "perfect"] = "random",
        first: Literal["X", "O"] = "X",
        move_weight: float = 0.1,
        illegal_penalty: float = -0.5,
    ) -> None:
        if opponent not in ("random", "perfect"):
            raise ValueError(f"opponent is {opponent!r}; known are: random, perfect")
        if first not in ("X", "O"):
            raise ValueError(f"first is {first!r}; known are: X, O")
        self._opponent = opponent
        self._first = first
        self._move_weight = move_weight
        self._illegal_penalty = illegal_penalty
        self._board = rules.EMPTY

    async def run(self, session: Session) -> None:
        """Move by move until somebody has won, no cell is free or a move is illegal."""
        self._board = _checked(session.inputs.get("board", rules.EMPTY))
        if session.inputs.get("first", self._first) == "O":
            self._board = rules.place(self._board, self._answer(session.task_rng), "O")
        messages: list[Message] = [{"role": "user", "content": self._board}]
        while not rules.is_over(self._board):
            reply = await session.chat(messages)
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
        """Who begins, drawn from the seed; the opponent's moves follow from each task's own seed."""
        rng = random.Random(seed)
        return [{"first": rng.choice("XO")} for _ in range(num)]

    async def _move(self, session: Session, reply: Reply) -> bool:
        """Play and value the agent's move; False if it is illegal."""
        text = reply.text.strip()
        if len(text) != 1 or text not in rules.EMPTY or int(text) not in rules.free_cells(self._board):
            return False
        before = rules.value(self._board, "X")
        self._board = rules.place(self._board, int(text), "X")
        after = -rules.value(self._board, "O")
        await session.reward(self._move_weight * (after - before), "move", step_index=reply.step_index)
        return True

    def _answer(self, rng: random.Random) -> int:
        perfect = self._opponent == "perfect"
        return rng.choice(rules.best_moves(self._board, "O") if perfect else rules.free_cells(self._board))


def _checked(board: Any) -> str:
    is_board = isinstance(board, str) and len(board) == 9
    if not is_board or any(mark not in ("X", "O", cell) for mark, cell in zip(board, rules.EMPTY, strict=True)):
        raise ValueError(f"board is {board!r}; it must be nine characters: X, O or the cell's own digit")
    return board
