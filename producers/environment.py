"""What an environment is: the world that agents act in. One fresh instance plays one rollout.

Environments know neither Kafka nor tokens; what they do through their session becomes the events of the rollout.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rollstream.producers.session import Message, Session
from rollstream.schemas.errors import EnvironmentRunError

EnvironmentFunction = Callable[..., Awaitable[None]]
"""`async def play(session, **config)`: an environment without a class."""


class Environment(ABC):
    """A world. The constructor takes the run's `environment_config` as keywords."""

    @abstractmethod
    async def run(self, session: Session) -> None:
        """Play one rollout to its end. What it raises fails the rollout; the run goes on."""

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """What a demonstrator answers to `messages`, for data to warm-start on. Draws come from `session.rng`."""
        raise EnvironmentRunError(f"environment {type(self).__name__} has no demonstrator; define demonstrate()")

    def examples(self, num: int, seed: int) -> list[dict[str, Any]]:
        """Inputs of `num` examples, for runs without a dataset file. Empty by default: the task's seed decides."""
        return [{} for _ in range(num)]


class FunctionEnvironment(Environment):
    """An async function as an environment; it has no demonstrator."""

    def __init__(self, function: EnvironmentFunction, config: Mapping[str, Any]) -> None:
        self._function = function
        self._config = config

    async def run(self, session: Session) -> None:
        """Call the function with the session and the configuration."""
        await self._function(session, **self._config)

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """Raises EnvironmentRunError: demonstrators need a class."""
        name = getattr(self._function, "__name__", "?")
        raise EnvironmentRunError(f"environment {name} is a function and has no demonstrator; make it an Environment")
