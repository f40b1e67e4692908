"""The figures that docs/architecture.md shows: floors, circles and repeated blocks of a tree."""

from tests.rigs.sources.house_figures import BLOCK_LINES, circles, figures, floors, of_folders, repeated_blocks, within
from tests.rigs.sources.source_tree import ALLOWED, ROOT


def test_a_circle_is_one_floor() -> None:
    graph = {"a/x.py": {"a/y.py"}, "a/y.py": {"a/x.py", "a/b/z.py"}, "a/b/z.py": {"b/w.py"}, "b/w.py": set[str]()}
    assert circles(graph) == [{"a/x.py", "a/y.py"}]
    assert floors(graph) == 3
    assert floors(within(graph, "a")) == 2
    assert of_folders(within(graph, "a")) == {"a": {"a/b"}, "a/b": set()}


def test_a_block_that_is_repeated_counts_at_each_of_its_places() -> None:
    block = [f"call({number})" for number in range(BLOCK_LINES + 2)]
    files = {"learner/a.py": ["one = 1", *block], "metrics/b.py": [*block, "two = 2"], "metrics/c.py": ["three = 3"]}
    assert repeated_blocks(files) == {"learner": 1, "metrics": 1}
    assert sum(repeated_blocks({"learner/a.py": block[1:3], "metrics/b.py": block}).values()) == 0
    imported = ["from a import (", *(f"    name_{number}," for number in range(BLOCK_LINES)), ")"]
    assert sum(repeated_blocks({"learner/a.py": imported, "metrics/b.py": imported}).values()) == 0


def test_this_tree_has_a_row_for_each_top_folder_and_no_circle_and_no_branch() -> None:
    rows = figures(ROOT)
    assert [row[0] for row in rows] == [*ALLOWED, "all"]
    assert {row[6:9] for row in rows} == {("0", "0", "0")}
