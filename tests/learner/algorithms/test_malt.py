"""MALT: the tree of a task's rollouts, the worth of an answer, and which answers to one prompt are a pair."""

import hashlib
import itertools
import random
from array import array
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.learner.algorithms.pairs import Item, pairs_of, rows_of_pairs
from rollstream.schemas import ids
from rollstream.schemas.algorithms import MaltSettings
from tests.rigs.pair_items import item_of

GROUP = ("run-1/rl/e00000/t00000", "verifier")


def leaves(rewards: Iterable[float]) -> list[Item]:
    """The items of rollouts that are the leaves of a tree with two answers to each prompt."""
    found = list(rewards)
    depth = ids.tree_depth(len(found), 2)
    items = []
    for member, reward in enumerate(found):
        path = [member >> (depth - 1 - level) & 1 for level in range(depth)]
        for level, answer in enumerate(path):
            items.append(item_of(GROUP, (9, *path[:level]), (answer,), (None, None, reward)))
    return items


def pairs(items: Iterable[Item], **settings: Any) -> list[tuple[Any, ...]]:
    """Path of the node, chosen and rejected answer, and the difference of their values."""

    def read(ids_: bytes) -> tuple[int, ...]:
        return tuple(array("i", ids_))

    return [
        (read(one.prompt_ids)[1:], *read(one.chosen_ids), *read(one.rejected_ids), one.score_diff)
        for one in pairs_of(items, MaltSettings(**settings))
    ]


def test_an_answer_is_worth_the_mean_reward_of_the_rollouts_through_it() -> None:
    found = pairs(leaves([1.0, 0.0, 0.0, 0.0]), pair_selection="interval", min_score_diff=0.1)
    assert found == [((), 0, 1, 0.5), ((0,), 0, 1, 1.0)]


def test_rewards_and_scores_of_steps_play_no_part() -> None:
    items = [item._replace(scores=(5.0, -item.scores[2], item.scores[2])) for item in leaves([1.0, -1.0])]
    assert pairs(items) == [((), 0, 1, 2.0)]


def test_a_pair_has_one_answer_on_each_side_of_the_midpoint() -> None:
    rewards = [1.0, 0.5, 0.5, 0.25]
    assert pairs(leaves(rewards)) == []
    assert pairs(leaves(rewards), midpoint=0.5) == [((), 0, 1, 0.375), ((1,), 0, 1, 0.25)]
    assert pairs(leaves(rewards), midpoint=0.5, min_score_diff=0.3) == [((), 0, 1, 0.375)]


def test_an_interval_takes_answers_on_one_side() -> None:
    rewards = [1.0, 0.5, 0.5, 0.25]
    assert len(pairs(leaves(rewards), pair_selection="interval", min_score_diff=0.25)) == 3
    assert len(pairs(leaves(rewards), pair_selection="interval", min_score_diff=0.3)) == 2


def test_a_node_has_one_pair_or_as_many_as_are_asked_for() -> None:
    items = [item_of(GROUP, (9,), (answer,), (None, None, answer - 1.0)) for answer in range(4)]
    assert pairs(items) == [((), 3, 0, 3.0)]
    assert len(pairs(items, max_pairs_per_turn=None)) == 3
    assert pairs(items, max_pairs_per_turn=2) == [((), 3, 0, 3.0), ((), 2, 0, 2.0)]


def digest(items: list[Item]) -> str:
    rows, sides = rows_of_pairs(pairs_of(items, MaltSettings(max_pairs_per_turn=None)))
    hasher = hashlib.sha256(repr(sides).encode())
    for row in rows:
        hasher.update(row.token_ids.tobytes() + row.mask.tobytes())
    return hasher.hexdigest()


@given(st.lists(st.floats(-1, 1), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_the_same_rollouts_in_any_order_give_the_same_pairs(rewards: list[float], rng: random.Random) -> None:
    items = leaves(rewards)
    shuffled = rng.sample(items, len(items))
    assert digest(shuffled) == digest(items)


@pytest.mark.parametrize(("num", "branching", "depth"), [(8, 2, 3), (9, 3, 2), (7, 2, 2), (1, 2, 0), (8, 1, 0)])
def test_the_depth_of_a_tree(num: int, branching: int, depth: int) -> None:
    assert ids.tree_depth(num, branching) == depth


def test_members_sample_alike_as_long_as_they_share_their_branch() -> None:
    seeds = [
        [
            ids.answer_seed(5, member, "agent", level, level=level, shared_by=2 ** max(0, 2 - level))
            for level in range(4)
        ]
        for member in range(8)
    ]
    for one, other in itertools.combinations(range(8), 2):
        shared = [level for level in range(4) if seeds[one][level] == seeds[other][level]]
        common = next(level for level in range(3) if one >> (2 - level) != other >> (2 - level))
        assert shared == list(range(common))


def test_the_reference_is_the_policy_of_the_iteration_unless_the_base_is_asked_for() -> None:
    needs = MaltSettings().needs
    assert (needs.pairs, needs.reference, needs.proximal) == (True, False, True)
    needs = MaltSettings(reference="base").needs
    assert (needs.reference, needs.proximal) == (True, False)
