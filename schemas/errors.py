"""Every error that rollstream raises on purpose. A user sees the message only, never a traceback.

RollstreamError
├── ConfigError            a key, value or file of the configuration is wrong (names the path)
├── LogError               the event log refuses or cannot be reached
│   ├── BrokerError        the embedded broker did not start, or its workspace is in use
│   ├── TopicError         a topic is missing or has other partitions or settings than the table
│   └── TruncatedError     offsets that a reader needs no longer exist (names topic, partition, range)
├── DecodeError            a record is not an event of its topic (goes to the dead letters)
├── FoldError              a fold raised on a record (goes to the dead letters; its cause says why)
├── ArtifactError          an artifact is missing or its hash is wrong
├── ModelError             a model, tokenizer or adapter folder cannot be loaded
├── EnvironmentRunError    an environment or reward raised, hung or returned what it must not
├── ComponentError         a trainer, builder or adapter raised what is none of these errors
├── VersionDivergedError   a version that was published already has another hash
├── FencedError            a newer learner or owner has taken over
├── QueryError             an SQL query is not allowed or failed
└── RunFailedError         a run ended in failure

Narrower ones stand beside the code that tells them apart: RewardError, NoScoreError and TurnsExhausted are
EnvironmentRunErrors, RequiredValidationError is a RunFailedError; MetricsFileError with FileInUseError
(metrics/database.py) and Refusal (an answer of the OpenAI endpoint) are branches of their own.
"""


class RollstreamError(Exception):
    """Root of the tree; its message is one line that names the place and the remedy."""


class ConfigError(RollstreamError, ValueError):
    """A key, value or file of the configuration is wrong."""


class LogError(RollstreamError):
    """The event log refuses or cannot be reached."""


class BrokerError(LogError):
    """The embedded broker did not start, or its workspace is in use."""


class TopicError(LogError):
    """A topic is missing or differs from the topic table."""


class TruncatedError(LogError):
    """Offsets that a reader needs no longer exist."""


class DecodeError(RollstreamError, ValueError):
    """A record is not an event of its topic."""


class FoldError(RollstreamError):
    """A fold raised on a record; `__cause__` is what it raised."""


class ArtifactError(RollstreamError):
    """An artifact is missing or its hash is wrong."""


class ModelError(RollstreamError):
    """A model, tokenizer or adapter folder cannot be loaded."""


class EnvironmentRunError(RollstreamError):
    """An environment or reward raised, hung or returned what it must not."""


class ComponentError(RollstreamError):
    """A trainer, trajectory builder or trainer adapter raised; `__cause__` is what it raised."""


class VersionDivergedError(RollstreamError):
    """A version that was published already has another hash."""


class FencedError(RollstreamError):
    """A newer learner or owner has taken over."""


class QueryError(RollstreamError, ValueError):
    """An SQL query is not allowed or failed."""


class RunFailedError(RollstreamError):
    """A run ended in failure."""


def told(error: BaseException) -> str:
    """Type and message of an exception of others' code, even if its own `__str__` raises."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 -- whatever others' code raises
        message = "(its message cannot be read)"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
