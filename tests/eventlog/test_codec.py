"""Events as records: round trips, golden files of every published version, and records that are not events."""

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.eventlog.codec import chain, content_digest, decode, digest_of, encode
from rollstream.eventlog.log import Encoded, Record, check_record_size
from rollstream.producers.rollout.reply import Failure
from rollstream.schemas.base import Event, Locator, maker_of
from rollstream.schemas.errors import DecodeError, LogError
from rollstream.schemas.events import KINDS, RewardRecorded, StepRecorded, TaskCancelled
from rollstream.schemas.events.rollouts import FunctionAncestry, LLMCall, Prefix, VersionSpan
from rollstream.schemas.topics import TOPICS

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("*.json"))


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def record(topic: str, value: bytes | None, key: bytes | None = None) -> Record:
    return Record(topic, 0, 7, key, value, (), 1)


def sha256_of(content: Any, option: int | None = None) -> str:
    return hashlib.sha256(orjson.dumps(content, option=option)).hexdigest()


def as_record(encoded: Encoded, *more: tuple[str, bytes]) -> Record:
    return Record(encoded.topic, 0, 0, encoded.key, encoded.value, encoded.headers + more, 1)


def changed(**changes: Any) -> Record:
    content = golden("reward_recorded.v1.json")["value"] | changes
    return record("steps", orjson.dumps(content))


@pytest.mark.parametrize("name", FILES)
def test_a_published_event_decodes_for_ever_to_the_same_identity_and_digest(name: str) -> None:
    kept = golden(name)
    received = decode(record(kept["topic"], orjson.dumps(kept["value"]), kept["key"].encode()))
    assert received.event.event_id == kept["event_id"]
    assert received.digest == kept["digest"]
    assert received.position == (kept["topic"], 0, 7)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_event_of_every_kind_comes_back_as_it_was(kind: str) -> None:
    version = KINDS[kind].model_fields["v"].default
    assert f"{kind}.v{version}.json" in FILES, f"write tests/golden/{kind}.v{version}.json with what encode() gives"
    kept = golden(f"{kind}.v{version}.json")
    event = KINDS[kind].model_validate(kept["value"])
    encoded = encode(event)
    received = decode(as_record(encoded))
    assert received.event == event
    assert received.digest == digest_of(encoded) == content_digest(event)
    assert decode(record(encoded.topic, encoded.value, encoded.key)).digest == kept["digest"], (
        "what was recorded must encode to the same content: declare a new field with `schemas.base.added`"
    )
    headers = dict(encoded.headers)
    assert (headers.pop("ce_digested", None) is not None) == (event.DIGEST_OF == "record")
    assert headers == {
        "content-type": b"application/json",
        "ce_specversion": b"1.0",
        "ce_id": event.event_id.encode(),
        "ce_source": b"rollstream",
        "ce_type": f"rollstream.{kind}.v{version}".encode(),
        "ce_subject": encoded.key,
    }


@pytest.mark.parametrize(
    ("kind", "num_bytes", "digest"),
    [
        ("step_recorded", 1001, "9490acb8a36ccbae5d3e9ac031c46303c608f0b2de8e8bdd68cd74c6b4dc4328"),
        ("reward_recorded", 221, "168df6bf28ad036f7c16d643a3a745182108dbc5be564ce95c393f7a4b3e8f31"),
        ("trajectory_assembled", 786, "ad0551be2190a230aafed7e5f4a78a8b1f8d48fa930745ee7afdfe7684dfbfc3"),
    ],
)
def test_a_record_that_is_digested_as_it_is_written_keeps_its_digest(kind: str, num_bytes: int, digest: str) -> None:
    written = orjson.dumps(golden(f"{kind}.v1.json")["value"])
    encoded = encode(KINDS[kind].model_validate_json(written))
    assert dict(encoded.headers).get("ce_digested", str(num_bytes).encode()) == str(num_bytes).encode()
    assert decode(as_record(encoded)).digest == hashlib.sha256(encoded.value[:num_bytes] + b"}").hexdigest() == digest


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_record_has_pydantics_dump_of_its_event(kind: str) -> None:
    event = KINDS[kind].model_validate(golden(f"{kind}.v1.json")["value"])
    dumped, order = event.model_dump(), orjson.OPT_SORT_KEYS if event.DIGEST_OF == "sorted record" else None
    expected = orjson.dumps(dumped)
    if event.DIGEST_OF != "content":
        last = orjson.dumps({name: dumped.pop(name) for name in event.UNDIGESTED}, option=orjson.OPT_SORT_KEYS)
        expected = orjson.dumps(dumped, option=order)[:-1] + b"," + last[1:]
    assert encode(event).value == expected
    assert set(event.__dict__) == set(type(event).model_fields)


def test_an_event_that_is_made_without_validation_has_the_same_record() -> None:
    fields = {"run_id": "r", "time_ms": 1, "group_id": "g", "rollout_id": "g/m0/a0", "step_index": 0, "uuid": "u"}
    values: dict[str, Any] = {
        "event_type": "TOOL_END",
        "agent": "a",
        **fields,
        "llm": LLMCall(prompt_ids="", completion_ids=""),
    }
    valid, made = StepRecorded(**values), maker_of(StepRecorded)(values)
    assert (made, made.model_copy(), encode(made).value) == (valid, valid, encode(valid).value)
    with pytest.raises(TypeError, match="StepRecorded has no field colour"):
        maker_of(StepRecorded)(values | {"colour": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode(maker_of(StepRecorded)(fields))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_digest_covers_content_and_neither_time_nor_place(kind: str) -> None:
    event = KINDS[kind].model_validate(golden(f"{kind}.v1.json")["value"])
    other = event.model_copy(update={"time_ms": event.time_ms + 1})
    assert (content_digest(other) == content_digest(event)) == ("time_ms" in type(event).UNDIGESTED)
    assert content_digest(event.model_copy(update={"run_id": "another"})) != content_digest(event)
    if "locators" in type(event).model_fields:
        moved = event.model_copy(update={"locators": (Locator(partition=3, offset=99),)})
        assert content_digest(moved) == content_digest(event)


@given(
    value=st.floats(allow_nan=False, allow_infinity=False),
    name=st.text(st.characters(exclude_categories=["Cs"])),
    data=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.booleans() | st.none() | st.floats(-1, 1)
    ),
)
def test_any_content_comes_back_with_the_digest_it_left_with(value: float, name: str, data: dict[str, Any]) -> None:
    group = {"run_id": "r", "time_ms": 1, "group_id": "r/g", "rollout_id": "r/g/m0/a0"}
    reward = RewardRecorded(**group, reward_index=0, name=name, value=value)
    step = StepRecorded(**group, step_index=0, agent="a", event_type="TOOL_END", uuid="u", name=name, data=data)
    for event in (reward, step):
        encoded = encode(event)
        received = decode(as_record(encoded))
        assert (received.event, received.digest) == (event, digest_of(encoded))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (record("steps", None), "null value"),
        (record("steps", b""), "JSON"),
        (record("steps", b"\xff\xfe"), "UTF-8 JSON"),
        (record("steps", b"[1]"), "not a JSON object"),
        (record("steps", b"{}"), "unknown kind None"),
        (record("steps", b'{"kind": ["a"]}'), "unknown kind"),
        (changed(kind="nonsense"), "unknown kind 'nonsense' for topic steps"),
        (changed(kind="batch_planned"), "unknown kind 'batch_planned' for topic steps"),
        (changed(v=2), "reward_recorded: v: "),
        (changed(surprise=1), "reward_recorded: surprise: "),
        (changed(value="NaN"), "reward_recorded: value: "),
        (changed(value=None), "reward_recorded: value: "),
        (changed(reward_index=-1), "reward_recorded: reward_index: "),
        (changed(time_ms=2**53), "reward_recorded: time_ms: .* less than 9007199254740992"),
        (changed(time_ms=2**64 - 1), "reward_recorded: time_ms: "),
    ],
)
def test_a_record_that_is_not_an_event_of_its_topic_raises_the_reason(found: Record, says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        decode(found)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def test_a_record_nested_too_deeply_for_a_digest_is_refused() -> None:
    content = golden("step_recorded.v1.json")["value"]
    assert len(decode(record("steps", orjson.dumps(content | {"data": {"a": nested(220)}}))).digest) == 64
    for depth in (253, 300, 900):
        deep = b"[" * depth + b'"x"' + b"]" * depth
        value = orjson.dumps(content | {"data": {"a": "DEEP"}}).replace(b'"DEEP"', deep)
        with pytest.raises(DecodeError, match="nested too deeply"):
            decode(record("steps", value))


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), Failure("a", "b"), object(), {1: 2}, nested(300)])
def test_a_value_that_json_does_not_have_is_not_encoded(value: Any) -> None:
    base: dict[str, Any] = {"run_id": "r", "time_ms": 1, "group_id": "r/g", "rollout_id": "r/g/m0/a0", "uuid": "u"}
    step = StepRecorded(**base, step_index=0, agent="a", event_type="TOOL_END", data={"a": [value]})
    with pytest.raises(TypeError):
        encode(step)


def test_a_record_with_the_wrong_key_is_refused() -> None:
    event = TaskCancelled(run_id="r", time_ms=1, group_id="r/g", cause="test")
    with pytest.raises(DecodeError, match="wrong key"):
        decode(record("tasks", encode(event).value, b"r/another"))


def test_a_record_above_its_topics_limit_is_refused_with_both_numbers() -> None:
    limit = TOPICS["tasks"].max_record_bytes
    check_record_size("tasks", b"k", b"x" * (limit - 200), ())
    with pytest.raises(LogError, match=rf"tasks has \d+ bytes, more than the limit of {limit}"):
        check_record_size("tasks", b"k", b"x" * limit, ())


TEXTS = st.text(max_size=8)
SIZES = st.integers(0, 2**53 - 1)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.none() | st.dictionaries(TEXTS, JSON, max_size=3)
CALLS = st.builds(
    LLMCall,
    prefix=st.none() | st.builds(Prefix, step_index=SIZES, length=SIZES, sha256=TEXTS),
    prompt_ids=TEXTS,
    completion_ids=TEXTS,
    logprobs=st.none() | TEXTS,
    spans=st.lists(st.builds(VersionSpan, model_group=TEXTS, version=SIZES, length=SIZES), max_size=2).map(tuple),
    finish_reason=TEXTS,
    kept_ids=st.none() | TEXTS,
    uses=st.lists(SIZES, max_size=2).map(tuple),
    request=st.none() | SIZES,
)
STEPS = st.builds(
    StepRecorded,
    run_id=TEXTS,
    time_ms=SIZES,
    group_id=TEXTS,
    rollout_id=TEXTS,
    step_index=SIZES,
    agent=TEXTS,
    event_type=TEXTS,
    uuid=TEXTS,
    function_ancestry=st.none() | st.builds(FunctionAncestry, function_id=TEXTS, function_name=TEXTS),
    tags=st.none() | st.lists(TEXTS, max_size=2).map(tuple),
    metadata=OBJECTS,
    data=OBJECTS,
    usage_info=OBJECTS,
    llm=st.none() | CALLS,
    event_timestamp=st.none() | st.floats(0, 1e12),
)


@given(step=STEPS)
def test_a_step_keeps_the_order_of_its_keys(step: StepRecorded) -> None:
    step = step.model_copy(update={"data": {"b": {"z": 1, "a": 2}, "a": [{"y": 1, "x": 2}]}})
    read = decode(as_record(encode(step)))
    assert orjson.dumps(vars(read.event)["data"]) == orjson.dumps(step.data)
    assert encode(read.event) == encode(step)


@pytest.mark.parametrize("number", [None, b"", b"x", b"-1", b"0", b"7", b"99999999999999999999"])
def test_a_value_that_was_written_again_has_the_digest_of_its_sorted_content(number: Any) -> None:
    event = StepRecorded.model_validate(golden("step_recorded.v1.json")["value"])
    encoded = encode(event)
    expected = decode(record("steps", encoded.value, encoded.key)).digest
    headers = tuple((name, number if name == "ce_digested" else value) for name, value in encoded.headers)
    assert decode(as_record(encoded._replace(headers=headers))).digest == expected
    spaced = json.dumps(orjson.loads(encoded.value), sort_keys=True).encode()
    assert decode(as_record(encoded._replace(value=spaced))).digest == expected


@pytest.mark.parametrize("kind", [RewardRecorded, StepRecorded])
def test_a_field_beside_those_that_are_digested_is_digested_too(kind: type[Event]) -> None:
    event = kind.model_validate(golden(f"{kind.model_fields['kind'].default}.v1.json")["value"])
    encoded = encode(event)
    content = orjson.loads(encoded.value) | {"agent": "another"}
    others = [content, {name: content[name] for name in sorted(content, key=lambda name: name == "agent")}]
    digests = {decode(as_record(encoded._replace(value=orjson.dumps(other)))).digest for other in others}
    digested = {name: value for name, value in content.items() if name not in kind.UNDIGESTED}
    assert digests == {sha256_of(digested, option=orjson.OPT_SORT_KEYS)}


def test_data_of_a_step_cannot_pass_for_the_end_of_its_record() -> None:
    content = golden("step_recorded.v1.json")["value"]
    inner = {"event_timestamp": 1, "span_event_timestamp": 2, "time_ms": 3}
    value = orjson.dumps({name: content[name] for name in content if name != "data"} | {"data": {"a": 1} | inner})
    end = value.index(b',"event_timestamp":1,')
    headers = (("ce_digested", str(end).encode()),)
    found = Record("steps", 0, 7, None, value, headers, 1)
    assert decode(found).digest == decode(record("steps", value)).digest


def test_the_header_of_digests_has_no_effect_on_other_kinds() -> None:
    event = TaskCancelled(run_id="r", time_ms=1, group_id="r/g", cause="test")
    encoded = encode(event)
    content = orjson.loads(encoded.value)
    value = orjson.dumps({name: content[name] for name in sorted(content, key=lambda name: name == "time_ms")})
    end = str(value.index(b',"time_ms"')).encode()
    found = decode(Record("tasks", 0, 7, None, value, (("ce_digested", end),), 1))
    assert found.digest == content_digest(event)


@given(step=STEPS)
def test_a_step_has_the_digest_of_the_json_that_pydantic_makes_of_it(step: StepRecorded) -> None:
    content = step.model_dump(mode="json")
    encoded = encode(step)
    assert orjson.loads(encoded.value) == content
    digested = {name: value for name, value in content.items() if name not in step.UNDIGESTED}
    digest = sha256_of(digested)
    assert content_digest(step) == digest_of(encoded) == digest
    assert decode(as_record(encoded)).digest == digest
    assert decode(as_record(encoded, ("traceparent", b"00-1"))).digest == digest
    without_header = decode(record("steps", encoded.value, encoded.key))
    assert without_header.digest == sha256_of(digested, option=orjson.OPT_SORT_KEYS)


def test_a_chain_names_its_start_its_parts_and_their_order() -> None:
    one, two = "11" * 32, "22" * 32
    assert len({chain("a", [one, two]), chain("a", [two, one]), chain("b", [one, two]), chain("a", [one])}) == 4
    assert chain("a", [one, two]) == chain("a", iter([one, two]))
