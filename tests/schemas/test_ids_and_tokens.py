"""Derived identities and binary arrays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.schemas import ids, tokens
from rollstream.schemas.errors import DecodeError

INT32 = st.integers(min_value=-(2**31), max_value=2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def test_ids_say_where_they_belong() -> None:
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
def test_what_is_no_whole_array_is_refused(text: str) -> None:
    with pytest.raises(DecodeError):
        tokens.decode_ids(text)
