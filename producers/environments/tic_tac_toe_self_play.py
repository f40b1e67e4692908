"""Tic-tac-toe between two agents, one a seat, or between an agent and a scripted player in the other seat."""

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from rollstream.producers.environments import tic_tac_toe_board as rules
from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Message, Session, TurnsExhausted

SEATS = ("X", "O")
"""Names of the agents; X begins."""
OUTCOMES = {"X": {"X": 1.0, "O": 0.0}, "O": {"X": 0.0, "O": 1.0}, None: {"X": 0.5, "O": 0.5}}
"""Reward of each seat, by winner."""


@register_environment("tic_tac_toe_self_play")
class TicTacToeSelfPlay(Environment):
    """The agents `X` and `O` name a free cell in turn; both see the board after every move of the other.

    Rewards of each agent: `outcome` at the end (1 win, 0.5 draw, 0 loss) and for its every legal move, at its step,
    `move`: `move_weight` times the change of the position's value for it under perfect play. A move that is not a free
    cell ends the game: its player gets `illegal_penalty`, the other one a draw's 0.5. So does an agent without turns
    left (`max_turns`), without a penalty: both get 0.5. `scripted` puts a `random` or `perfect` player into a seat,
    which then needs no agent. `opening_moves` are random and equal in all games of a group, as a scripted player's
    draws are. An example may give `board`.
    """

    SCRIPTED = ("random", "perfect")

    def __init__(
        self,
        move_weight: float = 0.1,
        illegal_penalty: float = -0.5,
        opening_moves: int = 0,
        scripted: Mapping[str, Literal["random", "perfect"]] | None = None,
    ) -> None:
        self._scripted = dict(scripted or {})
        for seat, player in self._scripted.items():
            if seat not in SEATS or player not in self.SCRIPTED:
                raise ValueError(f"scripted.{seat} is {player!r}; write X or O with random or perfect")
        if len(self._scripted) == len(SEATS):
            raise ValueError("scripted has both seats; leave one to an agent")
        if not 0 <= opening_moves <= 4:
            raise ValueError(f"opening_moves is {opening_moves}; it must be in 0..4, so that nobody has won")
        self._move_weight = move_weight
        self._illegal_penalty = illegal_penalty
        self._opening_moves = opening_moves
        self._board = rules.EMPTY

    def required_agents(self) -> tuple[str, ...]:
        """The seats that are not scripted."""
        return tuple(seat for seat in SEATS if seat not in self._scripted)

    async def run(self, session: Session) -> None:
        """Move by move until somebody has won, no cell is free, or a move is illegal."""
        self._board = self._opening(session)
        conversations: dict[str, list[Message]] = {seat: [] for seat in self.required_agents()}
        try:
            while not rules.is_over(self._board):
                seat = rules.mover(self._board)
                if seat in self._scripted:
                    self._place(seat, self._scripted_cell(seat, self._scripted[seat], session.task_rng))
                elif not await self._turn(session, seat, conversations[seat]):
                    await self._end(session, {seat: self._illegal_penalty, rules.other(seat): 0.5})
                    return
        except TurnsExhausted:
            await self._end(session, OUTCOMES[None])
            raise
        await self._end(session, OUTCOMES[rules.winner(self._board)])

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """Any free cell."""
        return str(session.rng.choice(rules.free_cells(self._board)))

    def play_scripted(self, session: Session, messages: Sequence[Message], agent: str, player: str) -> str:
        """The cell that a `random` or a `perfect` player names."""
        return str(self._scripted_cell(agent, player, session.task_rng))

    async def _turn(self, session: Session, seat: str, messages: list[Message]) -> bool:
        """Ask an agent for its move, play it and value it; False if it is illegal."""
        messages.append({"role": "tool" if messages else "user", "content": self._board})
        reply = await session.chat(messages, agent=seat)
        messages.append({"role": "assistant", "content": reply.text})
        cell = rules.cell_of(reply.text, self._board)
        if cell is None:
            return False
        before = rules.value(self._board, seat)
        self._place(seat, cell)
        change = -rules.value(self._board, rules.other(seat)) - before
        await session.reward(self._move_weight * change, "move", step_index=reply.step_index, agent=seat)
        return True

    async def _end(self, session: Session, outcome: Mapping[str, float]) -> None:
        for seat in self.required_agents():
            await session.reward(outcome[seat], "outcome", agent=seat)

    def _place(self, seat: str, cell: int) -> None:
        self._board = rules.place(self._board, cell, seat)

    def _scripted_cell(self, seat: str, player: str, rng: random.Random) -> int:
        is_perfect = player == "perfect"
        return rng.choice(rules.best_moves(self._board, seat) if is_perfect else rules.free_cells(self._board))

    def _opening(self, session: Session) -> str:
        """The example's board, or the empty one, after the random opening moves."""
        board = rules.checked(session.inputs.get("board", rules.EMPTY))
        if not 0 <= board.count("X") - board.count("O") <= 1:
            raise ValueError(f"board is {board!r}; X must have as many marks as O, or one more")
        for _ in range(self._opening_moves):
            if not rules.is_over(board):
                board = rules.place(board, session.task_rng.choice(rules.free_cells(board)), rules.mover(board))
        return board
