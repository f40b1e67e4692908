"""Dead letters: the record as it came, where it came from, and why."""

import asyncio
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.codec import event_id_of, kind_of
from rollstream.eventlog.dead_letters import (
    PREFIX,
    REDRIVEN_FROM,
    REDRIVEN_TO,
    REFERENCE,
    WHOLE,
    DeadLetterIndex,
    origin,
    original,
    send_dead_letter,
)
from rollstream.eventlog.log import Record, TopicPartition
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.schemas.errors import DecodeError, LogError
from rollstream.schemas.settings import ArtifactRef
from rollstream.schemas.topics import MIB

ERROR = DecodeError("not UTF-8 JSON: é")


def sent(record: Record, artifacts: ArtifactStore | None = None, error: BaseException = ERROR) -> Record:
    async def main() -> Record:
        log = MemoryLog()
        position = await send_dead_letter(
            log, record, service="processors", stage="decode", error=error, artifacts=artifacts
        )
        return (await log.fetch([position]))[0]

    return asyncio.run(main())


def test_a_dead_letter_has_the_record_its_origin_and_the_reason() -> None:
    letter = sent(Record("steps", 3, 41, b"\xffkey", b"\xfe bytes", (("ce_id", b"x"), ("ce_id", b"y")), 5))
    assert (letter.topic, letter.key, letter.value) == ("dlq", b"\xffkey", b"\xfe bytes")
    reported = dict(letter.headers)
    assert reported["__connect.errors.topic"] == b"rollstream.steps.v1"
    assert reported["__connect.errors.partition"] == b"3"
    assert reported["__connect.errors.offset"] == b"41"
    assert reported["__connect.errors.connector.name"] == b"processors"
    assert reported["__connect.errors.stage"] == b"decode"
    assert reported["__connect.errors.exception.class.name"] == b"rollstream.schemas.errors.DecodeError"
    assert reported["__connect.errors.exception.message"] == "not UTF-8 JSON: é".encode()
    assert letter.headers[-2:] == (("ce_id", b"x"), ("ce_id", b"y"))
    assert origin(letter.headers) == ("steps", 3, 41)


@pytest.mark.parametrize(("key", "value"), [(None, None), (b"k", None), (None, b"v"), (b"", b"")])
def test_missing_keys_and_values_stay_missing(key: bytes | None, value: bytes | None) -> None:
    letter = sent(Record("tasks", 0, 0, key, value, (), 5))
    assert (letter.key, letter.value) == (key, value)


@pytest.mark.parametrize("name", ["ce_type", "ce_id", REFERENCE, WHOLE])
def test_a_header_of_null_is_kept_and_read_as_none(name: str, tmp_path: Path) -> None:
    record = Record("tasks", 0, 0, b"k", None, ((name, None),), 5)
    assert (kind_of(record), event_id_of(record)) == (None, "")
    letter = sent(record)
    kept = record.headers if name.startswith("ce_") else ()
    assert original(letter, ArtifactStore(str(tmp_path))) == replace(
        record, headers=kept, timestamp_ms=letter.timestamp_ms
    )


@pytest.mark.parametrize("name", ["topic", "partition", "offset", "stage"])
def test_a_letter_with_a_header_of_null_ends_no_reader(name: str) -> None:
    async def main() -> None:
        log = MemoryLog()
        letter = Record("steps", 3, 41, b"k", b"v", (), 5)
        position = await send_dead_letter(log, letter, service="p", stage="decode", error=ERROR)
        (written,) = await log.fetch([position])
        headers = tuple((one, None if one == PREFIX + name else content) for one, content in written.headers)
        await log.send_raw("dlq", key=b"k", value=b"v", headers=headers)
        await log.send_raw("dlq", key=b"k", value=None, headers=((REDRIVEN_FROM, None), (REDRIVEN_TO, None)))
        index = DeadLetterIndex(log)
        await index.refresh()
        assert (index.num_read, index.offsets(TopicPartition("steps", 3))) == (3, {41})

    asyncio.run(main())


@pytest.mark.parametrize("record_bytes", [8 * MIB - 200, 8 * MIB])
def test_above_the_limit_a_letter_holds_a_reference_to_the_bytes(record_bytes: int, tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    value = secrets.token_bytes(record_bytes)
    letter = sent(Record("steps", 3, 41, b"k", value, (), 5), store)
    assert letter.value is None
    assert original(letter, store).value == value
    ref = ArtifactRef.model_validate_json(dict(letter.headers)[REFERENCE] or b"")
    assert store.read(ref) == value
    assert origin(letter.headers) == ("steps", 3, 41)


def test_without_a_store_a_letter_above_the_limit_is_refused_by_name() -> None:
    with pytest.raises(LogError, match="steps/3@41"):
        sent(Record("steps", 3, 41, b"k", b"x" * 8 * MIB, (), 5))


def test_a_letter_passes_even_if_the_record_is_all_key_or_headers(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    for record in (
        Record("steps", 3, 41, b"k" * (8 * MIB - 200), b"v", (), 5),
        Record("steps", 3, 41, b"k", b"v", (("h", b"x" * (8 * MIB - 200)),), 5),
        Record("steps", 3, 41, b"k" * (8 * MIB - 200), None, (), 5),
        Record("steps", 3, 41, b"k" * (8 * MIB - 200), None, (("ce_type", None),), 5),
    ):
        letter = sent(record, store)
        assert origin(letter.headers) == ("steps", 3, 41)
        assert original(letter, store) == replace(record, timestamp_ms=letter.timestamp_ms)


def test_a_long_reason_is_cut_to_whole_characters() -> None:
    letter = sent(Record("steps", 0, 0, b"k", b"v", (), 5), error=ValueError("é" * 10_000))
    reason = dict(letter.headers)["__connect.errors.exception.message"] or b""
    assert 1000 < len(reason.decode()) < 5000


def test_a_record_dead_lettered_again_has_its_last_origin() -> None:
    once = sent(Record("steps", 3, 41, b"k", b"v", (), 5))
    again = sent(Record("tasks", 1, 2, once.key, once.value, once.headers, 5))
    assert origin(again.headers) == ("tasks", 1, 2)
    assert again.value == b"v"


def test_a_records_own_headers_cannot_pass_for_a_reference(tmp_path: Path) -> None:
    record = Record("steps", 3, 41, b"k", b"v", ((REFERENCE, b'{"uri": "/etc/passwd"}'), ("ce_id", b"x")), 5)
    found = original(sent(record), ArtifactStore(str(tmp_path)))
    assert (found.value, found.headers) == (b"v", (("ce_id", b"x"),))


def test_the_reason_of_a_letter_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "s3cr3t-value")
    letter = sent(Record("steps", 3, 41, b"key", b"bytes", (), 5), error=ValueError("no s3cr3t-value here"))
    assert dict(letter.headers)["__connect.errors.exception.message"] == b"no ${MY_SECRET} here"


@pytest.mark.parametrize("name", [REFERENCE, WHOLE])
@pytest.mark.parametrize("content", [b"not json", b"{}", b"\xff"])
def test_a_reference_that_names_no_artifact_is_one_clear_error(name: str, content: bytes, tmp_path: Path) -> None:
    letter = sent(Record("steps", 3, 41, b"k", None, (), 5))
    with pytest.raises(LogError, match="does not name the artifact with its bytes; rollstream did not write it"):
        original(replace(letter, headers=(*letter.headers, (name, content))), ArtifactStore(str(tmp_path)))
