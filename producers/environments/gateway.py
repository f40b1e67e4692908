"""Rollouts that are played by programs that claim them at the producers' gateway, in any language.

`POST /rollouts` gives an agent a rollout with its task, key and base URL; the model answers by OpenAI's or Anthropic's
API below that URL; `/reward` and `/end` close it. See docs/gateway.md.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Message, Session
from rollstream.schemas.errors import ConfigError, EnvironmentRunError
from rollstream.schemas.users_code import import_named

NO_GATEWAY = "nothing here serves a gateway; run it in a producers process"


class OutsideEnvironment(Environment):
    """Base of the environments whose agents are programs outside: a demonstrator can answer them for a warm start."""

    CODE: ClassVar[tuple[str, ...]] = ("demonstrator",)

    def __init__(self, demonstrator: str | None = None) -> None:
        """`demonstrator`: `python:module.function` with the arguments and the result of `Environment.demonstrate`."""
        location = "demonstrator"
        self._demonstrator: Any = None if demonstrator is None else import_named(demonstrator, location, "function")
        if self._demonstrator is not None and not callable(self._demonstrator):
            raise ConfigError(f"{location}: {demonstrator} is not a function; name one")

    @property
    def has_demonstrator(self) -> bool:
        """See `Environment`."""
        return self._demonstrator is not None

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> Any:
        """The demonstrator's answer, or an awaitable of it. Raises EnvironmentRunError if none is configured."""
        if self._demonstrator is None:
            raise EnvironmentRunError(
                "a program outside has no demonstrator; set environment_config.demonstrator to python:module.function, "
                "or leave out warm_start"
            )
        return self._demonstrator(session, messages, agent)


@register_environment("gateway")
class GatewayEnvironment(OutsideEnvironment):
    """Waits until an agent outside has ended the rollout."""

    async def run(self, session: Session) -> None:
        """Open the rollout to agents until one has ended it."""
        if session.gateway is None:
            raise EnvironmentRunError(NO_GATEWAY)
        async with session.gateway.open(session, session.agents[0], is_claimable=True) as rollout:
            await rollout.ended()
