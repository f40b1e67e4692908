"""The rules of tic-tac-toe and the value of every position under perfect play. Pure.

A board is nine characters, row by row: `X`, `O`, or a free cell's own digit `0`..`8`.
"""

from functools import cache
from typing import Any

EMPTY = "012345678"
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def place(board: str, cell: int, mark: str) -> str:
    """The board with a mark on a cell."""
    return board[:cell] + mark + board[cell + 1 :]


def free_cells(board: str) -> list[int]:
    """Cells without a mark, in order."""
    return [cell for cell in range(9) if board[cell] not in "XO"]


def winner(board: str) -> str | None:
    """The mark with three in a line."""
    return next((board[a] for a, b, c in _LINES if board[a] == board[b] == board[c]), None)


def mover(board: str) -> str:
    """The mark whose turn it is in a game that X began."""
    return "X" if board.count("X") == board.count("O") else "O"


def cell_of(text: str, board: str) -> int | None:
    """The free cell that an answer names, if it does."""
    answer = text.strip()
    is_cell = len(answer) == 1 and answer in EMPTY and int(answer) in free_cells(board)
    return int(answer) if is_cell else None


def checked(board: Any) -> str:
    """`board` as it is. Raises ValueError if it is not nine characters of a board."""
    is_board = isinstance(board, str) and len(board) == 9
    if not is_board or any(mark not in ("X", "O", cell) for mark, cell in zip(board, EMPTY, strict=True)):
        raise ValueError(f"board is {board!r}; it must be nine characters: X, O or the cell's own digit")
    return board


def is_over(board: str) -> bool:
    """Somebody won, or no cell is free."""
    return winner(board) is not None or not free_cells(board)


@cache
def value(board: str, mover: str) -> int:
    """The value for `mover`, whose turn it is, if both play perfectly: 1 a win, 0 a draw, -1 a loss."""
    if winner(board):
        return -1
    cells = free_cells(board)
    if not cells:
        return 0
    return max(-value(place(board, cell, mover), other(mover)) for cell in cells)


def best_moves(board: str, mover: str) -> list[int]:
    """Cells that keep the position's value, in order."""
    aim = value(board, mover)
    return [cell for cell in free_cells(board) if -value(place(board, cell, mover), other(mover)) == aim]


def other(mark: str) -> str:
    """The opponent's mark."""
    return "O" if mark == "X" else "X"
