"""Requests that join, rows that move and sequences that are kept: properties for any arrivals, as numbers only."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollstream.producers.engines.scheduling import (
    BLOCK,
    Block,
    JoinLimits,
    KeptSequence,
    PrefixCache,
    WaitingPrompt,
    holes_filled,
    joining,
)

CANDIDATES = st.lists(
    st.builds(WaitingPrompt, st.sampled_from("abc"), st.integers(1, 400), st.integers(0, 9)), max_size=30
).map(lambda found: sorted(found, key=lambda one: -one.waited))
LIMITS = st.builds(JoinLimits, max_rows=st.integers(1, 20), max_padded_tokens=st.integers(1, 2000))
HELD = st.sets(st.sampled_from("abc"))


@given(waiting=CANDIDATES, num_live=st.integers(0, 25), limits=LIMITS, held=HELD)
def test_joining_requests_are_of_one_group_in_order_and_within_the_limits(waiting, num_live, limits, held):
    chosen = joining(waiting, num_live=num_live, limits=limits, held=held)
    groups = {waiting[index].model_group for index in chosen}
    assert len(groups) <= 1
    assert not groups & held
    assert num_live + len(chosen) <= max(limits.max_rows, num_live)
    for group in groups:
        assert chosen == [index for index, one in enumerate(waiting) if one.model_group == group][: len(chosen)]
    padded = max((waiting[index].num_tokens for index in chosen), default=0) * len(chosen)
    assert padded <= limits.max_padded_tokens or len(chosen) == 1


@given(waiting=CANDIDATES, num_live=st.integers(0, 25), limits=LIMITS, held=HELD)
def test_nobody_waits_for_ever(waiting, num_live, limits, held):
    free = [one for one in waiting if one.model_group not in held]
    chosen = joining(waiting, num_live=num_live, limits=limits, held=held)
    if free and num_live < limits.max_rows and (not num_live or free[0].waited >= limits.max_wait):
        assert chosen
        assert waiting[chosen[0]] is free[0]


@given(st.lists(st.booleans(), max_size=40))
def test_moves_leave_the_live_rows_first_and_touch_no_more_than_the_holes(is_live):
    rows = [index if live else None for index, live in enumerate(is_live)]
    moves = holes_filled(is_live)
    for source, target in moves:
        assert rows[target] is None
        rows[source], rows[target] = None, rows[source]
    live = sum(is_live)
    assert all(row is not None for row in rows[:live])
    assert all(row is None for row in rows[live:])
    assert len(moves) == sum(not one for one in is_live[:live])


def ids(values):
    return np.asarray(values, np.int32)


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 5 * BLOCK), st.integers(0, 3)).map(
        lambda made: [*[made[0]] * (made[1] // 2), *range(made[1] - made[1] // 2), made[2]]
    ),
    min_size=1,
    max_size=20,
)


@given(sequences=SEQUENCES, max_bytes=st.integers(0, 4000), asked=SEQUENCES)
def test_a_found_prefix_is_one_of_the_prompt_and_the_cache_is_bounded(sequences, max_bytes, asked):
    cache = PrefixCache(max_bytes)
    for number, sequence in enumerate(sequences):
        after = number if number % 2 else None
        cache.add(KeptSequence(ids(sequence), 0, Block(None, 10 * len(sequence)), max(1, len(sequence) - 2), after))
        assert cache.size_bytes <= max_bytes
    for prompt in [*asked, *sequences]:
        match = cache.find(ids(prompt))
        if match is None:
            continue
        assert list(match.kept.ids[: match.length]) == prompt[: match.length]
        if match.is_whole:
            assert match.length == len(prompt) == match.kept.prompt_length
            assert match.kept.after_prompt is not None
        else:
            assert BLOCK <= match.length < len(prompt)
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_a_long_beginning_is_found_to_its_last_token_and_the_one_used_longest_ago_goes_first():
    cache = PrefixCache(250)
    first, second, third = (ids([number] * 40) for number in range(3))
    cache.add(KeptSequence(first, 0, Block(None, 100)))
    cache.add(KeptSequence(second, 0, Block(None, 100)))
    match = cache.find(ids([0] * 37 + [9] * 20))
    assert match is not None
    assert (match.length, match.is_whole) == (37, False)
    cache.add(KeptSequence(third, 0, Block(None, 100)))
    found = [cache.find(ids([number] * 50)) is not None for number in range(3)]
    assert found == [True, False, True]


def test_memory_that_sequences_share_is_counted_once_and_freed_with_the_last():
    cache = PrefixCache(1000)
    shared = Block(None, 300)
    one, other = KeptSequence(ids([1] * 20), 0, shared), KeptSequence(ids([2] * 20), 1, shared)
    cache.add(one)
    cache.add(other)
    assert cache.size_bytes == 300
    cache.remove(one)
    assert cache.size_bytes == 300
    cache.remove(one)
    cache.remove(other)
    assert cache.size_bytes == 0
