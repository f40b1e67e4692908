"""Prompts of a conversation: the tree of earlier texts finds what a search of all finds, and keeps no text twice.

A plain text begins with BOS.
"""

from array import array
from itertools import accumulate
from operator import eq, mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.engines.base import ids_after, plain_ids
from rollstream.producers.engines.scripted import SPECIALS, ScriptedTokenizer
from rollstream.producers.rollout.conversation import MIN_SHARED, Conversation, Stems
from tests.rigs.runs.llama_tokenizer import MISTRAL, PHI, llama_tokenizer

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


class WithBos(ScriptedTokenizer):
    """Begins sequences with its first special token, as Llama's, Gemma's and Mistral's tokenizers do."""

    BOS = SPECIALS[0]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return super().encode(self.BOS + text if add_special_tokens else text)


@pytest.mark.parametrize(("text", "begun_with"), [("ab", WithBos.BOS), ("aa", WithBos.BOS), (f"{WithBos.BOS}ab", "")])
def test_a_plain_text_begins_with_bos_once_and_a_chat_or_a_continued_text_stays_as_it_is(
    text: str, begun_with: str
) -> None:
    tokenizer = WithBos()
    expected = ScriptedTokenizer().encode(begun_with + text)
    assert plain_ids(tokenizer, text) == expected
    assert plain_ids(ScriptedTokenizer(), text) == ScriptedTokenizer().encode(text)
    conversation = Conversation(tokenizer)
    assert conversation.prompt(text).token_ids.tolist() == ScriptedTokenizer().encode(text)
    prompt = conversation.prompt(text, is_plain=True)
    assert prompt.token_ids.tolist() == expected
    conversation.append_sampled(0, prompt, array("i", tokenizer.encode("c", add_special_tokens=False)))
    assert conversation.prompt(f"{text}cd", is_plain=True).token_ids.tolist() == [
        *expected,
        *ScriptedTokenizer().encode("cd"),
    ]


class Counted(array):
    """Ids that count how often they are joined with others."""

    num_joined = 0

    def __add__(self, other: "array[int]") -> "array[int]":
        Counted.num_joined += 1
        return array("i", self.tolist() + other.tolist())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2 * MIN_SHARED), st.integers(1, 9)), max_size=12))
def test_the_longest_shared_stretch_is_found_and_of_equal_ones_the_newest(turns: list[tuple[int, int, int]]) -> None:
    conversation, calls = Conversation(ScriptedTokenizer()), list[list[int]]()
    for step, (earlier, kept, num_new) in enumerate(turns):
        base = calls[earlier % len(calls)] if calls else []
        prompt_ids = base[: len(base) - kept if kept % 2 else kept] + [step] * num_new
        shared = [sum(accumulate(map(eq, prompt_ids, ids), mul)) for ids in calls]
        worth = [(n, at) for at, n in enumerate(shared) if n == len(calls[at]) or n >= MIN_SHARED]
        prompt = conversation.continue_from_ids(array("i", prompt_ids))
        found = prompt.prefix and (prompt.prefix.length, prompt.prefix.step_index)
        assert found == max(worth, default=None)
        completion = [100 + step] * (MIN_SHARED if num_new % 2 else 1)
        conversation.append_recorded(step, prompt, array("i", completion))
        calls.append(prompt_ids + completion)


def test_a_prompt_that_continues_the_last_call_is_compared_with_no_other() -> None:
    conversation, ids, num_turns = Conversation(ScriptedTokenizer()), list[int](), 50
    Counted.num_joined = 0
    for turn in range(num_turns):
        ids = [*ids, turn, turn]
        prompt = conversation.continue_from_ids(array("i", ids))
        assert (prompt.prefix.length if prompt.prefix else 0) == 3 * turn
        conversation.append_recorded(turn, prompt._replace(token_ids=Counted("i", ids)), array("i", [turn]))
        ids = [*ids, turn]
    assert Counted.num_joined == num_turns - 1


@pytest.mark.parametrize(
    ("template", "sampled"),
    [(PHI, ["Hello"]), (PHI, ["H", "e", "ll", "o"]), (MISTRAL, ["▁Hello"]), (MISTRAL, ["▁", "Hello"])],
)
def test_later_turns_are_exact_with_a_tokenizer_that_marks_the_beginning_of_a_text(
    template: str, sampled: list[str]
) -> None:
    tokenizer = llama_tokenizer(template)
    first, later = {"role": "user", "content": "hi"}, {"role": "user", "content": "hello, hi"}

    def text_of(*messages: dict[str, str]) -> str:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return text

    conversation = Conversation(tokenizer)
    prompt = conversation.prompt(text_of(first))
    completion = [*tokenizer.convert_tokens_to_ids(sampled), tokenizer.eos_token_id]
    answer = conversation.append_sampled(0, prompt, completion)
    assert answer == "Hello"
    continued = conversation.prompt(text_of(first, {"role": "assistant", "content": answer}, later))
    kept = [*prompt.token_ids, *completion]
    assert continued.prefix is not None
    assert continued.prefix.length == len(kept)
    whole = tokenizer.encode(text_of(first, {"role": "assistant", "content": answer}, later), add_special_tokens=False)
    end = whole.index(tokenizer.eos_token_id, len(prompt.token_ids)) + 1
    assert continued.token_ids.tolist() == [*kept, *whole[end:]]


@given(st.text(alphabet="ab \n", max_size=8), st.integers(0, 90))
def test_a_tokenizer_that_marks_no_beginning_encodes_what_goes_on_as_before(text: str, last_id: int) -> None:
    tokenizer = ScriptedTokenizer()
    assert ids_after(tokenizer, text, last_id) == tokenizer.encode(text, add_special_tokens=False)
