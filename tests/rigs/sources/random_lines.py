"""Random lines of the sources, to see whether a newcomer finds their folders by the tree's names alone.

`python -m tests.rigs.sources.random_lines SEED ANSWERS` prints the tree and the lines, each below the definition and
the first sentence that it belongs to, and writes where they stand to the file ANSWERS.
"""

import ast
import random
import sys
from pathlib import Path

from tests.rigs.sources.house_figures import files_of
from tests.rigs.sources.source_tree import ROOT

NUM_LINES = 20
MIN_CHARS = 30
"""Shorter lines are not chosen."""


def chosen(files: dict[str, list[str]], seed: int) -> list[tuple[str, int]]:
    """Path and number of lines within functions."""
    found = [(path, number) for path, lines in files.items() for number in range(1, len(lines) + 1)]
    random.Random(seed).shuffle(found)
    fitting = (one for one in found if len(files[one[0]][one[1] - 1].strip()) >= MIN_CHARS and around(files, *one))
    return [one for one, _ in zip(fitting, range(NUM_LINES), strict=False)]


def around(files: dict[str, list[str]], path: str, number: int) -> str:
    """The function whose body has a line, with its first sentence; empty if there is none."""
    inside = [
        node
        for node in ast.walk(ast.parse("\n".join(files[path])))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body[0].lineno < number <= (node.end_lineno or 0)
    ]
    if not inside:
        return ""
    node = max(inside, key=lambda one: one.lineno)
    first = (ast.get_docstring(node) or "").partition("\n\n")[0]
    return f"def {node.name}({ast.unparse(node.args)}): {first}"


def main() -> None:
    """Print the question, write the answers."""
    files = files_of(ROOT)
    lines = chosen(files, int(sys.argv[1]))
    print("\n".join(files))
    for index, (path, number) in enumerate(lines, 1):
        print(f"\n{index}. in {around(files, path, number)}\n    {files[path][number - 1].strip()}")
    Path(sys.argv[2]).write_text("".join(f"{index} {path}:{number}\n" for index, (path, number) in enumerate(lines, 1)))


if __name__ == "__main__":
    main()
