"""Banned words are found wherever they are: planted ones in names, texts and documents."""

import pytest

from tests.rigs.sources.source_tree import Plant
from tests.rigs.sources.words import HEADLESS, STAYS, TEXT, banned_words, patterns_of, texts, unneeded

PLANTED = [
    "def tie_to_parent(): ...",
    "async def _say(): ...",
    "class ModelShelf: ...",
    "class _Garbage: ...",
    "class _Held: ...",
    "for workplace in (): ...",
    "steer = 1",
    "def load(environ): ...",
    "async def _settle(): ...",
    "import a as run_ends",
    "place = 1",
    "self.marks = 1",
    "def _note(): ...",
    "room = 1",
    "with a as aside: ...",
    "async def until(): ...",
    "def send(*, tell): ...",
    "shelf = 1",
    "self._unfolded = 1",
    "for news in (): ...",
    "with a as stranger: ...",
    "import a as lifeline",
    "def test_it_begins_anew(): ...",
    '"""It waits for ever."""',
    'raise ValueError(f"{name} stands in {path}")',
    '"the id stands " "twice"',
    "x = 1  # Seldom",
    '"""It waits for\nEver."""',
    'raise ValueError(f"{name} is no number")',
    '"""Records that are no events."""',
    '"""The last line was\nno error."""',
    '"""The topic; None if it is none of ours."""',
    "x = 1  # A group without a run is nobody's",
    '"""One message; None if it is none."""',
    "x = 1  # bounded by who asks",
    "x = 1  # who asks again waits",
    '"""A client. Who asks again waits."""',
    'def planted():\n    """What a task holds."""',
    'class Planted:\n    """Of a group. Each has one."""',
    'size = 1\n"""By partition: how many."""',
    'who = 1\n"""Who asks. Is it a question?"""',
    '"""It waits forever."""',
    'raise ValueError("a barren group")',
    "x = 1  # Buried",
    'log("it begins anew")',
    "x = 1  # Surroundings",
    'raise ValueError("a classic run")',
    "x = 1  # Partitions are dealt out",
    'log("it lets go; let the world know")',
    "x = 1  # Who reckons",
    'log("it said nothing")',
    'raise ValueError("a group that there is not")',
    "x = 1  # Asked thrice",
    'log("an unfolded record")',
    'log("unheard")',
    'log("one who tries again")',
    'log("a record that would die again")',
    'def planted():\n    """How it is sent."""',
    'def planted():\n    """Where the log is."""',
    'def planted():\n    """Which of them."""',
    'def planted():\n    """Whom it asks."""',
    'def planted():\n    """Whose it is."""',
    'def planted():\n    """Why it failed."""',
]


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_word_is_found(line: str, plant: Plant) -> None:
    (found,) = banned_words(plant("tests/planted.py", f"tells = new_status = 1\n{line}\n"))
    assert found.startswith(("2: ", "3: "))


@pytest.mark.parametrize(
    "text",
    [
        "There is no room.",
        "Wrapped in a docstring, there\n    is no room.",
        "If there are no records, there was no run.",
        "It is no longer kept.",
        "It is no more than 3, and they are no less exact.",
        "It is not a number.",
        "If there is none, a value that is None is used, by whoever asks.",
        "Who asks? A client.",
        "It has no number.",
    ],
)
def test_plain_english_with_no_is_allowed(text: str, plant: Plant) -> None:
    assert not banned_words(plant("docs/planted.md", text))


@pytest.mark.parametrize("line", ['"""What is a group? Rollouts of one task."""', 'text = "What a task holds."'])
def test_a_question_and_a_text_may_begin_without_a_main_clause(line: str, plant: Plant) -> None:
    assert not banned_words(plant("tests/planted.py", f"new_status = 1\n{line}\n"))


@pytest.mark.parametrize(
    "name",
    [
        "test_a_name_that_is_no_number_is_refused",
        "test_records_are_no_events",
        "is_no_number",
        "test_the_last_line_was_no_error",
        "test_it_is_said_where_a_key_is_missing",
        "test_a_full_disk_is_told",
        "test_a_log_says_so",
        "assert_told",
        "_tells_a_secret",
        "test_what_is_gone_is_raised",
        "test_who_starts_a_broker_stops_it",
        "test_whatever_fails_is_logged",
        "what_is_done",
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_planted_function_name_without_subject_or_with_told_is_found(name: str, kind: str, plant: Plant) -> None:
    (found,) = banned_words(plant("tests/test_planted.py", f"tells = new_status = 1\n{kind} {name}(): ...\n"))
    assert found.startswith(f"2: {name} -> ")
    assert not banned_words(plant("tests/test_planted.py", f"{name} = 1\n")), "variables are other names"


@pytest.mark.parametrize(
    "name",
    [
        "test_an_undecodable_record_is_dead_lettered",
        "test_an_epoch_waits_while_there_is_no_task",
        "test_an_ended_run_is_no_longer_followed",
        "test_a_what_if_trains_again",
        "test_what_if_runs_are_listed",
        "what_if",
        "whole",
        "essay",
    ],
)
def test_a_plain_function_name_is_allowed(name: str, plant: Plant) -> None:
    assert not banned_words(plant("tests/test_planted.py", f"def {name}(): ...\n"))


def test_a_word_of_classes_or_functions_is_allowed_in_other_names(plant: Plant) -> None:
    assert not banned_words(plant("tests/planted.py", "def held(reading, until): ...\nbackend = 1\n"))


def test_a_planted_file_name_is_found(plant: Plant) -> None:
    assert banned_words(plant("a/surroundings.py", "")) == ["1: surroundings -> run_context"]


@pytest.mark.parametrize("name", ["README.md", "docs/planted.md", "metrics/planted.sql", "examples/planted.yaml"])
def test_a_planted_word_of_a_document_is_found(name: str, plant: Plant) -> None:
    assert banned_words(plant(name, "one\n-- made\n-- anew\n")) == ["3: anew -> again"]


def test_every_kind_of_place_is_searched(tmp_path, plant: Plant) -> None:
    names = {
        "README.md",
        "CHANGELOG.md",
        "docs/a.md",
        "tests/a.py",
        "benchmarks/a.py",
        "examples/a.yaml",
        "metrics/a.sql",
    }
    for name in names:
        plant(name, "")
    plant("tests/golden/a.md", "")
    assert {str(path.relative_to(tmp_path)) for path in texts(tmp_path)} == names


def test_an_exception_that_is_not_needed_goes() -> None:
    """Nothing is excused that would not be found."""
    assert unneeded(STAYS) == []
    assert unneeded([("schemas/ids.py", "anew"), ("gone.py", "mark")]) == [
        ("schemas/ids.py", "anew"),
        ("gone.py", "mark"),
    ]


def test_every_pattern_of_text_has_a_plant() -> None:
    plants = "\n".join(PLANTED)
    assert [one for one, pattern in patterns_of(TEXT).items() if not pattern.search(plants)] == []
    assert [word for word in HEADLESS if f'"""{word} ' not in plants] == []


def test_a_pattern_without_a_plant_is_found() -> None:
    rules = patterns_of({r"buried twice": "", r"for ?ever": ""})
    found = {one: bool(pattern.search("buried\ntwice, forever")) for one, pattern in rules.items()}
    assert found == {"buried twice": True, "for ?ever": False}  # a space stands for one or more
