"""Base class of environments: the world that agents act in. One fresh instance plays one rollout.

Environments know neither Kafka nor tokens; their calls to the session become the events of the rollout.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

from rollstream.producers.rollout.session import Message, Session
from rollstream.schemas.errors import ConfigError, EnvironmentRunError

EnvironmentFunction = Callable[..., Awaitable[None]]
"""`async def play(session, **config)`: an environment without a class."""

NEEDS_DATASET = "has no examples of its own; name a dataset with questions (eval.general.dataset)"
"""Message of an environment that makes no examples."""
MAX_SHOWN = 12
"""Keys of an example that an error lists."""


class Environment(ABC):
    """A world. The constructor takes the run's `environment_config` as keywords."""

    URLS: ClassVar[tuple[str, ...]] = ()
    """Keys of `environment_config` that hold URLs: a task may only name URLs there that the producers allow."""
    CODE: ClassVar[tuple[str, ...]] = ()
    """Keys of `environment_config` that may name code (`python:module.Name`), in themselves or in their `name`: a task
    may only name code there that the producers allow.
    """

    SCRIPTED: ClassVar[tuple[str, ...]] = ()
    """Names of the players that it can put into an agent's seat by itself, for `league.scripted`."""

    @abstractmethod
    async def run(self, session: Session) -> None:
        """Play one rollout to its end. What it raises fails the rollout; the run goes on."""

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """Answer of a demonstrator to `messages`, for data to warm-start on. Draws come from `session.rng`."""
        raise EnvironmentRunError(f"environment {type(self).__name__} has no demonstrator; define demonstrate()")

    @property
    def has_demonstrator(self) -> bool:
        """Whether `demonstrate` answers; a warm start needs it."""
        return getattr(self.demonstrate, "__func__", None) is not Environment.demonstrate

    def play_scripted(
        self, session: Session, messages: Sequence[Message], agent: str, player: str
    ) -> str | Awaitable[str]:
        """Answer of one of its `SCRIPTED` players to `messages` in an agent's seat; the method may be async."""
        raise EnvironmentRunError(
            f"environment {type(self).__name__} has no scripted player {player!r}; define "
            "it in SCRIPTED and play_scripted()"
        )

    def required_agents(self) -> tuple[str, ...]:
        """Names of the agents that it plays with; empty: it takes whatever agents the run has."""
        return ()

    def check_agents(self, agents: Iterable[str]) -> None:
        """Raises ConfigError naming the agents that it plays with and the run does not have."""
        required, given = self._names("required_agents", self.required_agents()), tuple(agents)
        missing = [name for name in required if name not in given]
        if missing:
            raise ConfigError(
                f"environment {type(self).__name__} plays with the agents {', '.join(required)}, but the run has no "
                f"{', '.join(missing)}; set trajectory_builders.X.agents: [{', '.join(required)}]"
            )

    def required_inputs(self) -> tuple[str, ...]:
        """Keys that an example's inputs must have; empty: it takes whatever inputs there are."""
        return ()

    def check_inputs(self, inputs: Mapping[str, Any], example_id: str) -> None:
        """Raises ConfigError naming the example and the first of the required keys that it lacks."""
        required = self._names("required_inputs", self.required_inputs())
        missing = next((key for key in required if key not in inputs), None)
        if missing is not None:
            shown = ", ".join(list(inputs)[:MAX_SHOWN]) or "none"
            raise ConfigError(
                f"example {example_id!r} has no key {missing!r}, which environment {type(self).__name__} needs; its "
                f"keys are: {shown}; correct environment_config, or add the key to the dataset"
            )

    def _names(self, method: str, found: object) -> tuple[str, ...]:
        """Names that a method of users returned. Raises ConfigError for anything but a collection of texts."""
        is_collection = isinstance(found, Iterable) and not isinstance(found, str | bytes)
        names = tuple(cast("Iterable[object]", found)) if is_collection else (None,)
        if not all(isinstance(name, str) for name in names):
            shown = list(names) if is_collection else found
            raise ConfigError(
                f"environment {type(self).__name__}: {method}() returned {shown!r:.80}; return a list or tuple of texts"
            )
        return cast("tuple[str, ...]", names)

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

    @property
    def has_demonstrator(self) -> bool:
        """See `Environment`."""
        return False

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """Raises EnvironmentRunError: demonstrators need a class."""
        name = getattr(self._function, "__name__", "?")
        raise EnvironmentRunError(
            f"environment {name} is a function without a demonstrator; write it as an Environment class"
        )


def task_of(session: Session) -> dict[str, Any]:
    """Description of a rollout for a program outside (JSON values)."""
    return {
        "rollout_id": session.rollout_id,
        "inputs": session.inputs,
        "agents": list(session.agents),
        "max_turns": session.max_turns,
        "purpose": session.purpose,
        "seed": session.seed,
    }
