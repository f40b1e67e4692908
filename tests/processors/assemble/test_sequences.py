"""LLM calls to training sequences: joined where they extend each other, parted where they do not, verified always."""

import hashlib
from typing import Any

import pytest

from rollstream.eventlog import codec
from rollstream.processors.assemble.sequences import dead_branches, join_calls
from rollstream.processors.assemble.state import Call
from rollstream.processors.assemble.trajectories import reference
from rollstream.schemas.errors import DecodeError
from rollstream.schemas.events import StepRecorded, TrajectoryAssembled
from rollstream.schemas.events.rollouts import LLMCall, Prefix, VersionSpan
from rollstream.schemas.tokens import KeptIds, decode_floats, decode_ids, encode_floats, encode_ids, encode_kept


def call(index, prompt, completion, *, prefix=None, logprobs=True, spans=(), uses=(), request=None):
    llm = LLMCall(
        prefix=prefix,
        prompt_ids=encode_ids(prompt),
        completion_ids=encode_ids(completion),
        logprobs=encode_floats([-float(token) for token in completion]) if logprobs else None,
        spans=spans,
        uses=uses,
        request=request,
    )
    base = {"run_id": "run", "time_ms": 0, "group_id": "g", "rollout_id": "g/m0/a0"}
    return StepRecorded(**base, step_index=index, agent="agent", event_type="LLM_END", uuid=f"{index}", llm=llm)


def prefix(index, ids):
    packed = b"".join(token.to_bytes(4, "little") for token in ids)
    return Prefix(step_index=index, length=len(ids), sha256=hashlib.sha256(packed).hexdigest())


def ids_of(sequence):
    return list(decode_ids(sequence.token_ids))


def spans(sequence):
    return [(part.step_index, part.start, part.length) for part in sequence.completions]


def test_calls_that_extend_each_other_are_one_sequence():
    (joined,) = join_calls(
        [
            call(0, [1, 2], [3, 4]),
            call(2, [5], [6], prefix=prefix(0, [1, 2, 3, 4])),
            call(5, [], [7, 8], prefix=prefix(2, [1, 2, 3, 4, 5, 6])),
        ]
    )
    assert ids_of(joined) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert spans(joined) == [(0, 2, 2), (2, 5, 1), (5, 6, 2)]
    assert joined.logprobs is not None
    assert list(decode_floats(joined.logprobs)) == [-3, -4, -6, -7, -8]


def test_calls_without_a_prefix_are_sequences_of_their_own():
    first, second = join_calls([call(0, [1], [2]), call(1, [3], [4])])
    assert (ids_of(first), ids_of(second)) == ([1, 2], [3, 4])


def test_a_cut_prefix_begins_a_sequence_in_which_it_is_prompt():
    first, second = join_calls([call(0, [1, 2], [3, 4]), call(1, [9], [5], prefix=prefix(0, [1, 2, 3]))])
    assert ids_of(first) == [1, 2, 3, 4]
    assert ids_of(second) == [1, 2, 3, 9, 5]
    assert spans(second) == [(1, 4, 1)]


def test_a_second_branch_begins_a_sequence():
    steps = [
        call(0, [1], [2]),
        call(1, [3], [4], prefix=prefix(0, [1, 2])),
        call(2, [5], [6], prefix=prefix(0, [1, 2])),
        call(3, [7], [8], prefix=prefix(1, [1, 2, 3, 4])),
    ]
    first, second = join_calls(steps)
    assert ids_of(first) == [1, 2, 3, 4, 7, 8]
    assert ids_of(second) == [1, 2, 5, 6]
    assert spans(first) == [(0, 1, 1), (1, 3, 1), (3, 5, 1)]
    assert spans(second) == [(2, 3, 1)]


def test_a_branch_that_nothing_goes_on_from_is_left_out():
    steps = [
        call(0, [1], [2]),
        call(1, [3], [4], prefix=prefix(0, [1, 2])),
        call(2, [3], [5], prefix=prefix(0, [1, 2])),
        call(4, [6], [7], prefix=prefix(2, [1, 2, 3, 5])),
    ]
    dead = dead_branches(steps)
    assert dead == {1}
    first, second = join_calls(steps, without=dead)
    assert (ids_of(first), spans(first)) == ([1, 2], [(0, 1, 1)])
    assert list(decode_floats(first.logprobs or "")) == [-2]
    assert (ids_of(second), spans(second)) == ([1, 2, 3, 5, 6, 7], [(2, 3, 1), (4, 5, 1)])
    assert dead_branches(steps[:3], revision=2) == {1}
    assert dead_branches(steps[:2]) == dead_branches([]) == frozenset()


def test_of_each_conversation_the_last_call_lives_and_those_whose_text_is_used():
    talk = [call(0, [1], [2]), call(1, [3], [4], prefix=prefix(0, [1, 2]))]
    rejected = call(2, [8], [9], prefix=prefix(1, [1, 2, 3, 4]))
    summary = call(3, [], [10], prefix=prefix(2, [1, 2, 3, 4, 8]))
    after = call(4, [20], [21])
    assert dead_branches([*talk, rejected, summary, after]) == {2}
    sequences = join_calls([*talk, rejected, summary, after], without={2})
    assert [spans(one) for one in sequences] == [[(0, 1, 1), (1, 3, 1)], [(3, 5, 1)], [(4, 1, 1)]]
    using = call(4, [20], [21], uses=(2,))
    assert dead_branches([*talk, rejected, summary, using]) == frozenset()
    assert dead_branches([call(0, [1, 5], [2]), call(1, [7], [8], prefix=prefix(0, [1]))]) == frozenset()
    assert dead_branches([call(0, [1, 5], [2]), call(1, [], [8], prefix=prefix(0, [1, 5]))]) == {0}


def test_answers_to_one_request_live_together_unless_one_of_them_is_followed():
    first = [call(index, [1], [index], request=2) for index in (2, 3, 4)]
    after = call(5, [6], [7], prefix=prefix(2, [1, 2]))
    assert dead_branches(first) == dead_branches(first, revision=2) == dead_branches([*first, after], 2) == frozenset()
    assert dead_branches([*first, after]) == {3, 4}
    assert [spans(one) for one in join_calls([*first, after], without={3, 4})] == [[(2, 1, 1), (5, 3, 1)]]
    other = call(6, [8], [9], prefix=prefix(3, [1, 3]))
    assert dead_branches([*first, after, other]) == {4}
    again = call(5, [], [7], prefix=prefix(4, [1]))
    assert dead_branches([*first, again]) == {2, 3, 4}
    second = [call(index, [6], [index], prefix=prefix(2, [1, 2]), request=5) for index in (5, 6, 7)]
    assert dead_branches([*first[:1], *second]) == frozenset()
    assert dead_branches([*first[:1], *second], revision=2) == {5, 6}
    third = call(8, [8], [9], prefix=prefix(5, [1, 2, 6, 5]))
    assert dead_branches([*first[:1], *second, third]) == {6, 7}
    for used in (5, 6, 7):
        assert dead_branches([*first[:1], *second, call(8, [8], [9], uses=(used,))]) == {5, 6, 7} - {used}


def test_equal_requests_are_conversations_of_their_own():
    first = [call(index, [1], [index]) for index in (0, 1, 2)]
    after = call(3, [6], [7], prefix=prefix(0, [1, 0]))
    again = call(4, [1], [8])
    assert dead_branches([*first, after, again]) == frozenset()


def test_prompts_with_a_common_beginning_are_looked_at_a_few_times_each_however_many_name_the_one_before():
    looks: list[int] = []

    class CountedCall(LLMCall):
        def __getattribute__(self, name: str) -> Any:
            if name == "prompt_ids":
                looks.append(1)
            return super().__getattribute__(name)

    steps = [Call(0, "agent", CountedCall(prompt_ids=encode_ids([1, 2, 3]), completion_ids=encode_ids([9])))]
    for index in range(1, 300):
        new_ids, completion = encode_ids([index, 3]), encode_ids([9])
        llm = CountedCall(prefix=prefix(index - 1, [1, 2]), prompt_ids=new_ids, completion_ids=completion)
        steps.append(Call(index, "agent", llm))
    join_calls(steps)
    looks.clear()
    assert dead_branches(steps) == frozenset()
    assert len(looks) <= 3 * len(steps)


def test_calls_with_and_without_log_probabilities_stand_in_sequences_of_their_own():
    steps = [
        call(0, [1], [2]),
        call(1, [3], [4], prefix=prefix(0, [1, 2]), logprobs=False),
        call(2, [5], [6], prefix=prefix(1, [1, 2, 3, 4])),
        call(3, [7], [8], prefix=prefix(1, [1, 2, 3, 4]), logprobs=False),
    ]
    known, unknown, later = join_calls(steps)
    assert ids_of(known) == [1, 2]
    assert ids_of(unknown) == [1, 2, 3, 4, 7, 8]
    assert ids_of(later) == [1, 2, 3, 4, 5, 6]
    assert [spans(one) for one in (known, unknown, later)] == [[(0, 1, 1)], [(1, 3, 1), (3, 5, 1)], [(2, 5, 1)]]
    assert [one.logprobs is None for one in (known, unknown, later)] == [False, True, False]


def test_no_calls_yield_no_sequences():
    assert join_calls([]) == ()


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (call(1, [3], [4], prefix=prefix(0, [1, 9])), "sha256 of its prefix differs"),
        (call(1, [3], [4], prefix=prefix(0, [9])), "sha256 of its prefix differs"),
        (call(1, [3], [4], prefix=prefix(0, [1, 2, 3])), "has 3 tokens, but step 0 has only 2"),
        (call(1, [3], [4], prefix=prefix(7, [1])), "not an earlier LLM call"),
        (call(1, [3], [4], prefix=prefix(1, [1])), "not an earlier LLM call"),
        (call(1, [3], [4], spans=(VersionSpan(model_group="g", version=0, length=2),)), "do not cover"),
    ],
)
def test_the_error_of_an_inconsistent_call_names_the_step(second, problem):
    with pytest.raises(DecodeError, match=f"step 1 of agent agent: .*{problem}"):
        join_calls([call(0, [1], [2]), second])


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": encode_floats([-1, -2])},
        {"prompt_ids": "AAA="},
        {"completion_ids": "?"},
        {"completion_ids": "AgAAAA"},
        {"completion_ids": "AgAAAA==\n"},
        {"completion_ids": " AgAAAA=="},
        {"completion_ids": "AgAAAA==AgAAAA=="},
        {"completion_ids": "AgÄAAA=="},
    ],
)
def test_invalid_arrays_are_refused(change):
    step = call(0, [1], [2])
    assert step.llm is not None
    with pytest.raises(DecodeError, match="step 0"):
        join_calls([step.model_copy(update={"llm": step.llm.model_copy(update=change)})])


def test_a_reference_counts_what_has_no_log_probabilities_if_something_has():
    names = dict.fromkeys(("run_id", "group_id", "rollout_id", "trajectory_id", "agent", "example_id", "job_id"), "x")

    def referred(*steps):
        trajectory = TrajectoryAssembled(
            **names, time_ms=0, model_group="x/m", member=0, attempt=0, epoch=0, reward=1.0, num_steps=1,
            sequences=join_calls(steps), steps_digest="0" * 64,
        )  # fmt: skip
        return reference(codec.encode(trajectory))

    known, unknown = call(0, [1], [2]), call(1, [3], [4, 5], logprobs=False)
    found = [referred(*steps) for steps in ((known, unknown), (known,), (unknown,), ())]
    assert [one.has_logprobs for one in found] == [True, True, False, True]
    assert [one.num_without_logprobs for one in found] == [2, 0, 0, 0]
    assert [one.num_completion_tokens for one in found] == [3, 1, 2, 0]


def kept_call(index, prompt, completion, sets):
    step = call(index, prompt, completion)
    assert step.llm is not None
    kept = encode_kept(KeptIds([len(one) for one in sets], [token for one in sets for token in one]))
    return step.model_copy(update={"llm": step.llm.model_copy(update={"kept_ids": kept})})


def test_kept_ids_stay_with_their_completion():
    step = kept_call(0, [1], [4, 5], [[2, 4, 9], []])
    (sequence,) = join_calls([step])
    assert step.llm is not None
    assert sequence.completions[0].kept_ids == step.llm.kept_ids


@pytest.mark.parametrize("sets", [[[2, 9], [5]], [[4], [6]], [[4, 3], [5]], [[9, 4], [5]]])
def test_a_token_that_is_not_among_the_ids_that_it_was_sampled_from_is_refused(sets):
    with pytest.raises(DecodeError, match=r"step 3 of agent agent: its token \d \(\d\) is not among the"):
        join_calls([kept_call(3, [1], [4, 5], sets)])
