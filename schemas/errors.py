"""Every error that rollstream raises on purpose. A user sees the message only, never a traceback.

RollstreamError
├── ConfigError            a key, value or file of the configuration is wrong (names the path)
│   └── NotAllowedError    a record or stored configuration names what this process's settings do not allow
├── LogError               the event log refuses or cannot be reached
│   ├── AccessDeniedError  Kafka refuses who connects, or an operation that no ACL allows
│   ├── BrokerError        the embedded broker did not start, or its workspace is in use
│   │   └── BrokerLostError    its data were removed while it ran
│   ├── TopicError         a topic is missing or has other partitions or settings than the table
│   └── TruncatedError     offsets that a reader needs no longer exist (names topic, partition, range)
├── DecodeError            a record is not an event of its topic (goes to the dead letters)
├── FoldError              a fold raised on a record (goes to the dead letters; its cause says why)
├── ArtifactError          an artifact is missing or its hash is wrong
│   └── StoreUnavailableError  the artifact store does not answer or cannot be written; trying again may help
├── ModelError             a model, tokenizer or adapter folder cannot be loaded, or a model cannot answer
│   └── PromptRefusedError the model cannot take this prompt; it can take others
│       └── PromptTooLongError a prompt leaves the model no room for an answer
├── EnvironmentRunError    an environment or reward raised, hung or returned what it must not
│   └── ChatTemplateError  a chat template does not take the messages or tools of a program outside
├── ComponentError         a trainer, builder or adapter raised what is none of these errors
├── VersionDivergedError   a version that was published already has another hash
├── GatewayError           a client's request was refused by the producers' gateway, or never answered
├── FencedError            a newer learner or owner has taken over
├── QueryError             an SQL query is not allowed or failed
└── RunFailedError         a run ended in failure

Narrower errors are defined beside the code that distinguishes them: RewardError, NoScoreError and TurnsExhausted are
EnvironmentRunErrors, JobStateError is a ConfigError, RequiredValidationError is a RunFailedError; MetricsFileError with
FileInUseError (metrics/projection/connection.py) and Refusal (an answer of the OpenAI endpoint) are branches of their
own.
"""

import difflib
import errno
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    import asyncio

NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",
)
"""Parts of messages where memory ran out and the exception has no type of its own: torch's allocator on a CPU, CUDA
outside of torch's allocator, Triton, and the libraries cuBLAS, cuDNN, cuSOLVER and cuSPARSE.
"""

OF_DEVICE = (
    "CUDA error",
    "CUDA driver error",
    "cuDNN error",
    "CUBLAS_STATUS_",
    "CUSOLVER_STATUS_",
    "CUSPARSE_STATUS_",
    "Triton Error [CUDA]",
)
"""Parts of messages about a GPU that this process may not be able to use any more."""
OF_DISKS = (errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE)
"""Numbers of errors of a disk that is full, or of a file system that has failed."""
OF_PROCESSES = ("gloo/transport", "NCCL", "can't start new thread")
"""Parts of messages about a connection to other processes of a torchrun, or a limit of the machine."""

MAX_NEAR = 10
"""Near names among which one of the same letters is looked for."""
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_OF_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Names of folders of packages, also of the system's or the user's that a virtual environment lets in."""


class RollstreamError(Exception):
    """Root of the tree; its message is one line that names the place and the remedy."""


class ConfigError(RollstreamError, ValueError):
    """A key, value or file of the configuration is wrong."""


class NotAllowedError(ConfigError):
    """A record or a stored configuration names what the process's own settings do not allow."""


class LogError(RollstreamError):
    """The event log refuses or cannot be reached."""


class AccessDeniedError(LogError):
    """Kafka refuses who connects, or an operation that no ACL allows."""


class BrokerError(LogError):
    """The embedded broker did not start, or its workspace is in use."""


class BrokerLostError(BrokerError):
    """The data of the embedded broker were removed while it ran."""


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


class StoreUnavailableError(ArtifactError):
    """The artifact store does not answer, or cannot be written: nothing is known of the artifact itself."""


class ModelError(RollstreamError):
    """A model, tokenizer or adapter folder cannot be loaded, or a model cannot answer."""


class PromptRefusedError(ModelError):
    """The model cannot take this prompt; it can take others. `param`: the sampling option that it refuses, if any."""

    param: str | None = None


class PromptTooLongError(PromptRefusedError):
    """A prompt leaves the model no room for an answer."""


class EnvironmentRunError(RollstreamError):
    """An environment or reward raised, hung or returned what it must not."""


class ChatTemplateError(EnvironmentRunError):
    """A model's chat template does not take the messages or tools of a program outside."""


class ComponentError(RollstreamError):
    """A trainer, trajectory builder or trainer adapter raised; `__cause__` is what it raised."""


class VersionDivergedError(RollstreamError):
    """A version that was published already has another hash."""


class GatewayError(RollstreamError):
    """The producers' gateway refused a client's request, or did not answer it."""

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status code; None if there was no answer."""
        self.code = code
        """Error code from the answer: `rollout_ended`, `invalid_api_key`, ..."""


class FencedError(RollstreamError):
    """A newer learner or owner has taken over."""


class QueryError(RollstreamError, ValueError):
    """An SQL query is not allowed or failed."""


class RunFailedError(RollstreamError):
    """A run ended in failure."""


OF_LOG_AND_STORE = (LogError, StoreUnavailableError)
"""Errors of what a run is kept in. They tell nothing of its model or its components, so they leave the run open."""


class InvalidValue(NamedTuple):
    """Pydantic's complaint about a value, in one line that never shows the value."""

    path: str
    """Dotted path; empty for the value as a whole."""
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def first_invalid(error: ValidationError, location: str = "", *, model: type[BaseModel] | None = None) -> InvalidValue:
    """The first of pydantic's errors, below `location`.

    `model`: what was validated. Then an unknown key comes first, with the nearest known one, because the key that was
    meant is then missing too.
    """
    errors = error.errors(include_url=False, include_input=False)
    if model is not None:
        errors.sort(key=lambda one: one["type"] != "extra_forbidden")
    first = errors[0]
    path = ".".join(str(part) for part in (location, *first["loc"]) if part != "")
    if model is None or first["type"] != "extra_forbidden":
        return InvalidValue(path, first["msg"].removeprefix("Value error, "))
    return InvalidValue(path, unknown_key(first["loc"], model))


def unknown_key(path: Sequence[str | int], model: type[BaseModel]) -> str:
    """Message for an unknown key at a path inside a model's values, with the key that may be meant."""
    known = [key for key in keys_at(model, path[:-1]) if key != path[-1]]  # another block may take it
    return f"unknown key; {hint(str(path[-1]), known)}" if known else "unknown key"


def keys_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Keys of the models at a path (a path may match several blocks of a union)."""
    annotations: list[Any] = [model]
    for part in path:
        annotations = [inner for annotation in annotations for inner in _inside(annotation, part)]
    return sorted({key for annotation in annotations for found in _models(annotation) for key in _keys(found)})


def _keys(model: type[BaseModel]) -> Iterator[str]:
    yield from ((field.alias or name) for name, field in model.model_fields.items())


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that an annotation names directly (in unions and Annotated, not in containers)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif not _is_container(annotation):
        for inner in get_args(annotation):
            yield from _models(inner)


def _inside(annotation: Any, part: str | int) -> Iterator[Any]:
    """Annotations of the value at `part` inside a value of this annotation."""
    if _is_container(annotation):
        yield get_args(annotation)[-1]
        return
    for found in _models(annotation):
        for name, field in found.model_fields.items():
            if part in (name, field.alias):
                yield field.annotation


def _is_container(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) in (dict, list, tuple)


def hint(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name: the nearest known name, or the list of all."""
    names = sorted(known)
    near = nearest(name, names)
    return f"did you mean {near}?" if near is not None else f"known keys: {', '.join(names)}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one is likely to mean; None if none is near.

    Of 8,054 slips in our own keys (a letter or two, or a word is lost) 98 % are found; of 2,302 keys that were written
    into the wrong block 1 % gets another key's name. With a cutoff of 0.5 these were 99 % and 14 %. A name of the same
    letters goes before others.
    """
    found = difflib.get_close_matches(name, list(known), n=MAX_NEAR, cutoff=0.7)
    exchanged = [one for one in found if sorted(one) == sorted(name)]
    return next(iter([*exchanged, *found]), None)


def describe(error: BaseException) -> str:
    """Type, place and message of an exception of others' code, even if its own `__str__` raises or exits.

    `KeyError (game.py line 12, in lookup): 'x'`; of an exception group, as a task group raises it, its first exception.
    """
    if isinstance(error, BaseExceptionGroup):
        return describe(first_error(cast("BaseExceptionGroup[BaseException]", error)))
    message = message_of(error)
    source_line = "" if isinstance(error, RollstreamError) else raised_at(error)
    kind = type(error).__name__ + (f" ({source_line})" if source_line else "")
    return f"{kind}: {message}" if message else kind


def message_of(error: BaseException) -> str:
    """Message of an exception, even if its `__str__`, which may be others' code, raises or exits."""
    try:
        return str(error)
    except (Exception, SystemExit, KeyboardInterrupt):  # noqa: BLE001 -- whatever others' code raises
        return "(its message cannot be read)"


def first_error(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a group of tasks ended with: the others follow from it."""
    first = failed.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return first_error(cast("BaseExceptionGroup[BaseException]", first))
    return first


def is_asked_to_end(task: "asyncio.Task[Any] | None") -> bool:
    """Whether a CancelledError in a task is meant for it; else it is one that user code raised by itself."""
    return task is not None and task.cancelling() > 0


def retrieve_exception(task: "asyncio.Future[Any]") -> None:
    """Take the exception of a task that is over, which asyncio would report as never retrieved."""
    if not task.cancelled():
        task.exception()


def raised_at(error: BaseException) -> str:
    """File, line and function of the frame of users' code that an exception came from; empty if there is none.

    That is the innermost frame outside of rollstream, the standard library and installed packages; where there is none,
    the innermost outside of rollstream, else the innermost.
    """
    every = list(traceback.walk_tb(error.__traceback__))
    frames = [found for found in every if not _is_of(found[0], "importlib")]
    is_import = len(frames) < len(every)
    return called_at(error) or _innermost(_of_others(frames)) or _innermost([] if is_import else frames)


def called_at(error: BaseException) -> str:
    """File, line and function of the innermost frame of users' code; empty if an exception passed through none."""
    others = _of_others(traceback.walk_tb(error.__traceback__))
    return _innermost([found for found in others if not _is_installed(found[0].f_code.co_filename)])


def _is_installed(file: str) -> bool:
    return file.startswith(_INSTALLED) or not _OF_PACKAGES.isdisjoint(PurePath(file).parts)


def _of_others(frames: Iterable[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    """Frames outside of rollstream and of the machinery that imports."""
    return [found for found in frames if not _is_of(found[0], "importlib") and not _is_of(found[0], "rollstream")]


def _innermost(frames: list[tuple[FrameType, int]]) -> str:
    if not frames:
        return ""
    frame, line = frames[-1]
    return f"{PurePath(frame.f_code.co_filename).name} line {line}, in {frame.f_code.co_name}"


def is_of_users(error: BaseException) -> bool:
    """Whether an exception is none of rollstream's classes, or code outside of rollstream raised it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    is_ours = type(error).__module__.split(".", 1)[0] == "rollstream" or isinstance(error, RollstreamError)
    return not is_ours or bool(frames and not _is_of(frames[-1][0], "rollstream"))


def _is_of(frame: FrameType, package: str) -> bool:
    return str(frame.f_globals.get("__name__")).split(".", 1)[0] == package


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device, or the machine, has no memory left: by its type, or by its message."""
    return _is_one_of(error, ("OutOfMemoryError", "MemoryError"), NO_MEMORY)


def is_of_device(error: BaseException) -> bool:
    """Whether an exception comes from a GPU, which only another process may be able to use again."""
    return not is_out_of_memory(error) and _is_one_of(error, ("AcceleratorError",), OF_DEVICE)


def is_passing(error: BaseException) -> bool:
    """Whether an exception comes from outside of the process, so that another start may not have it.

    That is a file system, a disk, a network, the broker, or another process that trained with this one and has ended.
    """
    if isinstance(error, (OSError, *OF_LOG_AND_STORE)):
        return not isinstance(error, TruncatedError)
    return any(
        _is_one_of(one, ("DistError", "KafkaError", "BrokenExecutor"), OF_PROCESSES)
        or (isinstance(one, OSError) and one.errno in OF_DISKS)
        for one in with_causes(error)
    )


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those behind it: a compiler hides that of a full disk by `from None`. None has none."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_one_of(error: BaseException, names: Iterable[str], messages: Iterable[str]) -> bool:
    """Whether an exception has a class of such a name, or a part of such a message."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch and aiokafka are not imported here
    if not kinds.isdisjoint(names):
        return True
    message = message_of(error)
    return any(part in message for part in messages)
