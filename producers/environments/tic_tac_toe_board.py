"""The rules of tic-tac-toe and the value of every position under perfect play. Pure.

A board is nine characters, row by row: `X`, `O`, or a free cell's own digit `0`..`8`.
"""

from functools import cache

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


def is_over(board: str) -> bool:
    """Somebody won, or no cell is free."""
    return winner(board) is not None or not free_cells(board)


@cache
def value(board: str, mover: str) -> int:
    """What `mover`, whose turn it is, reaches if both play perfectly: 1 a win, 0 a draw, -1 a loss."""
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
