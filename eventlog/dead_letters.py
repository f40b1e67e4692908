"""Dead letters: a record that cannot be used, as it came, with why; Kafka Connect's error headers."""

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, Headers, Position, Record, record_size
from rollstream.schemas.errors import LogError
from rollstream.schemas.topics import BY_NAME, TOPICS

PREFIX = "__connect.errors."
REFERENCE = "rollstream.reference"
"""Header that holds the artifact (JSON) in place of a value above the record limit."""
MAX_MESSAGE_BYTES = 4096


async def send_dead_letter(
    log: EventLog,
    record: Record,
    *,
    service: str,
    stage: str,
    error: BaseException,
    artifacts: ArtifactStore | None = None,
) -> Position:
    """Keep a record that cannot be used; returns once all replicas have the letter.

    Raises LogError if the record is above the limit and there is no artifact store for its bytes.
    """
    headers = (*_headers(record, service, stage, error), *record.headers)
    value = record.value
    if record_size(record.key, value, headers) > TOPICS["dlq"].max_record_bytes:
        if artifacts is None or value is None:
            raise LogError(f"{record.topic}/{record.partition}@{record.offset} is too large for a dead letter")
        reference = artifacts.put_bytes(value, ".record")
        headers = (*headers, (REFERENCE, reference.model_dump_json().encode()))
        value = None
    return await log.send_raw("dlq", key=record.key, value=value, headers=headers)


def _headers(record: Record, service: str, stage: str, error: BaseException) -> Headers:
    topic = TOPICS[record.topic].name if record.topic in TOPICS else record.topic
    told = {
        "topic": topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "connector.name": service,
        "task.id": "0",
        "stage": stage,
        "class.name": type(error).__name__,
        "exception.class.name": f"{type(error).__module__}.{type(error).__qualname__}",
        "exception.message": str(error),
        "exception.stacktrace": "",
    }
    return tuple((PREFIX + name, text.encode()[:MAX_MESSAGE_BYTES]) for name, text in told.items())


def origin(headers: Headers) -> tuple[str, int, int]:
    """Short topic, partition and offset that a dead letter came from. Raises LogError if it does not say."""
    told = dict(headers)
    try:
        name = told[PREFIX + "topic"].decode()
        where = int(told[PREFIX + "partition"]), int(told[PREFIX + "offset"])
    except (KeyError, ValueError) as error:
        raise LogError("a dead letter without its origin in the headers") from error
    return (BY_NAME[name].short if name in BY_NAME else name), *where
