"""NAT's steps as samples: one a call, in the tokens that the model saw, whatever the framework or the order."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.processors.assemble.sequences import join_calls
from rollstream.producers.rollout.conversation import Conversation
from rollstream.producers.rollout.recorded_call import ImportContext, fields_of, read_step
from rollstream.producers.traces.framework_logprobs import read_logprobs
from rollstream.producers.traces.spans import RemoteSpan, Selection, recorded_steps, remote_ancestry, scores
from rollstream.schemas import tokens
from rollstream.schemas.events import StepRecorded
from rollstream.schemas.events.recorded import RecordedStep
from tests.rigs import nat_samples as nat

ALL = Selection()
SHAPES = {"langchain": nat.langchain, "openai": nat.openai, "llama_index": nat.llama_index}


def sequences_of(steps, selection=ALL, *, retokenise=False):
    """Training sequences of NAT's steps."""
    conversation, found = Conversation(nat.TOKENIZER), []
    for index, step in enumerate(recorded_steps(nat.read(steps), selection)):
        playing = ImportContext("run-1/policy", retokenise=retokenise)
        reading = read_step(step, index, playing, conversation, nat.TOKENIZER)
        ids = {"run_id": "run-1", "group_id": "g", "rollout_id": "g/m0/a0", "time_ms": 1, "uuid": "u"}
        found.append(StepRecorded(**(ids | fields_of(step, reading)), step_index=index, agent="agent"))
    return join_calls(found)


def samples(sequences):
    """(text before, text of the completion) of every completion, sorted."""
    found = []
    for sequence in sequences:
        token_ids = tokens.decode_ids(sequence.token_ids)
        for part in sequence.completions:
            end = part.start + part.length
            found.append(
                (nat.TOKENIZER.decode(token_ids[: part.start]), nat.TOKENIZER.decode(token_ids[part.start : end]))
            )
    return sorted(found)


def data_of(step: RecordedStep) -> dict[str, Any]:
    assert step.data is not None
    return step.data


def saw(prompt, answer):
    return nat.TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True), f"{answer}<end>"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tool_loop_is_one_sequence_in_the_form_of_every_framework(shape):
    call = SHAPES[shape]
    first, later = nat.messages("1+1"), [*nat.messages("1+1", "add(1)"), {"role": "tool", "content": "2"}]
    steps = nat.workflow(call("a", first, "add(1)"), nat.tool("t", "2"), call("b", later, "2"))
    for retokenise in (False, True):
        [sequence] = sequences_of(steps, retokenise=retokenise)
        assert samples([sequence]) == sorted([saw(first, "add(1)"), saw(later, "2")])
        assert sequence.logprobs is not None
        assert all("<tool>" not in completion for _, completion in samples([sequence]))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_call_is_trained_in_the_context_that_its_model_had(shape):
    call = SHAPES[shape]
    go, system = nat.messages("go"), {"role": "system", "content": "be kind"}
    calls = {
        "the same text twice": [(go, "a"), (nat.messages("go", "a", "go"), "b")],
        "the same prompt sampled twice": [(go, "a"), (go, "b")],
        "a changed system prompt": [([system, *go], "a"), ([{"role": "system", "content": "be rude"}, *go], "b")],
        "a history that was edited": [(nat.messages("go", "a", "on"), "b"), (nat.messages("go", "A", "on"), "c")],
        "two one-shot calls": [([system, *go], "a"), ([system, *nat.messages("stop")], "b")],
    }
    for name, asked in calls.items():
        steps = nat.workflow(*(call(str(n), prompt, answer) for n, (prompt, answer) in enumerate(asked)))
        found = sequences_of(steps)
        assert samples(found) == sorted(saw(*one) for one in asked), name
        assert sum(part.length for sequence in found for part in sequence.completions) == sum(
            len(a) + 1 for _, a in asked
        )


def test_list_content_is_trained_on_by_its_tokens_and_kept_in_the_record():
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": "data:"}]}
    ]
    message = nat.logprobs(nat.messages("[picture]"), "cat")
    steps = nat.workflow(nat.langchain("a", prompt, "cat", reported=message))
    assert samples(sequences_of(steps)) == [saw(nat.messages("[picture]"), "cat")]
    [recorded] = [step for step in recorded_steps(nat.read(steps), ALL) if step.event_type == "LLM_END"]
    assert recorded.chat is not None
    content: Any = recorded.chat.messages[0]["content"]
    assert content[1]["type"] == "image_url"


def test_concurrent_calls_are_distinguished_by_their_uuids():
    asked = [(nat.messages("x"), "1"), (nat.messages("y"), "2"), (nat.messages("x", "1", "z"), "3")]
    (a0, a1), (b0, b1), (c0, c1) = (nat.langchain(str(n), *one) for n, one in enumerate(asked))
    for order in ([a0, b0, b1, a1, c0, c1], [b0, a0, a1, c0, b1, c1], [a0, b0, a1, c0, c1, b1]):
        assert samples(sequences_of(nat.workflow(order))) == sorted(saw(*one) for one in asked)


TEXTS = st.text(alphabet="abc+=12", min_size=1, max_size=4)


@st.composite
def conversations(draw):
    """Calls of threads that go on from each other or not, each with what it must wait for."""
    asked, parents = [], []
    for _ in range(draw(st.integers(1, 7))):
        parent = draw(st.one_of(st.none(), st.integers(0, len(asked) - 1))) if asked else None
        before = [] if parent is None else [*asked[parent][0], {"role": "assistant", "content": asked[parent][1]}]
        between = [{"role": "tool", "content": f"tool says {draw(TEXTS)}"}] if before and draw(st.booleans()) else []
        prompt = [*before, *between, {"role": "user", "content": draw(TEXTS)}]
        asked.append((prompt, draw(TEXTS)))
        parents.append(parent)
    return asked, parents


@st.composite
def interleavings(draw):
    """A conversation, and its events in an order in which it can have happened."""
    asked, parents = draw(conversations())
    pairs = [nat.langchain(str(n), *one) for n, one in enumerate(asked)]
    ready = [n for n, parent in enumerate(parents) if parent is None]
    running, events = [], []
    while ready or running:
        n = draw(st.sampled_from(sorted(ready + running)))
        if n in ready:
            ready.remove(n)
            running.append(n)
            events.append(pairs[n][0])
        else:
            running.remove(n)
            events.append(pairs[n][1])
            ready += [child for child, parent in enumerate(parents) if parent == n]
    return asked, events


@given(interleavings())
@settings(max_examples=150)
def test_any_order_of_concurrent_calls_gives_the_same_samples_each_token_once_and_never_a_tools_text(drawn):
    asked, events = drawn
    found = sequences_of(nat.workflow(events))
    assert samples(found) == sorted(saw(*one) for one in asked)
    assert sum(part.length for s in found for part in s.completions) == sum(len(answer) + 1 for _, answer in asked)
    for sequence in found:
        num_sampled = sum(part.length for part in sequence.completions)
        assert sequence.logprobs is not None
        assert tokens.count(sequence.logprobs) == num_sampled
        indices = [index for p in sequence.completions for index in range(p.start, p.start + p.length)]
        assert len(indices) == len(set(indices))
    assert all("tool says" not in completion for _, completion in samples(found))


def test_only_targets_are_trained_on_through_the_whole_ancestry():
    deep = {"function": ("judge", "inner"), "parent": "x"}
    steps = [
        *nat.workflow(
            nat.langchain("a", nat.messages("1"), "own"),
            nat.langchain("b", nat.messages("2"), "deep", **deep),
            nat.langchain("c", nat.messages("3"), "other", model="other-model"),
        ),
        nat.step("FUNCTION_START", "f-inner", name="inner", function=("inner", "<workflow>")),
        *nat.langchain("d", nat.messages("4"), "outside", function="root", parent="root"),
    ]

    def answers(**selection):
        return [completion for _, completion in samples(sequences_of(steps, Selection(**selection)))]

    assert answers() == ["own<end>", "deep<end>", "other<end>"]
    assert answers(target_functions=frozenset({"inner"})) == ["deep<end>"]
    assert answers(target_functions=frozenset({"judge"})) == ["deep<end>"]
    assert answers(target_functions=frozenset({"root"})) == ["own<end>", "deep<end>", "other<end>", "outside<end>"]
    assert answers(target_model=nat.MODEL) == ["own<end>", "deep<end>"]
    assert answers(target_functions=frozenset({"nobody"})) == []
    flags = [step.untrained for step in recorded_steps(nat.read(steps), Selection(target_model="none"))]
    assert flags.count("not_targeted") == 4


def test_the_start_or_the_end_may_name_the_model():
    start, end = nat.langchain("a", nat.messages("1"), "x", model="config-name")
    end["payload"]["name"] = "served-name"
    for name in ("config-name", "served-name"):
        assert len(samples(sequences_of(nat.workflow([start, end]), Selection(target_model=name)))) == 1


def test_calls_without_ids_are_dropped_with_the_reason_or_retokenised_with_the_log_probabilities_that_fit():
    steps = nat.workflow(nat.langchain("a", nat.messages("1+1"), "2", ids=False))
    assert sequences_of(steps) == ()
    [sequence] = sequences_of(steps, retokenise=True)
    assert samples([sequence]) == [saw(nat.messages("1+1"), "2")]
    assert sequence.logprobs is not None


def test_an_end_without_its_start_has_no_prompt_and_a_start_alone_is_only_kept():
    start, end = nat.langchain("a", nat.messages("1"), "x", ids=False)
    [alone] = recorded_steps(nat.read([end]), ALL)
    assert (alone.chat, alone.tokens) == (None, None)
    [never] = recorded_steps(nat.read([start]), ALL)
    assert (never.event_type, never.chat, never.tokens) == ("LLM_START", None, None)


def test_streamed_tokens_are_not_kept_and_a_span_is_one_step():
    steps = nat.workflow(
        [nat.langchain("a", nat.messages("1"), "x")[0]],
        [nat.step("LLM_NEW_TOKEN", "a", data={"chunk": "x"}), nat.step("SPAN_CHUNK", "s", data={"chunk": 1})],
        [nat.langchain("a", nat.messages("1"), "x")[1]],
    )
    recorded = recorded_steps(nat.read(steps), ALL)
    assert [step.event_type for step in recorded] == ["LLM_END", "FUNCTION_END", "WORKFLOW_END"]
    call, logged = recorded[0], data_of(recorded[0])
    assert logged["input"][0]["content"] == "1"
    assert logged["output"] == "x"
    assert "logprobs" not in json.dumps(logged)
    assert call.metadata is None
    metadata: Any = recorded[2].metadata
    assert metadata["provided_metadata"]["workflow_run_id"] == "r1"
    assert recorded[2].data == {"input": "1+1", "output": "2"}


def test_tool_calls_of_an_answer_are_found_where_a_dump_has_lost_them():
    _, end = nat.langchain("a", nat.messages("1"), "")
    end["payload"]["data"]["output"] = (
        "\n\nTool calls: [{'name': 'add', 'args': {'a': 1}, 'id': 'c1', 'type': 'tool_call'}]"
    )
    start = nat.langchain("a", nat.messages("1"), "")[0]
    [step] = recorded_steps(nat.read([start, end]), ALL)
    assert step.chat is not None
    assert step.chat.answer["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]
    assert step.chat.answer["content"] == ""


@pytest.mark.parametrize(
    "calls",
    [
        *("[1, 2]", "[]", "[{'a': 1}]", "[{'name': 'add'}, 1]", "none"),
        *('{{"name": "add", "arguments": {{"a": 1}}}}', "[{'name': 'add', 'args': {1, 2}}]"),
        *(
            "[{'name': 'add', 'args': {(0, 1): 2}}]",
            "[{'name': 'add', 'args': ...}]",
            "[{'name': 'add', 'args': b'1'}]",
        ),
    ],
)
def test_an_answer_that_only_writes_as_tool_calls_are_appended_keeps_its_text(calls):
    text = f"Use it\n\nTool calls: {calls}"
    start, end = nat.langchain("a", nat.messages("1"), "")
    end["payload"]["data"] = {"output": text}
    [step] = recorded_steps(nat.read([start, end]), ALL)
    assert step.chat is not None
    assert step.chat.answer == {"role": "assistant", "content": text}


def test_scored_candidates_are_samples_in_place_of_calls_if_their_steps_are_named():
    prompt = nat.messages("move?")
    calls = [nat.langchain(str(n), prompt, answer) for n, answer in enumerate(("left", "right"))]
    candidates = [
        [
            nat.step("TTC_START", f"t{n}", name="dpo_candidate_move", data={"input": prompt}),
            nat.step(
                "TTC_END",
                f"t{n}",
                name="dpo_candidate_move",
                data={"input": [*prompt, {"role": "assistant", "content": answer}], "output": answer}
                | {"turn_id": "turn_0", "turn_index": 0, "candidate_index": n, "score": score},
            ),
        ]
        for n, (answer, score) in enumerate((("left", 0.25), ("right", 1)))
    ]
    steps, chosen = nat.workflow(*calls, *candidates), Selection(candidates="dpo_candidate_move")
    recorded = recorded_steps(nat.read(steps), chosen)
    assert samples(sequences_of(steps, chosen)) == sorted([saw(prompt, "left"), saw(prompt, "right")])
    found = list(scores(recorded, chosen))
    output = [(data_of(recorded[s.step])["output"], s.value, s.is_score) for s in found if s.step is not None]
    assert output == [("left", 0.25, True), ("right", 1.0, True)]
    assert len(found) == 2
    assert list(scores(recorded_steps(nat.read(steps), ALL), ALL)) == []
    assert len(samples(sequences_of(steps))) == 2


def test_the_ancestry_of_a_remote_step_follows_from_its_spans():
    spans = {
        "w": RemoteSpan("root"),
        "f": RemoteSpan("w", "outer"),
        "g": RemoteSpan("f", "inner"),
        "l": RemoteSpan("g"),
        "loop": RemoteSpan("loop"),
    }
    inner = remote_ancestry(spans, "l")
    assert (inner.function_name, inner.parent_name) == ("inner", "outer")
    outer = remote_ancestry(spans, "f")
    assert (outer.function_name, outer.parent_name) == ("outer", "<workflow>")
    for alone in ("w", "unknown", "loop"):
        assert remote_ancestry(spans, alone).function_name == "<workflow>"


def test_a_line_that_comes_twice_is_one_step_and_trained_once():
    start, end = nat.langchain("a", nat.messages("1"), "x")
    (once,) = samples(sequences_of([start, end]))
    assert samples(sequences_of([start, end, end])) == [once]
    assert samples(sequences_of([start, end, start, end])) == [once]
    assert len(samples(sequences_of([start, end, *nat.langchain("b", nat.messages("1"), "x")]))) == 2


@pytest.mark.parametrize(
    ("output", "kept"),
    [
        (15511210043330985984000000, "15511210043330985984000000"),
        ("half \ud83d a pair", "half ? a pair"),
        ({"n": [2**70, 1.5, None, True], "deep": "\udc00"}, {"n": [str(2**70), 1.5, None, True], "deep": "?"}),
    ],
)
def test_values_that_json_cannot_express_are_text_in_the_record(output: Any, kept: Any) -> None:
    steps = nat.read(nat.workflow(nat.openai("a", nat.messages("q"), "b"), nat.tool("t", "2")))
    for step in steps:
        if step.payload.event_type == "TOOL_END" and step.payload.data is not None:
            step.payload.data.output = output
    (tool,) = [one for one in recorded_steps(steps, ALL) if one.event_type == "TOOL_END"]
    assert data_of(tool)["output"] == kept
    json.dumps(data_of(tool)).encode()


@pytest.mark.parametrize("entry", [{"token_id": 2**32 - 1}, {"token": "token_id:4294967295"}, {"token_id": -1}])
def test_a_token_id_that_no_model_has_leaves_the_call_without_ids(entry: dict[str, Any]) -> None:
    found = read_logprobs({"content": [{"logprob": -1.0, **entry}], "prompt_token_ids": [1]})
    assert (found.completion_ids, found.tokens()) == (None, None)
