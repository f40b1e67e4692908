"""One attempt at a rollout: its events, its failures, and that a repeat is equal."""

from rollstream.schemas import tokens
from rollstream.schemas.events import RolloutEnded, RolloutFailed, RolloutStarted

from .conftest import answers, task_of


def test_an_attempt_begins_ends_and_is_complete(play):
    played = play(task_of(inputs={"secret": 7}), answers("5", "7"))
    assert isinstance(played.events[0], RolloutStarted)
    assert [step.event_type for step in played.steps] == ["LLM_END", "TOOL_END", "LLM_END", "TOOL_END"]
    assert [reward.value for reward in played.rewards] == [0.85]
    assert isinstance(played.last, RolloutEnded)
    played.assert_complete()


def test_a_repeat_with_the_equal_seed_gives_equal_content(play):
    first, again = play(task_of(seed=3)), play(task_of(seed=3))
    assert first.contents() == again.contents()
    assert play(task_of(seed=4)).texts() != first.texts()


def test_members_differ_but_share_what_they_are_compared_under(play):
    members = [play(task_of(seed=3), member=member) for member in range(6)]
    assert len({tuple(member.texts()) for member in members}) > 1
    assert len({member.steps[0].rollout_id for member in members}) == 6


def test_a_demonstration_has_text_and_tokens_but_no_logprobs(play):
    played = play(task_of(policy="demonstration", seed=5))
    played.assert_complete()
    for step in played.steps[::2]:
        assert step.llm.logprobs is None
        assert step.llm.spans == ()
        assert tokens.decode_ids(step.llm.completion_ids)[-1] == 1
        assert step.data["output"].isdigit()


def test_an_unknown_environment_fails_as_data(play):
    failed = play(task_of("guess_nummer")).last
    assert isinstance(failed, RolloutFailed)
    assert failed.cause == "environment_error"
    assert "did you mean guess_number?" in failed.message
