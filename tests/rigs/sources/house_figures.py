"""Figures of the sources by top folder, to compare two versions of the project.

`python -m tests.rigs.sources.house_figures [TREE]` prints them, of a checkout or an unpacked `git archive`, else of
this tree.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from tests.rigs.sources.source_tree import ALLOWED, ONE_HOME, ROOT, SMALL_FILE_LINES, arrows

BLOCK_LINES = 6
IMPORTED_NAMES = re.compile(r"(?m)^ *from \S+ import \([^)]*\)")
"""An import over several lines."""
COLUMNS = (
    "folder",
    "modules",
    "lines",
    "below 60 lines",
    "floors of files",
    "floors of folders",
    "circles of files",
    "circles of folders",
    "branches on an algorithm",
    "repeated blocks",
)
Graph = Mapping[str, Iterable[str]]


def files_of(root: Path) -> dict[str, list[str]]:
    """Lines of each source by path below `root`."""
    paths = (path for package in ALLOWED for path in sorted((root / package).rglob("*.py")))
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8").splitlines() for path in paths}


def reachable(graph: Graph) -> dict[str, set[str]]:
    """All nodes that a node's arrows lead to, over any number of others, by node."""
    found: dict[str, set[str]] = {}
    for start in graph:
        seen, left = set[str](), [*graph[start]]
        while left:
            node = left.pop()
            if node not in seen:
                seen.add(node)
                left.extend(graph.get(node, ()))
        found[start] = seen
    return found


def circles(graph: Graph) -> list[set[str]]:
    """Sets of nodes that lead to each other."""
    reached = reachable(graph)
    return list({min(one): one for node in graph if (one := _with(node, reached)) and len(one) > 1}.values())


def _with(node: str, reached: Mapping[str, set[str]]) -> set[str]:
    return {node, *(other for other in reached[node] if node in reached.get(other, ()))}


def floors(graph: Graph) -> int:
    """Nodes of the longest way down, where a circle counts as one."""
    reached = reachable(graph)
    home = {node: min(_with(node, reached)) for node in reached}
    heights: dict[str, int] = {}
    for node in sorted(graph, key=lambda node: len(reached[node] - _with(node, reached))):
        below = (
            heights.get(home.get(other, other), 1) for other in reached[node] if home.get(other, other) != home[node]
        )
        heights[home[node]] = max(heights.get(home[node], 1), 1 + max(below, default=0))
    return max(heights.values(), default=0)


def within(graph: Graph, folder: str) -> dict[str, set[str]]:
    """The arrows between the files of a top folder."""
    every = {*graph}.union(*graph.values())
    own = {name for name in every if name.startswith(f"{folder}/")}
    return {name: own & set(graph.get(name, ())) for name in own}


def of_folders(graph: Graph) -> dict[str, set[str]]:
    """The arrows between the folders of files."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        folder = name.rpartition("/")[0]
        found.setdefault(folder, set()).update({other.rpartition("/")[0] for other in others} - {folder})
    return found


def repeated_blocks(files: Mapping[str, list[str]]) -> Counter[str]:
    """Number of blocks of BLOCK_LINES or more lines that are repeated, by top folder; imports and comments apart."""
    windows = {name: list(_windows(lines)) for name, lines in files.items()}
    counts = Counter(block for found in windows.values() for _, block in found)
    blocks: Counter[str] = Counter()
    for name, found in windows.items():
        starts = [number for number, block in found if counts[block] > 1]
        blocks[name.split("/")[0]] += bool(starts) + sum(after > before + 1 for before, after in pairwise(starts))
    return blocks


def _windows(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    code = [line.strip() for line in IMPORTED_NAMES.sub("", "\n".join(lines)).splitlines()]
    code = [line for line in code if len(line) > 1 and not line.startswith(("#", "import ", "from ", '"""'))]
    for number in range(len(code) - BLOCK_LINES + 1):
        yield number, "\n".join(code[number : number + BLOCK_LINES])


def branches(files: Mapping[str, list[str]]) -> Counter[str]:
    """Number of lines that use an algorithm's name or settings away from the algorithms, by top folder."""
    rules = [pattern for pattern, home in ONE_HOME.items() if home == "schemas learner/algorithms"]
    return Counter(
        name.split("/")[0]
        for name, lines in files.items()
        if not name.startswith(("schemas/", "learner/algorithms/"))
        for line in lines
        if any(rule.search(line) for rule in rules)
    )


def figures(root: Path) -> list[tuple[str, ...]]:
    """A row of COLUMNS for each top folder, and one for all."""
    files = files_of(root)
    graph = arrows([root / name for name in files], root)
    blocks, asked = repeated_blocks(files), branches(files)
    rows: list[tuple[str, ...]] = []
    for folder in [*ALLOWED, "all"]:
        own = {name: lines for name, lines in files.items() if folder in ("all", name.split("/")[0])}
        if not own:
            continue
        inside = within(graph, folder) if folder != "all" else {name: graph.get(name, set[str]()) for name in files}
        numbers = (
            len(own),
            sum(map(len, own.values())),
            sum(len(lines) < SMALL_FILE_LINES and not name.endswith("__init__.py") for name, lines in own.items()),
            floors(inside),
            floors(of_folders(inside)),
            len(circles(inside)),
            len(circles(of_folders(inside))),
            asked[folder] if folder != "all" else asked.total(),
            blocks[folder] if folder != "all" else blocks.total(),
        )
        rows.append((folder, *(f"{number:,}" for number in numbers)))
    return rows


def main() -> None:
    """Prints the figures as a Markdown table."""
    rows = figures(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    for row in (COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *rows):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
