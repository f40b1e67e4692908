"""The plain table of the command line: aligned columns of text that no terminal obeys, as wide as they need.

Widths are those of terminal cells (rich's), so that wide characters stay aligned. Not rich's own Table: that takes
1.4 ms a row, 14 s for the 10,000 rows that a query may return.
"""

from collections.abc import Sequence

from rich.cells import cell_len

from rollstream.metrics.sql.printable import printable

GAP = "  "


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    is_right: Sequence[bool],
    *,
    has_rule: bool = False,
    max_chars: int | None = None,
) -> str:
    """The names of the columns, then one line a row; `is_right`: by column, whether it is aligned to the right.

    `has_rule` adds a line of dashes under the names. Line feeds are written as `\\n`, tabs as a blank, and texts above
    `max_chars` are cut.
    """
    lines = [[_cell(text, max_chars) for text in line] for line in (columns, *rows)]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    if has_rule:
        lines.insert(1, ["-" * width for width in widths])
    return "\n".join(_line(line, widths, is_right) for line in lines)


def _cell(text: str, max_chars: int | None) -> str:
    text = printable(text.replace("\r\n", "\n").replace("\n", "\\n").replace("\t", " "))
    return text if max_chars is None or len(text) <= max_chars else text[: max_chars - 1] + "…"


def _line(cells: Sequence[str], widths: Sequence[int], is_right: Sequence[bool]) -> str:
    padded: list[str] = []
    for cell, width, right in zip(cells, widths, is_right, strict=True):
        blanks = " " * (width - cell_len(cell))
        padded.append(f"{blanks}{cell}" if right else f"{cell}{blanks}")
    return GAP.join(padded).rstrip()
