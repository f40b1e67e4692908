"""The windowed reward store: statistics over the last versions, whatever the order of arrival and repeats."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.eventlog.codec import canonical_digest
from rollstream.processors.curate.candidates import Entry, Window, bounds_by_agent

ENTRIES = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(0, 20),
        st.lists(st.floats(-10, 10, allow_nan=False), max_size=4).map(tuple),
    ),
    max_size=12,
).map(lambda rows: [(example, f"g{i}", Entry(version, rewards)) for i, (example, version, rewards) in enumerate(rows)])


def filled(entries):
    window = Window()
    for example_id, group_id, entry in entries:
        window.add(example_id, group_id, entry)
    return window


def test_statistics_cover_the_groups_inside_the_window_only():
    window = filled(
        [("a", "g1", Entry(1, (0.0, 9.0))), ("a", "g2", Entry(5, (0.0, 1.0))), ("a", "g3", Entry(6, (1.0,)))]
    )
    found = window.stats("a", since=5)
    assert found is not None
    assert (found.mean, found.count, found.reward_range) == (pytest.approx(2 / 3), 3, 1.0)
    assert found.variance == pytest.approx(statistics.pvariance([0, 1, 1]))
    assert window.stats("a", since=7) is None
    assert window.stats("b", since=0) is None
    assert window.known(since=7) == {}


def test_the_range_of_several_agents_is_the_largest_of_one_agent_over_all_groups():
    first = Entry(1, (0.5, 0.5), bounds_by_agent([("o", 0.0), ("x", 1.0), ("o", 0.0), ("x", 1.0)]))
    second = Entry(2, (0.5, 0.5), bounds_by_agent([("x", 0.75), ("o", 0.25)]))
    window = filled([("a", "g1", first), ("a", "g2", second)])
    assert [window.known(since)["a"].reward_range for since in (1, 2)] == [0.25, 0.0]


def test_an_example_without_rewards_stays_unknown():
    assert filled([("a", "g1", Entry(1, ()))]).known(since=0) == {}


@given(ENTRIES, st.randoms(use_true_random=False), st.integers(0, 20))
def test_neither_order_nor_repeats_change_the_windows_statistics(entries, random, since):
    shuffled = entries + entries[: len(entries) // 2]
    random.shuffle(shuffled)
    one, other = filled(entries), filled(shuffled)
    assert one.known(since) == other.known(since)
    assert canonical_digest(one.content(since)) == canonical_digest(other.content(since))


@given(ENTRIES, st.integers(0, 20), st.integers(0, 20))
def test_forgetting_what_left_the_window_changes_nothing_inside_it(entries, before, since):
    whole, pruned = filled(entries), filled(entries)
    pruned.forget(min(before, since))
    assert whole.known(since) == pruned.known(since)
    assert whole.content(since) == pruned.content(since)


@given(ENTRIES)
def test_statistics_agree_with_the_definition(entries):
    rewards = [reward for example, _, entry in entries if example == "a" for reward in entry.rewards]
    found = filled(entries).stats("a", since=0)
    if not rewards:
        assert found is None
        return
    assert found is not None
    assert found.mean == pytest.approx(statistics.fmean(rewards))
    assert found.variance == pytest.approx(statistics.pvariance(rewards))
    assert (found.count, found.reward_range) == (len(rewards), max(rewards) - min(rewards))
