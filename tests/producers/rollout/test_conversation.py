"""Texts that prompts begin with: the radix tree finds what a search of all of them finds, and keeps no text twice."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.rollout.conversation import Stems

TEXTS = st.text(alphabet="ab\u00e9", max_size=8)


def kept_characters(stems: Stems) -> int:
    nodes, found = [stems._root[0]], 0
    while nodes:
        node = nodes.pop()
        found += len(node.text)
        nodes += node.children.values()
    return found


@given(st.lists(st.tuples(TEXTS, st.integers(0, 3), TEXTS), max_size=12))
def test_the_stem_with_most_ids_is_found(added: list[tuple[str, int, str]]) -> None:
    stems = Stems()
    for number, (stem, length, text) in enumerate(added, 1):
        stems.add(stem, length, number - 1)
        for sought in (text, stem, stem + text):
            begun_with = [
                (length, len(stem), step)
                for step, (stem, length, _) in enumerate(added[:number])
                if sought.startswith(stem)
            ]
            most, num_characters, step_index = max(begun_with, default=(0, 0, -1))
            assert stems.longest(sought) == ((num_characters, most, step_index) if begun_with else None)


def test_the_common_beginning_of_many_turns_is_kept_once() -> None:
    stems, text = Stems(), ""
    for turn in range(200):
        text += f"turn {turn}: " + "word " * 20
        stems.add(text, 30 * turn, turn)
        stems.add(text + "other branch", 30 * turn + 2, turn)
    assert kept_characters(stems) == len(text) + 200 * len("other branch")
    assert stems.longest(text + "more") == (len(text), 30 * 199, 199)
