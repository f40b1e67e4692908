"""Derived identities and binary arrays."""

import base64
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.schemas import ids, tokens
from rollstream.schemas.errors import DecodeError

INT32 = st.integers(min_value=-(2**31), max_value=2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def test_ids_contain_those_that_they_belong_to() -> None:
    group = ids.group_id("run-1", "rl", 2, 3)
    rollout = ids.rollout_id(group, 4, 1)
    assert rollout == "run-1/rl/e00002/t00003/m4/a1"
    assert ids.run_of(ids.trajectory_id(rollout, "agent")) == "run-1"


def test_seeds_depend_on_every_part_and_on_their_boundaries() -> None:
    assert ids.derive_seed(1, "a") == ids.derive_seed(1, "a")
    assert len({ids.derive_seed(1, "a"), ids.derive_seed(2, "a"), ids.derive_seed(1, "b"), ids.derive_seed("1a")}) == 4
    assert 0 <= ids.derive_seed("x") < 2**63


@given(st.lists(INT32))
def test_token_ids_come_back(values: list[int]) -> None:
    text = tokens.encode_ids(values)
    assert list(tokens.decode_ids(text)) == values
    assert tokens.count(text) == len(values)


@given(st.lists(FLOAT32))
def test_log_probabilities_come_back(values: list[float]) -> None:
    assert list(tokens.decode_floats(tokens.encode_floats(values))) == values


@pytest.mark.parametrize("text", ["AAA", "AAAAAAA=", "not base64!"])
def test_an_incomplete_array_is_refused(text: str) -> None:
    with pytest.raises(DecodeError):
        tokens.decode_ids(text)


KEPT = st.lists(st.sets(st.integers(0, 2**31 - 1), max_size=6).map(sorted), max_size=20)


@given(KEPT)
def test_kept_ids_come_back(sets: list[list[int]]) -> None:
    lengths, kept = [len(one) for one in sets], [token for one in sets for token in one]
    found = tokens.decode_kept(tokens.encode_kept(tokens.KeptIds(lengths, kept)), len(sets))
    assert (list(found.lengths), list(found.ids)) == (lengths, kept)


def packed(*values: int) -> str:
    return base64.b64encode(zlib.compress(array("i", values).tobytes())).decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not base64!", "not base64"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}===", "not base64"),
        ("AAAA", "not base64 of a zlib stream"),
        (base64.b64encode(zlib.compress(b"abc")).decode(), "cut off"),
        (packed(2, 1, 1, 5, 6)[:-8], "cut off"),
        (packed(), "not those of 2"),
        (packed(3, 1, 1, 1, 5, 6, 7), "not those of 2"),
        (packed(2, 1), "not those of 2"),
        (packed(2, 1, 2, 5, 6), "do not add up"),
        (packed(2, 3, -1, 5, 6), "do not add up"),
        (packed(2, 1, 1, 2**31 - 1, 1), "does not fit into an int32"),
    ],
)
def test_invalid_kept_ids_are_refused(text: str, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        tokens.decode_kept(text, 2)


def test_kept_ids_that_unpack_to_too_much_are_refused() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(tokens.MAX_KEPT_BYTES + 4))).decode()
    with pytest.raises(DecodeError, match="more than 67108864 bytes"):
        tokens.decode_kept(bomb, 2)
