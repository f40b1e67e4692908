"""Patterns and schemas of records: they mean what they mean to Python, and end at a limit of processor time."""

import json
import os
import re
import signal
import warnings

import pytest

from rollstream.producers.evaluators import matching
from rollstream.producers.rollout.rewards import RewardError

ENDLESS, STUBBORN = "(a+)+$", "a" * 40 + "b"
BRANCHING = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)} | {"d60": {}},
}
"""A schema of a few KB that is looked at 2 ** 60 times."""


def search(pattern, text, group=0):
    return matching.search("e", pattern, text, ignore_case=False, group=group)


@pytest.mark.parametrize(
    ("ask", "where"),
    [
        (lambda: search(ENDLESS, STUBBORN), r'e\.pattern: "\(a\+\)\+\$"'),
        (lambda: search("(?i)" + "[\0-\uffff]" * 20_000, ""), r"e\.pattern: .*\.\.\."),
        (
            lambda: matching.is_valid_json("e", {"patternProperties": {ENDLESS: {}}}, json.dumps({STUBBORN: 1})),
            r"e\.schema",
        ),
        (lambda: matching.is_valid_json("e", BRANCHING, "1"), r"e\.schema"),
    ],
    ids=["search", "compiling", "names in a schema", "branches of a schema"],
)
def test_an_answer_has_a_limit_of_processor_time(ask, where):
    with pytest.raises(RewardError, match=rf"{where} takes more than 1 s of CPU time"):
        ask()
    assert search("b", STUBBORN) == (True, "b")


@pytest.mark.parametrize("text", ["e\u0301t\u00e9 \u0967\u00b2\x1c", "line\nnext\u2028", "\ud800 lone", "", "fo[a]"])
@pytest.mark.parametrize("pattern", [r"\w+", r"(\s)\W?", r"[[:alpha:]]", r"(?:fo){e<=1}", r"\d$", r"(?i)ſ|.\Z"])
def test_patterns_mean_what_they_mean_to_python(pattern, text):
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        found = re.search(pattern, text)
    assert search(pattern, text) == (found is not None, found[0] if found else None)


def test_the_last_match_and_its_one_group():
    assert matching.last("e", r"\d", "1 2 3") == "3"
    assert matching.last("e", r"<(\d)>", "<1> <2> 3") == "2"
    assert matching.last("e", r"x", "1") is None
    with pytest.raises(RewardError, match=r"e\.pattern: .* has more than one group"):
        matching.last("e", r"(1)(2)", "12")


def test_processes_are_used_again_and_one_that_was_killed_is_replaced():
    assert search("a", "a") == (True, "a")
    (first,) = {process.pid for process in matching._idle[-1:]}
    assert search("a", "b") == (False, None)
    assert matching._idle[-1].pid == first
    assert len(matching._idle) <= matching.MAX_PROCESSES
    os.kill(first, signal.SIGKILL)
    matching._idle[-1].wait()
    assert search("a", "a") == (True, "a")
