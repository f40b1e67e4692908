"""The curriculum's pure functions: NAT's verified numbers, and steering by a windowed reward store."""

import random

from hypothesis import given
from hypothesis import strategies as st

from rollstream.processors.curate.candidates import Stats
from rollstream.processors.curate.curriculum import (
    CurriculumProgress,
    GroupRewards,
    Kept,
    begin,
    choose,
    continue_permutation,
    epoch_permutation,
    epochwise_filter,
    expand,
    included,
    share_of,
)
from rollstream.schemas.ids import derive_seed
from rollstream.schemas.settings import CurriculumSettings

ON = CurriculumSettings(enabled=True)


def groups_of(num, reward_range=1.0):
    return [GroupRewards(f"g{i:02d}", f"x{i:02d}", (float(i), i + reward_range)) for i in range(num)]


def stats(mean, reward_range=1.0):
    return Stats(mean, 0.1, 8, reward_range)


def run_epochs(num_epochs, settings=ON, groups=None):
    progress, sizes = begin(settings), []
    for epoch in range(num_epochs):
        progress, kept = epochwise_filter(groups or groups_of(10), settings, progress, epoch, seed=1)
        sizes.append(len(kept))
    return sizes


def test_ten_groups_open_up_in_the_sequence_that_nat_was_seen_to_follow():
    assert run_epochs(21) == [3] * 4 + [5] * 5 + [7] * 5 + [9] * 5 + [10] * 2


def test_the_easiest_groups_come_first_unless_sorting_ascends():
    _, easiest = epochwise_filter(groups_of(10), ON, begin(ON), 0, seed=1)
    assert [group.group_id for group in easiest] == ["g09", "g08", "g07"]
    ascending = ON.model_copy(update={"sort_ascending": True})
    _, hardest = epochwise_filter(groups_of(10), ascending, begin(ascending), 0, seed=1)
    assert [group.group_id for group in hardest] == ["g00", "g01", "g02"]


def test_groups_whose_rewards_hardly_differ_are_dropped_before_the_percentile():
    groups = [*groups_of(5, reward_range=0.05), *[GroupRewards(f"h{i}", f"y{i}", (0.0, 0.5)) for i in range(4)]]
    _, kept = epochwise_filter(groups, ON, begin(ON), 0, seed=1)
    assert [group.group_id for group in kept] == ["h0", "h1"]


def test_nothing_that_differs_keeps_nothing_and_does_not_expand():
    start = begin(ON)
    empty = [GroupRewards("a", "x", ()), *groups_of(3, reward_range=0.0)]
    assert epochwise_filter(empty, ON, start, 4, seed=1) == (start, [])


def test_a_single_group_is_held_to_the_variance_like_any_other():
    flat, differing = GroupRewards("g", "x", (1.0,) * 8), GroupRewards("g", "x", (0.0, 1.0))
    assert epochwise_filter([flat], ON, begin(ON), 0, seed=1) == (begin(ON), [])
    assert epochwise_filter([differing], ON, begin(ON), 4, seed=1) == (CurriculumProgress(0.5, 4), [Kept("g", (0, 1))])


def test_with_nats_rule_a_single_group_is_kept_whatever_its_variance_and_only_subsampled():
    nats = ON.model_copy(update={"filter_single_group": False})
    group = GroupRewards("g", "x", (1.0,) * 8)
    assert epochwise_filter([group], nats, begin(nats), 9, seed=1) == (begin(nats), [Kept("g", tuple(range(8)))])
    half = nats.model_copy(update={"random_subsample": 0.45})
    _, [kept] = epochwise_filter([group], half, begin(half), 0, seed=1)
    assert len(kept.members) == 4
    assert list(kept.members) == sorted(set(kept.members))


def test_a_subsample_caps_the_number_of_groups_by_example_whatever_their_order():
    settings = ON.model_copy(update={"random_subsample": 0.2, "initial_percentile": 1.0})
    _, kept = epochwise_filter(groups_of(10), settings, begin(settings), 0, seed=1)
    _, again = epochwise_filter(groups_of(10)[::-1], settings, begin(settings), 0, seed=1)
    assert len(kept) == 2
    assert kept == again
    draws = {
        tuple(group.group_id for group in epochwise_filter(groups_of(10), settings, begin(settings), 0, seed)[1])
        for seed in range(20)
    }
    assert len(draws) > 5


def test_a_subsample_may_be_drawn_by_chance_as_nat_does():
    settings = ON.model_copy(update={"random_subsample": 0.3, "initial_percentile": 1.0, "seeded_subsample": False})
    draws = {
        tuple(
            group.group_id
            for group in epochwise_filter(groups_of(10), settings, begin(settings), 0, 1, random.Random(number))[1]
        )
        for number in range(20)
    }
    assert {len(drawn) for drawn in draws} == {3}
    assert len(draws) > 5


def test_a_curriculum_that_is_off_keeps_all():
    off = CurriculumSettings()
    assert begin(off).percentile == 1.0
    progress, kept = epochwise_filter(groups_of(4, reward_range=0.0), off, begin(off), 0, seed=1)
    assert (progress, len(kept)) == (begin(off), 4)


def test_the_percentile_stops_at_one():
    progress = CurriculumProgress(0.9)
    assert expand(progress, 3, ON) is progress
    assert expand(progress, 4, ON) == CurriculumProgress(1.0, 4)
    assert expand(CurriculumProgress(1.0, 4), 50, ON) == CurriculumProgress(1.0, 4)


def test_a_share_is_rounded_up_without_float_noise():
    assert [share_of(100, 0.55), share_of(10, 0.3 + 0.2 + 0.2), share_of(3, 0.34), share_of(0, 0.5)] == [55, 7, 2, 0]


@given(st.integers(1, 12), st.integers(0, 40), st.integers(1, 30), st.integers(0, 5))
def test_every_epoch_permutation_has_every_example_once_and_goes_on_over_epochs(num, start, count, seed):
    examples = [f"x{i}" for i in range(num)]
    whole = epoch_permutation(examples, 0, start + count, seed)
    assert epoch_permutation(set(examples), start, count, seed) == whole[start:]
    for first in range(0, len(whole) - num + 1, num):
        assert sorted(whole[first : first + num]) == sorted(examples)


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=6), st.integers(0, 5))
def test_a_permutation_that_is_used_again_changes_no_choice(num, asked, seed):
    examples = [f"x{i}" for i in range(num)]
    newest = None
    for start, count in asked:
        chosen, newest = continue_permutation(examples, start, count, seed, newest)
        turns = (start + count) // num + 1
        whole = [
            name
            for turn in range(turns)
            for name in sorted(examples, key=lambda name, turn=turn: (derive_seed(seed, "walk", turn, name), name))
        ]
        assert chosen == whole[start : start + count]
    other = [f"y{i}" for i in range(num)]
    assert set(continue_permutation(other, 0, num, seed, newest)[0]) == set(other)


class Hashed(str):
    """A name that counts how often names were hashed."""

    num_hashed = 0

    def __str__(self):
        Hashed.num_hashed += 1
        return super().__str__()

    def encode(self, *args, **options):
        Hashed.num_hashed += 1
        return super().encode(*args, **options)


def test_epochs_of_one_turn_hash_the_dataset_once(partition):
    num_examples, num_epochs = 200, 60
    partition.dataset = {Hashed(f"x{number:03d}"): {} for number in range(num_examples)}
    Hashed.num_hashed = 0
    partition.start_run()
    partition.start_job(tasks_per_epoch=5, num_epochs=num_epochs)
    asked = [task.example_id for epoch in range(num_epochs) for task in partition.start_epoch(epoch)]
    assert asked == epoch_permutation(sorted(partition.dataset), 0, 300, derive_seed(7, "run-1/rl", "curriculum"))
    assert Hashed.num_hashed <= 2 * 2 * num_examples, "two turns, and those of this test"


@given(st.integers(1, 30), st.integers(0, 3), st.integers(0, 40), st.integers(0, 5))
def test_the_beginning_of_a_permutation_is_that_of_the_whole_one(num, turn, count, seed):
    examples = {f"x{i:02d}": {} for i in range(num)}
    whole = continue_permutation(examples, turn * num, num + count, seed, None)[0]
    assert epoch_permutation(examples.keys(), turn * num, count, seed) == whole[:count]


def test_epoch_permutations_differ():
    examples = [f"x{i}" for i in range(20)]
    assert epoch_permutation(examples, 0, 20, 1) != epoch_permutation(examples, 20, 20, 1)
    assert epoch_permutation([], 0, 5, 1) == []


def test_the_share_let_in_is_of_all_known_examples_and_has_only_those_that_differ():
    known = {f"x{i}": stats(i / 10, reward_range=0.0 if i == 9 else 0.5) for i in range(10)}
    assert included(known, ON, CurriculumProgress(0.3)) == ["x8", "x7", "x6"]
    ascending = ON.model_copy(update={"sort_ascending": True})
    assert included(known, ascending, CurriculumProgress(0.3)) == ["x0", "x1", "x2"]


def test_ties_are_ranked_by_example():
    assert included({name: stats(0.5) for name in "cab"}, ON, CurriculumProgress(0.6)) == ["a", "b"]


def pick_examples(known, examples, *, settings=ON, last_asked=None, epoch=3, count=20, seed=5, percentile=0.3):
    return choose(
        examples, known, last_asked or {}, settings, CurriculumProgress(percentile), epoch=epoch, count=count, seed=seed
    )


def test_unknown_examples_and_those_let_in_are_chosen_and_excluded_ones_at_the_explore_share():
    examples = [f"x{i:02d}" for i in range(40)]
    known = {name: stats(number / 40) for number, name in enumerate(examples[:30])}
    admitted = set(examples[21:30]) | set(examples[30:])
    no_exploring = ON.model_copy(update={"explore_share": 0.0})
    assert set(pick_examples(known, examples, settings=no_exploring, count=19)) == admitted
    explored = sum(
        name not in admitted for seed in range(200) for name in pick_examples(known, examples, seed=seed, count=20)
    )
    assert 150 <= explored <= 250


def test_the_longest_not_asked_for_come_first_and_a_small_pool_goes_round():
    examples = ["a", "b", "c"]
    chosen = pick_examples({}, examples, last_asked={"a": 2, "b": 1}, count=7)
    assert chosen == ["c", "b", "a", "c", "b", "a", "c"]


def test_when_everything_is_excluded_the_excluded_are_rolled_out():
    known = {name: stats(1.0, reward_range=0.0) for name in "abc"}
    assert sorted(pick_examples(known, list("abc"), count=3)) == ["a", "b", "c"]
    assert pick_examples({}, [], count=3) == []


@given(
    st.integers(0, 12), st.integers(0, 30), st.dictionaries(st.integers(0, 11), st.integers(0, 4)), st.integers(0, 5)
)
def test_choosing_ranks_the_pool_by_the_last_request_then_by_the_seeded_order(num, count, asked, seed):
    examples = [f"x{i:02d}" for i in range(num)]
    last_asked = {f"x{i:02d}": epoch for i, epoch in asked.items()}
    pool = sorted(examples, key=lambda name: (last_asked.get(name, -1), derive_seed(seed, "pool", 3, name), name))
    expected = [pool[index % num] for index in range(count)] if num else []
    assert pick_examples({}, examples, last_asked=last_asked, count=count, seed=seed) == expected


def test_choosing_hashes_only_the_examples_that_were_not_asked_for_longest():
    examples = [Hashed(f"x{i:03d}") for i in range(100)]
    last_asked = {name: index // 5 for index, name in enumerate(examples)}
    Hashed.num_hashed = 0
    chosen = pick_examples({}, examples, last_asked=last_asked, count=8)
    assert Hashed.num_hashed == 10
    assert set(chosen[:5]) == set(examples[:5])
    assert set(chosen[5:]) < set(examples[5:10])


def test_choosing_does_not_depend_on_the_order_of_the_dataset():
    known = {f"x{i}": stats(i / 10) for i in range(6)}
    examples = [f"x{i}" for i in range(12)]
    assert pick_examples(known, examples) == pick_examples(dict(reversed(known.items())), examples[::-1])


def test_a_subsample_thins_what_is_let_in_but_not_the_unknown():
    examples = [f"x{i:02d}" for i in range(20)]
    known = {name: stats(0.5) for name in examples[:10]}
    settings = ON.model_copy(update={"random_subsample": 0.5, "explore_share": 0.0})
    chosen = set(pick_examples(known, examples, settings=settings, percentile=0.4, count=40))
    assert set(examples[10:]) < chosen
    assert len(chosen) == 12
