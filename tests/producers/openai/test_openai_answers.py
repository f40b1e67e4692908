"""Tool calls in what a model said: found as their pattern defines them, by work in proportion to the text."""

import random
import re

import pytest

from rollstream.producers.rollout.reply import call_spans, tool_calls_in


def test_a_tool_call_that_cannot_be_read_stays_text():
    assert tool_calls_in("<tool_call>{not json}</tool_call>") == ()
    assert tool_calls_in('<tool_call>{"name": 3}</tool_call>') == ()
    one, two = tool_calls_in('<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "a"}</tool_call>')
    assert one["id"] != two["id"]


class Counted(str):
    """Counts every character that is looked at one by one."""

    num_looks = 0

    def __getitem__(self, key):
        Counted.num_looks += 1
        return super().__getitem__(key)


@pytest.mark.parametrize(
    "piece", ["<tool_call>{", "<tool_call>{} ", "<tool_call>" + " " * 20, "} </tool_call>", "<tool_call>{ }" + " " * 30]
)
def test_looking_for_tool_calls_takes_work_in_proportion_to_the_text(piece):
    def looks(repeats):
        Counted.num_looks = 0
        assert tool_calls_in(Counted(piece * repeats)) == ()
        return Counted.num_looks

    assert looks(20_000) <= 10 * looks(2_000) + 20


def test_tool_calls_are_found_as_by_the_pattern_that_defines_them():
    defined = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
    rng = random.Random(3)
    parts = ["<tool_call>", "</tool_call>", '{"name": "f"}', "{", "}", " ", "\n", "x"]
    for _ in range(5_000):
        text = "".join(rng.choices(parts, k=rng.randrange(12)))
        assert [text[begin:end] for begin, end in call_spans(text)] == [m[0] for m in defined.finditer(text)]
