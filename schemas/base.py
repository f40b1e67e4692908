"""Base class of all events: a literal kind, a schema version, event time, and ids derived from what happened."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import eq
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollstream.schemas import ids
from rollstream.schemas.errors import ConfigError


def added(default: Any, **constraints: Any) -> Any:
    """A field that an event, or a value in it, did not have yet when it was published.

    At its default it is not written, so what was recorded without it has the same bytes and digest when it is encoded
    or folded again.
    """
    exclude_if = partial(eq, default)
    if default == {}:  # pydantic would make a deep copy of it for every event
        return Field(default_factory=dict, exclude_if=exclude_if, **constraints)
    return Field(default=default, exclude_if=exclude_if, **constraints)


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys forbidden, and no infinite number, which an event cannot carry."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def check_no_truth_values(given: Any, read: Any, path: str = "") -> None:
    """Raises ConfigError for true or false where a number is expected: pydantic reads them as 1 and 0.

    Recorded settings may have them. `given`: the values as written; `read`: the settings that were made of them.
    """
    if isinstance(given, bool) and isinstance(read, int | float) and not isinstance(read, bool):
        raise ConfigError(f"{path}: is {str(given).lower()}; give a number")
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(given, Mapping):
        items = cast("Mapping[str, Any]", given).items()
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        items = enumerate(cast("list[Any]", given))
    for key, value in items:
        check_no_truth_values(value, _read_at(read, key), f"{path}.{key}" if path else str(key))


def _read_at(read: Any, key: Any) -> Any:
    """The value of a key or an index; None if there is none under this name."""
    if isinstance(read, BaseModel):
        return getattr(read, key, None) if key in type(read).model_fields else None
    if isinstance(read, Mapping):
        return cast("Mapping[Any, Any]", read).get(key)
    read_items = cast("list[Any]", read) if isinstance(read, list | tuple) else []
    return read_items[key] if isinstance(key, int) and key < len(read_items) else None


def _at_home(path: Path) -> Path:
    return Path(os.path.expanduser(path))  # leaves the `~` of an unknown user


UserPath = Annotated[Path, AfterValidator(_at_home)]
"""A path in a configuration: a `~` at its beginning is the user's home."""

Model = TypeVar("Model", bound=BaseModel)


def validator_of(model: type[Model]) -> Callable[[dict[str, Any]], Model]:
    """Validator behind `model.model_validate`, without its options, for objects made thousands of times a second."""
    return model.__pydantic_validator__.validate_python


def maker_of(model: type[Model]) -> Callable[[dict[str, Any]], Model]:
    """Maker of a model's objects from values that nothing checks or copies, at a sixth of the time of `validator_of`.

    For what this program has made itself, of the fields' own types. A field with a `default_factory` has to be given.
    """
    defaults, put = {name: field.default for name, field in model.model_fields.items()}, object.__setattr__

    def make(values: dict[str, Any]) -> Model:
        made, content = model.__new__(model), defaults | values
        if len(content) > len(defaults):
            raise TypeError(f"{model.__name__} has no field {', '.join(values.keys() - defaults.keys())}")
        put(made, "__dict__", content)
        put(made, "__pydantic_fields_set__", set(values))
        put(made, "__pydantic_extra__", None)
        put(made, "__pydantic_private__", None)
        return made

    return make


class Locator(BaseModel):
    """Position of a record in the log. Always outside digests: content decides equality, not position."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: int = Field(ge=0)
    offset: int = Field(ge=0)


DigestOf = Literal["content", "record", "sorted record"]
"""The bytes that an event's digest is made of."""


MAX_TIME_MS = 2**53
"""Above all times and time-outs of events: a record beyond it becomes a dead letter, because no clock that goes on from
its time could be written. What JSON holds exactly everywhere.
"""


class Event(BaseModel):
    """A past-tense fact. Frozen; unknown fields are forbidden.

    `UNDIGESTED` names the top-level fields that are not content: times, durations, locators.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    TOPIC: ClassVar[str]
    """Short name of the topic, a key of `rollstream.schemas.topics.TOPICS`."""
    UNDIGESTED: ClassVar[frozenset[str]] = frozenset({"time_ms"})
    DIGEST_OF: ClassVar[DigestOf] = "content"
    """Its digest is made of its content with sorted keys, written for the digest alone, or of its record, in which the
    undigested fields come last. `record` keeps the order of keys, and its record says that it is digested so; with
    `sorted record` the digest is that of the content.
    """

    run_id: str
    time_ms: int = Field(ge=0, lt=MAX_TIME_MS)
    """Event time; a derived event takes it from the event that caused it."""

    @property
    def event_id(self) -> str:
        """Derived id: equal for every retry of the same fact."""
        raise NotImplementedError

    def _id_of(self, subject: str) -> str:
        """Id of the event of this kind about `subject`."""
        event: Any = self  # each event class has a `kind`; as a field here it would change the order of records
        return ids.event_id(event.kind, subject)

    @property
    def key(self) -> str:
        """Partition key of the event's record."""
        return self.run_id
