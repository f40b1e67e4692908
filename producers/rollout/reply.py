"""What a session answers and how it fails: values of an attempt that environments and their runner share."""

from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.producers.engines.base import Generation
from rollstream.schemas.errors import EnvironmentRunError

Message = dict[str, Any]
"""A chat message: `role`, `content` and what a chat template knows beside them."""


class TurnsExhausted(EnvironmentRunError):
    """An agent asked for more than `max_turns` answers.

    Unless caught, it ends the rollout, which is not a failure: what was rewarded until then counts, 0 if nothing was.
    """


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed."""

    cause: str
    """As in RolloutFailed."""
    message: str
    error: BaseException | None = None
    """What was raised, for its traceback."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model."""

    text: str
    """Without the end token."""
    step_index: int
    """For rewards of this step."""
    finish_reason: str
    """`stop` or `length`."""
    prompt_ids: tuple[int, ...] = ()
    """All that the model saw before it; empty for a scripted opponent's."""
    generation: Generation | None = None
    """As sampled and recorded."""
    began_ms: int = 0
    """Event time at which it was asked for."""


def plain(value: Any, what: str) -> Any:
    """A copy of a JSON value, as the log will hold it. Raises EnvironmentRunError if it is none."""
    try:
        return orjson.loads(orjson.dumps(value))
    except (orjson.JSONEncodeError, orjson.JSONDecodeError) as error:
        raise EnvironmentRunError(
            f"{what}: not a JSON value: {error}; give text, numbers, true, false, lists or mappings"
        ) from error
