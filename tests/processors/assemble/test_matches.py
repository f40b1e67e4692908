"""Players and scores, as assembly takes them from the steps of a league's groups."""

from rollstream.eventlog import codec
from rollstream.schemas.events import RewardRecorded
from rollstream.schemas.events.training import MatchResult
from tests.rigs.steps_rig import RUN, attempt, closings_of, failed, started

POLICY = f"{RUN}/policy"


def game(member=0, *, rewards=(("X", 1.0), ("O", 0.0)), name="outcome", agents=("X", "O"), number=0):
    """An attempt in which each agent speaks once, with a reward for each."""
    begin, *steps, _, ended = attempt(member=member, number=number, num_steps=len(agents))
    steps = [step.model_copy(update={"agent": agent}) for step, agent in zip(steps, agents, strict=True)]
    base = {"run_id": RUN, "time_ms": 0, "group_id": begin.group_id, "rollout_id": begin.rollout_id}
    given = [
        RewardRecorded(**base, reward_index=index, name=name, value=value, agent=agent)
        for index, (agent, value) in enumerate(rewards)
    ]
    digest = codec.chain(begin.rollout_id, map(codec.content_digest, [*steps, *given]))
    counts = {"num_steps": len(steps), "num_rewards": len(given), "digest": digest}
    return [begin, *steps, *given, ended.model_copy(update=counts)]


def test_a_match_names_players_by_seat_and_an_opponent_has_no_trajectory():
    league = {"agents": {"X": POLICY}, "opponents": {"O": f"{POLICY}@1"}, "outcome": "outcome"}
    (closing,) = closings_of(started(size=2, **league), *game(1, rewards=(("X", 0.5), ("O", 0.5))), *game(0))
    assert closing.closed.matches == (
        MatchResult(member=0, players={"O": f"{POLICY}@1", "X": f"{POLICY}@3"}, scores={"O": 0.0, "X": 1.0}),
        MatchResult(member=1, players={"O": f"{POLICY}@1", "X": f"{POLICY}@3"}, scores={"O": 0.5, "X": 0.5}),
    )
    assert [(one.agent, one.reward) for one in closing.trajectories] == [("X", 1.0), ("X", 0.5)]
    assert [one.agent for one in closing.closed.members] == ["X", "X"]


def test_the_newest_weights_on_both_seats_are_a_match_and_both_are_trained():
    league = {"agents": {"X": POLICY, "O": POLICY}, "outcome": "outcome"}
    (closing,) = closings_of(started(size=1, **league), *game())
    (match,) = closing.closed.matches
    assert match.players == {"O": f"{POLICY}@3", "X": f"{POLICY}@3"}
    assert [one.agent for one in closing.closed.members] == ["O", "X"]


def test_a_rollout_with_an_unscored_seat_or_without_sampled_steps_yields_no_match():
    league = {"agents": {"X": POLICY}, "opponents": {"O": "scripted:perfect"}, "outcome": "outcome"}
    for records in (game(rewards=(("X", 1.0),)), game(name="move"), game(agents=("O", "O"))):
        (closing,) = closings_of(started(size=1, **league), *records)
        assert closing.closed.matches == ()
    (closing,) = closings_of(started(size=1, **league), failed(is_final=True))
    assert closing.closed.matches == ()


def test_a_group_without_a_league_has_no_matches():
    (closing,) = closings_of(started(size=1, agents={"X": POLICY, "O": POLICY}), *game())
    assert closing.closed.matches == ()


def test_of_two_attempts_at_a_member_the_first_complete_one_is_the_match():
    league = {"agents": {"X": POLICY}, "opponents": {"O": f"{POLICY}@1"}, "outcome": "outcome"}
    second = game(0, rewards=(("X", 0.0), ("O", 1.0)), number=1)
    (closing,) = closings_of(started(size=2, **league), *game(0), *second, *game(0), *game(1))
    assert [(match.member, match.scores["X"]) for match in closing.closed.matches] == [(0, 1.0), (1, 1.0)]
