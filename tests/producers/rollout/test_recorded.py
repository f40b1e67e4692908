"""Recorded rollouts: played as they were, joined by their tokens, flagged where something was assumed."""

import asyncio
import hashlib
import json
from collections.abc import Iterable
from typing import Any, Literal

import pytest
from pydantic import JsonValue

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.harness.recorded.tasks import MAX_INLINE_BYTES, inputs_of, stored, tasks_of
from rollstream.processors.assemble.sequences import join_calls
from rollstream.producers.engines.scripted import ScriptedTokenizer
from rollstream.producers.rollout.conversation import Conversation
from rollstream.producers.rollout.recorded_call import ImportContext, read_step
from rollstream.schemas import tokens
from rollstream.schemas.events import RolloutFailed
from rollstream.schemas.events.recorded import (
    RecordedChat,
    RecordedGroup,
    RecordedReward,
    RecordedRollout,
    RecordedStep,
    RecordedTokens,
)
from rollstream.schemas.events.rollouts import VersionSpan
from rollstream.schemas.settings import RolloutSettings
from tests.rigs.remote_outage import RemoteFileSystem

GROUP = "run-1/policy"
TOKENIZER = ScriptedTokenizer()
Policy = Literal["model", "demonstration", "external"]


def exact(prompt, completion, logprobs: Iterable[float] | Literal["fit"] | None = "fit", **fields):
    values = [-0.5] * len(completion) if logprobs == "fit" else logprobs
    return RecordedStep(tokens=RecordedTokens.of(prompt, completion, values, **fields))


def chat_step(*messages, answer="4", **fields):
    sent = tuple({"role": "user", "content": text} for text in messages)
    return RecordedStep(chat=RecordedChat(messages=sent, answer={"role": "assistant", "content": answer}, **fields))


def task_of(*rollouts, config=None, min_version=0, inputs=None, policy: Policy = "model", artifacts=None):
    group = RecordedGroup.of("x0", rollouts, inputs)
    settings = RolloutSettings(
        environment="recorded", environment_config=config or {}, agents={"agent": GROUP}, policy=policy
    )
    group = asyncio.run(stored(group, artifacts)) if artifacts else group
    [task] = tasks_of(
        [group], run_id="run-1", job_id="run-1/rl", epoch=0, settings=settings, min_version=min_version, time_ms=1
    )
    return task


def samples(played):
    """(context ids, completion ids) of each completion that is trained on."""
    found = []
    for sequence in join_calls(played.steps):
        token_ids = tokens.decode_ids(sequence.token_ids)
        for part in sequence.completions:
            end = part.start + part.length
            found.append((tuple(token_ids[: part.start]), tuple(token_ids[part.start : end])))
    return found


def test_kept_ids_and_the_finish_reason_of_a_recorded_call_are_its_steps(play):
    kept = tokens.encode_kept(tokens.KeptIds((2, 0), (7, 9)))
    step = exact([5, 6], [7, 1], kept_ids=kept, finish_reason="length")
    played = play(task_of(RecordedRollout(steps=(step,), rewards=(RecordedReward(value=1.0),))))
    played.assert_complete()
    assert (played.steps[0].llm.kept_ids, played.steps[0].llm.finish_reason) == (kept, "length")


def test_tokens_without_kept_ids_are_written_as_before_and_others_kept_ids_are_refused():
    plain = RecordedTokens.of([5], [7, 1])
    assert "kept_ids" not in plain.model_dump(mode="json")
    with pytest.raises(ValueError, match=r"its token 0 \(7\) is not among the 1 ids"):
        RecordedTokens.of([5], [7, 1], kept_ids=tokens.encode_kept(tokens.KeptIds((1, 0), (8,))))


def test_calls_are_joined_where_one_goes_on_from_another_and_every_prompt_is_what_the_model_saw(play):
    first, branch = exact([5, 6], [7, 1]), exact([5, 6], [8, 1])
    later, other = exact([5, 6, 7, 1, 9], [10, 1]), exact([40, 41], [42])
    rewards = (RecordedReward(value=1.0), RecordedReward(value=0.5, name="score", step=1, is_score=True))
    played = play(task_of(RecordedRollout(steps=(first, branch, later, other), rewards=rewards)))
    played.assert_complete()
    assert sorted(samples(played)) == [
        ((5, 6), (7, 1)),
        ((5, 6), (8, 1)),
        ((5, 6, 7, 1, 9), (10, 1)),
        ((40, 41), (42,)),
    ]
    assert len(join_calls(played.steps)) == 3
    assert [(reward.step_index, reward.is_score) for reward in played.rewards] == [(None, False), (1, True)]
    assert played.steps[2].llm.prefix.length == 4
    assert played.steps[2].llm.prefix.step_index == 0


def test_recorded_versions_stay_and_missing_ones_are_assumed_and_flagged(play):
    spans = (VersionSpan(model_group=GROUP, version=3, length=1), VersionSpan(model_group=GROUP, version=4, length=1))
    foreign = (VersionSpan(model_group="elsewhere/policy", version=90, length=1),)
    rollout = RecordedRollout(steps=(exact([5], [6, 1], spans=spans), exact([5], [6]), exact([7], [1], spans=foreign)))
    played = play(task_of(rollout, min_version=0))
    known, unknown, other = played.steps
    assert known.llm.spans == spans
    assert known.metadata is None
    for step in (unknown, other):
        assert [(span.model_group, span.version, span.length) for span in step.llm.spans] == [(GROUP, 0, 1)]
        assert step.metadata == {"rollstream": {"is_version_assumed": True}}
    assumed = play(task_of(rollout, config={"assumed_version": 2}))
    assert assumed.steps[1].llm.spans[0].version == 2


def test_text_alone_is_not_trained_on_unless_it_may_be_retokenised(play):
    rollout = RecordedRollout(steps=(chat_step("1+1=", answer="2"),), rewards=(RecordedReward(value=1.0),))
    plain = play(task_of(rollout))
    plain.assert_complete()
    assert plain.steps[0].llm is None
    assert plain.steps[0].metadata == {"rollstream": {"untrained": "no_token_ids"}}
    played = play(task_of(rollout, config={"retokenise": True}))
    flags = played.steps[0].metadata["rollstream"]
    assert flags == {"is_retokenised": True, "has_logprobs": False, "is_version_assumed": True}
    [(context, completion)] = samples(played)
    assert TOKENIZER.decode(context) == "<user>1+1=<end><assistant>"
    assert TOKENIZER.decode(completion) == "2<end>"


@pytest.mark.parametrize(("num", "kept", "has_end"), [(2, True, False), (3, True, True), (4, False, True)])
def test_log_probabilities_are_kept_only_if_their_number_fits_the_new_tokens(play, num, kept, has_end):
    step = chat_step("hm", answer="42", logprobs=(-0.25,) * num)
    played = play(task_of(RecordedRollout(steps=(step,)), config={"retokenise": True}))
    call = played.steps[0].llm
    assert (call.logprobs is not None) == kept
    assert (tokens.decode_ids(call.completion_ids)[-1] == TOKENIZER.eos_token_id) == has_end


def test_retokenised_turns_go_on_from_each_other(play):
    messages: tuple[dict[str, JsonValue], ...] = (
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "go"},
    )
    chat = RecordedChat(messages=messages, answer={"role": "assistant", "content": "b"})
    rollout = RecordedRollout(steps=(chat_step("go", answer="a"), RecordedStep(chat=chat)))
    played = play(task_of(rollout, config={"retokenise": True}))
    [sequence] = join_calls(played.steps)
    text = TOKENIZER.decode(tokens.decode_ids(sequence.token_ids))
    assert text == "<user>go<end><assistant>a<end><user>go<end><assistant>b<end>"
    assert len(sequence.completions) == 2


class ToolTokenizer(ScriptedTokenizer):
    """Its template writes tool calls, as objects, after a message's text; one that it does not know it refuses."""

    def apply_chat_template(self, conversation, **options):
        text = [
            message
            | {"content": message["content"] + "".join(f"!{json.dumps(c['function']['arguments'])}" for c in calls)}
            for message in conversation
            for calls in [message.get("tool_calls", ())]
        ]
        return super().apply_chat_template(text, **options)


def test_an_answer_that_calls_tools_is_what_the_template_writes_for_it():
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    recorded, tokenizer = chat_step("hm", answer=""), ToolTokenizer()
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert recorded.chat is not None
    step = recorded.model_copy(update={"chat": recorded.chat.model_copy(update={"answer": answer})})
    reading = read_step(step, 0, ImportContext(GROUP, retokenise=True), Conversation(tokenizer), tokenizer)
    assert reading.call is not None
    assert TOKENIZER.decode(tokens.decode_ids(reading.call.completion_ids)) == '!{"a": 1}<end>'


def test_list_content_of_texts_is_retokenised_as_its_text_and_a_picture_is_not(play):
    parts: list[JsonValue] = [{"type": "text", "text": "what "}, {"type": "text", "text": "is it"}]
    picture: list[JsonValue] = [*parts, {"type": "image_url", "image_url": {"url": "data:..."}}]
    steps = tuple(
        RecordedStep(
            chat=RecordedChat(
                messages=({"role": "user", "content": content},), answer={"role": "assistant", "content": "x"}
            )
        )
        for content in (parts, picture)
    )
    texts, image = play(task_of(RecordedRollout(steps=steps), config={"retokenise": True})).steps
    assert TOKENIZER.decode(tokens.decode_ids(texts.llm.prompt_ids)) == "<user>what is it<end><assistant>"
    assert image.llm is None
    assert image.metadata == {"rollstream": {"untrained": "not_text"}}


def test_recorded_rewards_are_kept_and_reward_functions_see_the_examples_fields(play):
    rewards = (
        RecordedReward(value=0.5),
        RecordedReward(value=1.0, name="grade"),
        RecordedReward(value=-1.0, name="step", step=1),
    )
    rollout = RecordedRollout(steps=(exact([5], [6]), exact([5, 6], [7])), rewards=rewards)
    task = task_of(rollout, inputs={"question": "?", "answer": "4"})
    task = task.model_copy(
        update={
            "settings": task.settings.model_copy(
                update={"rewards": ("python:tests.producers.rollout.test_recorded.own",)}
            )
        }
    )
    played = play(task)
    played.assert_complete()
    assert [(r.name, r.value, r.step_index) for r in played.rewards[:3]] == [
        ("reward", 0.5, None),
        ("grade", 1.0, None),
        ("step", -1.0, 1),
    ]
    assert played.rewards[3].value == 2.0


def own(rollout):
    return float(len(rollout.inputs))


def test_a_recorded_rollout_without_a_turn_left_ends_as_max_turns_and_needs_no_reward(play):
    played = play(task_of(RecordedRollout(steps=(exact([5], [6]),), stop_reason="max_turns")))
    assert (played.last.kind, played.last.stop_reason) == ("rollout_ended", "max_turns")


def test_the_same_record_gives_the_same_events_in_every_attempt(play):
    rollout = RecordedRollout(steps=(exact([5], [6]), exact([5, 6], [7])), rewards=(RecordedReward(value=1.0),))
    task = task_of(rollout, rollout)
    assert play(task).contents() == play(task).contents()
    again = play(task, attempt=1)
    assert [step.llm for step in again.steps] == [step.llm for step in play(task).steps]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            RecordedRollout(source_id="r7", error="its agent raised KeyError"),
            "r7 failed when it was recorded: its agent raised",
        ),
        (RecordedRollout(steps=(exact([5], [100_000]),)), "recorded token id 100000 is outside the"),
        (RecordedRollout(steps=(exact([5], [-3]),)), "recorded token id -3 is outside the"),
        (RecordedRollout(steps=(exact([5], [6], [float("nan")]),)), "is not a finite number"),
        (RecordedRollout(steps=(RecordedStep(agent="other"),)), "agent 'other' is not an agent"),
    ],
)
def test_a_broken_record_is_a_failed_attempt_with_its_cause(play, rollout, message):
    played = play(task_of(rollout))
    assert isinstance(played.last, RolloutFailed)
    assert played.last.cause == "environment_error"
    assert message in played.last.message
    assert played.last.is_final == (rollout.error is not None), "what is known to have failed is not tried again"


def test_a_record_without_any_reward_is_not_tried_again(play):
    task = task_of(RecordedRollout(steps=(exact([5], [6]),)))
    failed = play(task).last
    assert (failed.cause, failed.is_final) == ("reward_error", True)
    assert "agents without a reward: agent" in failed.message
    assert "trajectory_builders.X.rewards" in failed.message


def test_a_record_without_a_score_is_a_missing_score_with_its_reason(play):
    task = task_of(RecordedRollout(source_id="r7", steps=(exact([5], [6]),), missing_score="evaluator judge: HTTP 401"))
    failed = play(task).last
    assert (failed.cause, failed.message) == ("reward_error", "recorded rollout r7: evaluator judge: HTTP 401")
    assert failed.is_final
    settings = task.settings.model_copy(update={"missing_score": "reject"})
    rejected = play(task.model_copy(update={"settings": settings}))
    rejected.assert_complete()
    assert rejected.last.missing_scores == {"reward": "recorded rollout r7: evaluator judge: HTTP 401"}
    assert len(rejected.steps) == 1


def test_a_member_without_a_record_and_a_record_that_is_none_fail_with_their_causes(play):
    task = task_of(RecordedRollout(steps=(exact([5], [6]),)))
    assert "no recorded rollout for member 1: the task has only 1" in play(task, member=1).last.message
    broken = task.model_copy(update={"inputs": {"recorded": [{"rollout": {"steps": [{"llm": 3}]}}]}})
    assert "the recorded rollout of member 0 is invalid: rollout.steps.0.llm" in play(broken).last.message
    assert "the task has only 0" in play(task.model_copy(update={"inputs": {}})).last.message


def test_a_large_group_lies_in_the_artifact_store_and_plays_the_same(play, tmp_path):
    long = list(range(2, 90)) * 1500
    rollouts = tuple(RecordedRollout(steps=(exact(long, [number, 1]),)) for number in (6, 7))
    artifacts = ArtifactStore(str(tmp_path / "artifacts"))
    inline, temporary = task_of(*rollouts), task_of(*rollouts, artifacts=artifacts)
    assert len(temporary.model_dump_json()) < 4096 < MAX_INLINE_BYTES < len(inline.model_dump_json())
    assert [s.llm for s in play(temporary, member=1, artifacts=artifacts).steps] == [
        s.llm for s in play(inline, member=1).steps
    ]
    recorded: Any = temporary.inputs["recorded"]
    sha256 = recorded[0]["artifact"]["sha256"]
    [path] = (tmp_path / "artifacts").rglob(sha256 + "*")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    path.write_bytes(path.read_bytes().replace(b"LLM_END", b"LLM_ENE"))
    assert "has the wrong hash" in play(temporary, artifacts=artifacts).last.message


def test_a_store_that_is_away_for_a_while_costs_no_attempt_and_one_that_stays_away_the_rollouts_time(play, tmp_path):
    rewards = (RecordedReward(value=1.0),)
    rollout = RecordedRollout(steps=(exact(list(range(2, 90)) * 3000, [6, 1]),), rewards=rewards)
    artifacts = ArtifactStore(f"remote://{tmp_path.name}")
    task = task_of(rollout, artifacts=artifacts)
    RemoteFileSystem.num_failures = 2
    play(task, artifacts=artifacts).assert_complete()
    hasty = task.model_copy(update={"settings": task.settings.model_copy(update={"rollout_timeout_s": 0.1})})
    RemoteFileSystem.num_failures = 1_000_000
    try:
        failed = play(hasty, artifacts=artifacts).last
    finally:
        RemoteFileSystem.num_failures = 0
    assert failed.cause == "timeout"


def test_demonstrations_need_neither_log_probabilities_nor_versions(play):
    played = play(task_of(RecordedRollout(steps=(exact([5], [6, 1], None),)), policy="demonstration"))
    assert played.steps[0].llm.spans == ()
    assert played.steps[0].metadata is None


def test_tasks_have_derived_ids_and_are_the_same_for_the_same_groups():
    groups = [RecordedGroup.of(f"x{n}", [RecordedRollout()] * (n + 1)) for n in range(3)]
    given = {
        "run_id": "r",
        "job_id": "r/rl",
        "epoch": 2,
        "settings": RolloutSettings(environment="python:a.b"),
        "seed": 7,
    }
    tasks = tasks_of(groups, **given, first_index=10)
    assert tasks == tasks_of(groups, **given, first_index=10)
    assert [task.group_id for task in tasks] == [f"r/rl/e00002/t000{n}" for n in (10, 11, 12)]
    assert [(task.num_rollouts, task.minimum) for task in tasks] == [(1, 1), (2, 1), (3, 1)]
    assert {task.settings.environment for task in tasks} == {"recorded"}
    assert tasks_of(groups, **given, name="given")[0].group_id == "r/given/e00002/t00000"
    assert inputs_of(groups[0]) == {"recorded": [{"rollout": {}}]}


def test_of_another_backends_model_ids_are_kept_as_they_come_and_text_makes_none(play):
    """Ids that no tokenizer here knows, and text alone, which is neither tokenised nor counted as a failure."""
    steps = (exact([5, 600_000], [700_000, 1]), chat_step("1+3="))
    reward = (RecordedReward(value=1.0),)
    played = play(task_of(RecordedRollout(steps=steps, rewards=reward), policy="external"))
    played.assert_complete()
    assert samples(played) == [((5, 600_000), (700_000, 1))]
    assert [call.llm.spans for call in played.steps if call.llm] == [()]
    retokenised = play(
        task_of(RecordedRollout(steps=steps, rewards=reward), policy="external", config={"retokenise": True})
    )
    failed = retokenised.events[-1]
    assert isinstance(failed, RolloutFailed)
    assert "another training backend's" in failed.message


def test_a_step_has_its_recorded_times_or_the_end_of_its_import_alone(play):
    both = exact([1], [2]).model_copy(update={"event_timestamp": 9.5, "span_event_timestamp": 9.0})
    one = exact([1], [3]).model_copy(update={"event_timestamp": 9.5})
    rewards = (RecordedReward(value=1.0),)
    played = play(task_of(RecordedRollout(steps=(both, one, exact([1], [4])), rewards=rewards)))
    played.assert_complete()
    found = [(step.span_event_timestamp, step.event_timestamp) for step in played.steps]
    assert found[:2] == [(9.0, 9.5), (None, 9.5)]
    began, ended = found[2]
    assert began is None  # an import has no duration of the step
    assert ended is not None
