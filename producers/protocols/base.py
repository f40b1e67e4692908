"""Base class of interaction protocols: who speaks in which round and channel, who sees which messages, when a verdict
counts. Pure.

A protocol is a cycle of rounds. All random choices of an episode are in its `Draw`, so turns are a function of it.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from rollstream.producers.protocols.rewards import RewardSettings, Verdict

VERIFIER = "verifier"


class ProtocolSettings(RewardSettings):
    """Parameters that every protocol has."""

    randomize_prover_stance: bool = False
    """Whether every prover argues for the other verdict in half of the episodes."""
    force_guess: Literal["accept", "reject", "label"] | None = None
    """The verdict of every turn of the verifier in which one counts, whatever it says."""
    verifier_guess_replacement_proportion: float = Field(default=0.0, ge=0, le=1)
    """Share of training episodes in which the right verdict is recorded beside the verifier's, to be imitated."""
    verifier_guess_replacement_annealing: Literal["none", "linear", "exponential"] = "none"
    verifier_guess_replacement_annealing_rate: float = Field(default=0.1, ge=0, le=1)

    def guess_replacement(self, epoch: int) -> float:
        """The share in an epoch: p, max(0, p - epoch * rate), or p (1 - rate)^epoch."""
        share, rate = self.verifier_guess_replacement_proportion, self.verifier_guess_replacement_annealing_rate
        match self.verifier_guess_replacement_annealing:
            case "linear":
                return max(0.0, share - epoch * rate)
            case "exponential":
                return share * (1 - rate) ** epoch
            case _:
                return share


class Turn(NamedTuple):
    """One message of a round."""

    agent: str
    channels: tuple[str, ...]
    """Channels of the message."""


class Draw(NamedTuple):
    """Random choices made once for an episode."""

    stances: Mapping[str, Verdict]
    """Verdict that each prover argues for."""
    provers: tuple[str, ...]
    """Provers that speak in the episode."""


class InteractionProtocol(ABC):
    """A verifier that decides on a claim, and the provers that it hears.

    Raises ValueError if the rounds leave the verifier no turn in which a verdict counts, or if a round has no turn, an
    agent in a channel that it does not see, or two agents in one channel.
    """

    Settings: ClassVar[type[ProtocolSettings]] = ProtocolSettings
    stances: ClassVar[Mapping[str, Verdict]] = {}
    """Verdict that each prover argues for unless stances are randomised."""
    channels: ClassVar[Mapping[str, tuple[str, ...]]]
    """Agents that see each channel."""
    max_rounds: int
    min_rounds: int = 1
    """Number of the first round, counted from 1, in which a verdict counts."""

    def __init__(self, settings: ProtocolSettings) -> None:
        self.settings = settings
        drawn = self.draw(random.Random(0))
        self._check_cycle(drawn)
        self._check_rounds(drawn)

    @abstractmethod
    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        """The rounds that are repeated. The turns of one round are simultaneous: nobody hears the others of it."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Provers, then the verifier."""
        return (*self.stances, VERIFIER)

    def draw(self, rng: random.Random) -> Draw:
        """Make the random choices of an episode; the same numbers are taken from `rng` whatever the settings."""
        is_flipped = rng.random() < 0.5 and self.settings.randomize_prover_stance
        stances: dict[str, Verdict] = {
            prover: _other(stance) if is_flipped else stance for prover, stance in self.stances.items()
        }
        return Draw(stances, tuple(stances))

    def turns(self, number: int, draw: Draw) -> tuple[Turn, ...]:
        """The turns of round `number`, counted from 0; none after the last round."""
        rounds = self.cycle(draw)
        return rounds[number % len(rounds)] if number < self.num_rounds(draw) else ()

    def num_rounds(self, draw: Draw) -> int:
        """Rounds of an episode: at most `max_rounds`, and none after the verifier's last turn. 0 if it has no turn."""
        rounds = self.cycle(draw)
        heard = [any(turn.agent == VERIFIER for turn in turns) for turns in rounds]
        return max((number + 1 for number in range(self.max_rounds) if heard[number % len(rounds)]), default=0)

    def may_decide(self, number: int) -> bool:
        """Whether a verdict in round `number`, counted from 0, counts."""
        return number + 1 >= self.min_rounds

    def sees(self, agent: str, channel: str) -> bool:
        """Whether an agent hears what is said in a channel."""
        return agent in self.channels[channel]

    def _check_cycle(self, draw: Draw) -> None:
        for number, turns in enumerate(self.cycle(draw), 1):
            if not turns:
                raise ValueError(f"round {number} has no turn; return at least one")
            taken: set[str] = set()
            for turn in turns:
                for channel in turn.channels:
                    if turn.agent not in self.channels.get(channel, ()):
                        raise ValueError(
                            f"round {number}: {turn.agent} speaks in channel {channel} but does not see it; add "
                            "the agent to it"
                        )
                    if channel in taken:
                        raise ValueError(f"round {number}: two agents speak in channel {channel}; give each a channel")
                    taken.add(channel)

    def _check_rounds(self, draw: Draw) -> None:
        last = self.num_rounds(draw)
        if last < self.min_rounds or last == 0:
            when = f"its last turn is in round {last}" if last else "it has no turn"
            raise ValueError(
                f"max_rounds {self.max_rounds} with min_rounds {self.min_rounds} leaves the verifier no verdict "
                f"({when}); raise max_rounds"
            )


def _other(verdict: Verdict) -> Verdict:
    return "reject" if verdict == "accept" else "accept"
