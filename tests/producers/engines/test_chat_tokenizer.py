"""Tokenizers of rollouts: what transformers' own tokenizer returns, and bounded memory of it."""

import copy
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rollstream.learner.tiny_model import make_tiny_model
from rollstream.producers.engines import chat_tokenizer
from rollstream.producers.engines.chat_tokenizer import ChatTokenizer, TextCache, load_tokenizer
from rollstream.schemas.errors import ModelError

CHAT = [{"role": "user", "content": "2 + 2?"}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model's tokenizer, as transformers loads it."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text(max_size=40), has_special=st.booleans())
def test_ids_and_texts_are_those_of_transformers(plain: Any, text: str, has_special: bool) -> None:
    tokenizer = ChatTokenizer(plain)
    ids = tokenizer.encode(text, add_special_tokens=has_special)
    assert ids == plain.encode(text, add_special_tokens=has_special)
    for skips in (True, False):
        assert tokenizer.decode(array("i", ids), skip_special_tokens=skips) == plain.decode(
            ids, skip_special_tokens=skips
        )


def test_a_folder_without_the_files_of_a_tokenizer_is_refused_though_transformers_makes_an_empty_one(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    load_tokenizer(str(folder))
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"the tokenizer of model .*tiny is empty; add tokenizer\.json"):
        load_tokenizer(str(folder))


def test_texts_of_single_tokens_are_those_of_transformers_and_as_many_as_the_bound_are_remembered(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_tokenizer, "MAX_TOKEN_TEXTS", 5)
    tokenizer = ChatTokenizer(plain)
    for _ in range(2):
        for number in range(len(plain)):
            for skips in (True, False):
                expected = plain.decode([number], skip_special_tokens=skips)
                assert tokenizer.decode(array("i", [number]), skip_special_tokens=skips) == expected
    assert len(tokenizer._token_texts) == 5


def test_a_template_is_rendered_as_by_transformers_for_each_set_of_options(plain: Any) -> None:
    tokenizer = ChatTokenizer(plain)
    for opens in (True, False, True):
        expected = plain.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=opens)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=opens) == expected
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for options in (
        {},
        {"tools": tools},
        {"chat_template": "{{ messages }}{{ tools }}{{ eos_token }}", "tools": tools},
    ):
        expected = plain.apply_chat_template(CHAT, tokenize=False, **options)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False, **options) == expected
    with_ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert with_ids["input_ids"] == plain.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


def test_a_template_sees_the_names_that_transformers_gives_it(plain: Any) -> None:
    own = copy.deepcopy(plain)
    own.chat_template = (
        "{%- for message in messages %}\n  {{ message | tojson }}{{ message['content'].upper() }}{% endfor %}"
        "{{ tools }}{{ documents }}{{ eos_token }}{{ missing }}{{ namespace(a=1).a }}"
        "{% if tools %}{{ 1 / 0 }}{% endif %}"
    )
    tokenizer = ChatTokenizer(own)
    expected = own.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer._template is not None
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == expected
    with pytest.raises(ZeroDivisionError) as failure:
        tokenizer.apply_chat_template(CHAT, tokenize=False, tools=[{}])
    lines = [one.lineno for one in failure.traceback if str(one.path).endswith("<template>")]
    assert lines == [1]  # of the template, counted from 0, and not of the code that jinja makes of it
    with pytest.raises(ValueError, match="Tools should either be a JSON schema"):
        tokenizer.apply_chat_template(CHAT, tokenize=False, tools=["add"])
    with pytest.raises(ValueError, match="empty conversation"):
        tokenizer.apply_chat_template([], tokenize=False)


def test_messages_are_distinguished_by_the_order_of_their_keys(plain: Any) -> None:
    """A template may write a tool call's arguments in their own order."""

    class Rendering:
        eos_token_id = 0
        num_calls = 0

        def apply_chat_template(self, conversation: Any, **options: Any) -> str:
            self.num_calls += 1
            return str(conversation)

    wrapped = Rendering()
    tokenizer = ChatTokenizer(wrapped)
    for _ in range(2):
        for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1.0, "b": 2}):
            messages = [{"role": "assistant", "arguments": arguments}]
            assert tokenizer.apply_chat_template(messages, tokenize=False) == str(messages)
    assert wrapped.num_calls == 3


def test_a_caller_may_change_the_ids_that_it_got(plain: Any) -> None:
    tokenizer = ChatTokenizer(plain)
    tokenizer.encode("abc").append(99)
    assert tokenizer.encode("abc") == plain.encode("abc")


def test_messages_that_json_cannot_hold_are_left_to_the_template(plain: Any) -> None:
    tokenizer = ChatTokenizer(plain)
    odd = [{"role": "user", "content": "x", "unused": object()}]
    expected = plain.apply_chat_template(odd, tokenize=False)
    assert tokenizer.apply_chat_template(odd, tokenize=False) == expected


def test_other_attributes_are_the_wrapped_tokenizers(plain: Any) -> None:
    tokenizer = ChatTokenizer(plain)
    assert tokenizer.chat_template == plain.chat_template
    assert tokenizer.pad_token_id == plain.pad_token_id


def test_a_tokenizer_that_changes_texts_afterwards_is_asked_itself(plain: Any) -> None:
    class Cleaning:
        eos_token_id = 0
        clean_up_tokenization_spaces = True
        backend_tokenizer = plain.backend_tokenizer

        def encode(self, text: str, **options: Any) -> list[int]:
            return [7]

        def decode(self, ids: Any, **options: Any) -> str:
            return "clean"

    tokenizer = ChatTokenizer(Cleaning())
    assert (tokenizer.encode("a"), tokenizer.decode([1])) == ([7], "clean")


def test_memory_is_bounded_by_number_and_by_size() -> None:
    cache = TextCache(max_entries=3, max_characters=100)
    computed: list[str] = []

    def get(key: str, size: int = 1) -> str:
        def compute() -> str:
            computed.append(key)
            return key

        return cache.get(key, size, compute)

    for key in "abcabd":
        assert get(key) == key
    assert computed == list("abcd")  # c went for d: a and b were used since
    get("c")
    assert computed == list("abcdc")
    for key in ("x", "y", "z"):
        get(key, size=26)  # more than a quarter of all: never remembered
    get("d")
    assert computed == [*"abcdc", *"xyz"]
    for key in "efgh":
        get(key, size=25)
    for key in "gh":
        get(key, size=25)
    assert computed[-4:] == list("efgh")
