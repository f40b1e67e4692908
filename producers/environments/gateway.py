"""Rollouts that are played by programs that claim them at the producers' gateway, in any language.

`POST /rollouts` gives an agent a rollout with its task, key and base URL; the model answers by OpenAI's or Anthropic's
API below that URL; `/reward` and `/end` close it. See docs/gateway.md.
"""

from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Session
from rollstream.schemas.errors import EnvironmentRunError

NO_GATEWAY = "nothing here serves a gateway; run it in a producers process"


@register_environment("gateway")
class GatewayEnvironment(Environment):
    """Waits until an agent outside has ended the rollout."""

    async def run(self, session: Session) -> None:
        """Open the rollout to agents until one has ended it."""
        if session.gateway is None:
            raise EnvironmentRunError(NO_GATEWAY)
        async with session.gateway.open(session, session.agents[0], is_claimable=True) as rollout:
            await rollout.ended()
