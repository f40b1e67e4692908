"""`dlq`: what it tells of letters, and what it sends again, refuses, or will not send twice."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.eventlog import codec
from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.dead_letters import REDRIVEN_FROM, original, send_dead_letter
from rollstream.eventlog.log import Headers, Position, TopicPartition, format_position, partition_of
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.recorded.ingest import send_letters
from rollstream.harness.recorded.lines import BadLine
from rollstream.harness.upkeep.dead_letters import Letter, Redrive, prepare, read_letter, read_letters, remedies, send
from rollstream.schemas.errors import DecodeError, LogError, RollstreamError
from rollstream.schemas.events import RewardRecorded, Tick
from rollstream.schemas.topics import MIB

GROUP = "run-1/rl/e00000/t00000"
PARTITIONS = 3
STORE = ArtifactStore("/nowhere")
OWN = partition_of(GROUP, PARTITIONS)


def reward(value: float = 1.0) -> RewardRecorded:
    base = {"run_id": "run-1", "time_ms": 1, "group_id": GROUP, "rollout_id": f"{GROUP}/m0/a0"}
    return RewardRecorded.model_validate(base | {"reward_index": 0, "name": "task", "value": value})


GOOD = codec.encode(reward())
BAD = GOOD.value.replace(b'"value":1.0', b'"value":NaN')


async def add_dead_letter(log: MemoryLog, value: bytes | None, *, key: bytes = GOOD.key, partition: int = OWN) -> int:
    """A record in `steps` and its letter; returns the letter's number."""
    where = await log.send_raw("steps", key=key, value=value, headers=(("ce_id", b"x"),), partition=partition)
    (record,) = await log.fetch([where])
    error: RollstreamError = LogError("the handler raised")
    try:
        codec.decode(record, num_partitions=PARTITIONS)
    except DecodeError as found:
        error = found
    return (await send_dead_letter(log, record, service="processors-1", stage="assemble", error=error)).offset


async def redrive(log: MemoryLog, *numbers: int, **how: Any) -> list[Position]:
    prepared: list[Redrive] = await prepare(log, STORE, numbers, **how)
    return await send(log, prepared)


def test_dead_letters_are_listed_oldest_first_each_record_once() -> None:
    async def go() -> list[Letter]:
        log = MemoryLog(num_partitions=PARTITIONS)
        await add_dead_letter(log, b"{")
        await add_dead_letter(log, BAD)
        (stored,) = await log.fetch([Position("dlq", 0, 1)])
        again = original(stored, STORE)
        await send_dead_letter(log, again, service="processors-1", stage="assemble", error=DecodeError("again"))
        await log.send_raw("dlq", key=None, value=b"what is this")
        return await read_letters(log)

    letters = asyncio.run(go())
    assert [letter.number for letter in letters] == [0, 1, 3], "the third one repeats the second, after a crash"
    assert letters[0].came_from == Position("steps", OWN, 0)
    assert (letters[0].service, letters[0].stage) == ("processors-1", "assemble")
    assert letters[0].error == "rollstream.schemas.errors.DecodeError"
    assert "not UTF-8 JSON" in letters[0].reason
    assert letters[2].came_from is None


def test_a_letter_belongs_to_the_run_that_its_key_or_its_value_names() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        await add_dead_letter(log, b"{", key=b"run-1/rl")
        await add_dead_letter(log, GOOD.value, key=b"run-2/rl")
        await add_dead_letter(log, b"{", key=b"\xff")
        found = {run: [one.number for one in await read_letters(log, run=run)] for run in ("run-1", "run-2", "run-3")}
        assert found == {"run-1": [0, 1], "run-2": [1], "run-3": []}

    asyncio.run(go())


def test_a_redriven_record_is_unchanged_in_its_own_partition_and_names_its_origin() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        number = await add_dead_letter(log, GOOD.value)
        (to,) = await redrive(log, number)
        assert format_position(to) == f"steps/{OWN}@1"
        (record,) = await log.fetch([to])
        assert (record.key, record.value) == (GOOD.key, GOOD.value)
        assert record.headers == (("ce_id", b"x"), (REDRIVEN_FROM, f"dlq/0@{number}".encode()))

    asyncio.run(go())


def test_a_dead_letter_that_still_cannot_be_decoded_is_refused_before_anything_is_sent() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        good, bad = await add_dead_letter(log, GOOD.value), await add_dead_letter(log, BAD)
        with pytest.raises(
            DecodeError, match=rf"^dead letter {bad} still cannot be decoded: .*--value FILE, or .* --force"
        ):
            await redrive(log, good, bad)
        assert (await log.end_offsets("steps"))[OWN] == 2
        (to,) = await redrive(log, bad, force=True)
        assert (await log.fetch([to]))[0].value == BAD

    asyncio.run(go())


@pytest.mark.parametrize("how", [{}, {"value": GOOD.value}, {"force": True}])
def test_an_event_in_a_foreign_partition_is_sent_to_its_own(how: dict[str, Any]) -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        number = await add_dead_letter(log, GOOD.value, partition=(OWN + 1) % PARTITIONS)
        (to,) = await redrive(log, number, **how)
        assert format_position(to) == f"steps/{OWN}@0"
        assert codec.decode((await log.fetch([to]))[0], num_partitions=PARTITIONS).event == reward()
        (letter,) = await read_letters(log)
        assert letter.redriven_to == (to,)

    asyncio.run(go())


def test_a_tick_belongs_to_the_partition_that_it_names() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        made = codec.encode(Tick(run_id="", time_ms=1, partition=2))
        number = await add_dead_letter(log, made.value, key=made.key, partition=0)
        assert format_position((await redrive(log, number))[0]) == "steps/2@0"
        made = codec.encode(Tick(run_id="", time_ms=1, partition=7))
        number = await add_dead_letter(log, made.value, key=made.key, partition=0)
        with pytest.raises(DecodeError, match=r"wrong partition: .* belongs to 7"):
            await redrive(log, number)

    asyncio.run(go())


def test_a_letter_is_not_redriven_twice_unless_it_is_asked_for() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        number = await add_dead_letter(log, GOOD.value)
        (stored,) = await log.fetch([Position("dlq", 0, number)])
        record = original(stored, STORE)
        twin = await send_dead_letter(log, record, service="other", stage="x", error=LogError("the same record"))
        with pytest.raises(LogError, match="has the same record"):
            await redrive(log, number, twin.offset)
        await redrive(log, number, number)
        for one in (number, twin.offset):
            with pytest.raises(LogError, match=rf"letter {one} was already redriven to steps/{OWN}@1; --again"):
                await redrive(log, one)
        await redrive(log, twin.offset, again=True)
        assert (await log.end_offsets("steps"))[OWN] == 3
        letters = await read_letters(log)
        assert [[format_position(to) for to in letter.redriven_to] for letter in letters] == [
            [f"steps/{OWN}@1", f"steps/{OWN}@2"]
        ] * 2

    asyncio.run(go())


def test_a_corrected_value_brings_its_own_key_and_event_headers() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        number = await add_dead_letter(log, BAD, key=b"run-1/wrong")
        with pytest.raises(DecodeError, match="still cannot be decoded"):
            await redrive(log, number, value=BAD)
        (to,) = await redrive(log, number, value=GOOD.value)
        (record,) = await log.fetch([to])
        assert codec.decode(record, num_partitions=PARTITIONS).event == reward()
        assert dict(record.headers)["ce_id"] == reward().event_id.encode()

    asyncio.run(go())


def test_a_corrected_step_has_the_digest_of_its_chain_however_it_is_laid_out() -> None:
    event = reward()
    laid_out = json.dumps(orjson.loads(codec.encode(event).value), indent=1).encode() + b"\n"

    async def redriven(headers: Headers) -> str:
        log = MemoryLog(num_partitions=PARTITIONS)
        where = await log.send_raw("steps", key=GOOD.key, value=BAD, headers=headers, partition=OWN)
        (record,) = await log.fetch([where])
        letter = await send_dead_letter(log, record, service="processors-1", stage="assemble", error=DecodeError("x"))
        (to,) = await redrive(log, letter.offset, value=laid_out)
        return codec.decode((await log.fetch([to]))[0], num_partitions=PARTITIONS).digest

    assert asyncio.run(redriven(GOOD.headers)) == codec.content_digest(event)
    before = tuple((name, value) for name, value in GOOD.headers if name != codec.DIGESTED)
    assert asyncio.run(redriven(before)) == codec.canonical_digest(
        {name: value for name, value in orjson.loads(laid_out).items() if name not in event.UNDIGESTED}
    )


def test_a_redriven_record_that_dies_again_is_a_letter_of_its_own() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        first = await add_dead_letter(log, BAD)
        (to,) = await redrive(log, first, force=True)
        (record,) = await log.fetch([to])
        second = await send_dead_letter(log, record, service="processors-1", stage="assemble", error=DecodeError("x"))
        (again,) = await redrive(log, second.offset, value=GOOD.value)
        (record,) = await log.fetch([again])
        assert [content for name, content in record.headers if name == REDRIVEN_FROM] == [
            f"dlq/0@{second.offset}".encode()
        ]

    asyncio.run(go())


def test_a_line_that_was_to_be_ingested_is_refused_with_what_to_do() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        await send_letters(log, STORE, [BadLine(41, b"{", "not JSON")], Path("in.jsonl"))
        with pytest.raises(
            LogError, match=r"dead letter 0 is line 41 of in\.jsonl, .*; correct the line and ingest it"
        ):
            await redrive(log, 0, value=GOOD.value)
        (letter,) = await read_letters(log)
        assert letter.runs == frozenset()
        assert remedies([letter]) == "correct the line of a letter of service ingest in its file, and ingest it again"
        number = await add_dead_letter(log, b"{")
        letters = await read_letters(log)
        assert remedies(letters[1:]) == "`dlq redrive NUMBER --value FILE` sends it corrected"
        assert remedies(letters) == f"{remedies(letters[1:])}; {remedies(letters[:1])}"
        assert letters[1].number == number

    asyncio.run(go())


def test_a_number_without_a_dead_letter_is_refused() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        with pytest.raises(LogError, match=r"dead letter 4 does not exist .topic dlq is empty"):
            await redrive(log, 4)
        await redrive(log, await add_dead_letter(log, GOOD.value))
        await log.send_raw("dlq", key=None, value=b"no origin")
        with pytest.raises(LogError, match=r"dead letter 4 does not exist .topic dlq holds 0 to 2"):
            await read_letter(log, 4)
        with pytest.raises(LogError, match="record 1 of dlq marks a redrive"):
            await read_letter(log, 1)
        for number in (1, 2):
            with pytest.raises(LogError, match="has no source position"):
                await redrive(log, number)

    asyncio.run(go())


def test_a_record_above_its_topics_limit_cannot_be_redriven(tmp_path: Path) -> None:
    async def go() -> None:
        log, store = MemoryLog(num_partitions=PARTITIONS), ArtifactStore(str(tmp_path))
        where = await log.send_raw("steps", key=GOOD.key, value=b"{", partition=OWN)
        record = replace((await log.fetch([where]))[0], value=b" " * 10 * MIB + GOOD.value)
        letter = await send_dead_letter(
            log, record, service="p", stage="assemble", error=DecodeError("large"), artifacts=store
        )
        with pytest.raises(LogError, match=r"letter 0 cannot be redriven: .* limit"):
            await prepare(log, store, [letter.offset])

    asyncio.run(go())


def test_a_note_without_its_letter_and_a_forged_one_are_passed_over() -> None:
    async def go() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        await add_dead_letter(log, GOOD.value)
        forged = (("rollstream.redriven.to", b"{"), (REDRIVEN_FROM, b"dlq/0@0"))
        await log.send_raw("dlq", key=None, value=None, headers=forged)
        log.truncate(TopicPartition("dlq", 0), 1)
        await log.send_raw(
            "dlq",
            key=None,
            value=None,
            headers=(("rollstream.redriven.to", b'["steps", 0, 7]'), (REDRIVEN_FROM, b"dlq/0@0")),
        )
        (letter,) = await read_letters(log)
        assert (letter.number, letter.redriven_to) == (1, ())

    asyncio.run(go())


def test_lines_of_several_files_are_letters_of_their_own() -> None:
    async def body() -> None:
        log = MemoryLog(num_partitions=PARTITIONS)
        monday = [BadLine(3, b"x", "not valid JSON"), BadLine(7, b"y", "not a JSON object")]
        for _ in range(2):  # as after a crash
            await send_letters(log, STORE, monday, Path("monday.jsonl"))
        await send_letters(log, STORE, [BadLine(3, b"x", "not valid JSON")], Path("tuesday.jsonl"))
        await send_letters(log, STORE, [BadLine(3, b"zz", "unknown key 'a'")], Path("monday.jsonl"))
        found = await read_letters(log)
        assert [one.reason for one in found] == [
            "monday.jsonl line 3: not valid JSON", "monday.jsonl line 7: not a JSON object",
            "tuesday.jsonl line 3: not valid JSON", "monday.jsonl line 3: unknown key 'a'",
        ]  # fmt: skip

    asyncio.run(body())
