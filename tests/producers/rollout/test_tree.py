"""A task's rollouts as the branches of a tree: members answer alike up to where their branches part."""

import random

from rollstream.schemas import ids
from tests.producers.conftest import task_of


def random_letter(prompt, rng: random.Random, version):
    return rng.choice("abcdefghijklmnopqrstuvwxyz"), -0.5


def texts_of(play, **settings):
    task = task_of("guess_number", **settings)
    return [play(task, random_letter, member=member).texts() for member in range(4)]


def test_members_share_what_their_branches_share(play):
    texts = texts_of(play, responses_per_step=2, max_turns=3)
    first = [answers[0] for answers in texts]
    assert first[0] == first[1] != first[2] == first[3]
    assert len({tuple(answers[:2]) for answers in texts}) == 4, "the last level is each member's own"


def test_without_a_tree_every_member_answers_for_itself(play):
    assert len({answers[0] for answers in texts_of(play, max_turns=3)}) > 2


def test_an_answer_has_the_seed_that_it_had_before_there_were_trees():
    assert ids.answer_seed(11, 3, "agent", 2) == ids.derive_seed(ids.member_seed(11, 3), "agent", 2)
