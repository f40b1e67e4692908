"""Rows of TRL's micro-batches: those that are tried on a case, and the fastest of them. Measures nothing itself."""

from collections.abc import Mapping

ROWS = (1, 2, 4, 8, 16, 32)


def rows_tried(kind: str, num_rows: int) -> list[int]:
    """Numbers of rows that divide a step of `num_rows` differently; a preference pair has two rows."""
    least = 2 if kind == "dpo" else 1
    return [rows for rows in ROWS if least <= rows <= num_rows]


def fastest(cpu_s: Mapping[int, float]) -> int:
    """The number of rows with the fewest CPU seconds a step; the smaller one of two that are as fast."""
    return min(sorted(cpu_s), key=lambda rows: cpu_s[rows])
