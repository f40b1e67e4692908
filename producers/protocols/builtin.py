"""The built-in protocols: one prover, two provers, or the verifier alone."""

import random
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from rollstream.producers.protocols.base import VERIFIER, Draw, InteractionProtocol, ProtocolSettings, Turn
from rollstream.producers.protocols.rewards import Verdict

PROVER, FIRST, SECOND = "prover", "prover0", "prover1"
MAIN, FIRST_CHANNEL, SECOND_CHANNEL = "main", "prover0_channel", "prover1_channel"
MAX_ROUNDS = 1000
Stances = Mapping[str, Verdict]
Channels = Mapping[str, tuple[str, ...]]


class RoundsSettings(ProtocolSettings):
    """Settings of protocols with a dialogue."""

    max_rounds: int = Field(default=8, ge=1, le=MAX_ROUNDS)
    min_rounds: int = Field(default=1, ge=1, le=MAX_ROUNDS)
    """First round, counted from 1, in which a verdict counts."""
    verifier_first: bool = True

    @model_validator(mode="after")
    def _minimum_fits(self) -> Self:
        if self.min_rounds > self.max_rounds:
            raise ValueError(f"min_rounds {self.min_rounds} exceeds max_rounds {self.max_rounds}; lower min_rounds")
        return self


class TwoProverSettings(RoundsSettings):
    """Settings of dialogues with two provers."""

    sequential: bool = False
    """The provers speak in rounds of their own; off: in one round, and neither hears the other's message of it."""
    prover0_first: bool = True
    """Whether the first of sequential provers is prover 0."""


class Nip(InteractionProtocol):
    """Prover and verifier take turns (neural interactive proofs, arXiv 2412.08897)."""

    Settings: ClassVar[type[ProtocolSettings]] = RoundsSettings
    stances: ClassVar[Stances] = {PROVER: "accept"}
    channels: ClassVar[Channels] = {MAIN: (PROVER, VERIFIER)}

    def __init__(self, settings: RoundsSettings) -> None:
        self.max_rounds, self.min_rounds = settings.max_rounds, settings.min_rounds
        self._verifier_first = settings.verifier_first
        super().__init__(settings)

    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        """Verifier and prover, or prover and verifier."""
        rounds = (Turn(VERIFIER, (MAIN,)),), (Turn(PROVER, (MAIN,)),)
        return rounds if self._verifier_first else rounds[::-1]


class Adp(InteractionProtocol):
    """The prover says one thing, the verifier decides (abstract decision problem, arXiv 2108.12099)."""

    stances: ClassVar[Stances] = {PROVER: "accept"}
    channels: ClassVar[Channels] = {MAIN: (PROVER, VERIFIER)}
    max_rounds = 2

    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        """Prover, verifier."""
        return (Turn(PROVER, (MAIN,)),), (Turn(VERIFIER, (MAIN,)),)


class SoloVerifier(InteractionProtocol):
    """The verifier decides alone: what the provers of another protocol are worth is measured against it."""

    channels: ClassVar[Channels] = {MAIN: (VERIFIER,)}
    max_rounds = 1

    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        """The verifier."""
        return ((Turn(VERIFIER, (MAIN,)),),)


class Debate(InteractionProtocol):
    """Two provers argue for opposite verdicts and hear each other (arXiv 1805.00899)."""

    Settings: ClassVar[type[ProtocolSettings]] = TwoProverSettings
    stances: ClassVar[Stances] = {FIRST: "reject", SECOND: "accept"}
    channels: ClassVar[Channels] = {
        FIRST_CHANNEL: (FIRST, SECOND, VERIFIER),
        SECOND_CHANNEL: (FIRST, SECOND, VERIFIER),
    }

    def __init__(self, settings: TwoProverSettings) -> None:
        self.max_rounds, self.min_rounds = settings.max_rounds, settings.min_rounds
        self._options = settings
        super().__init__(settings)

    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        """The verifier in both channels, and the provers, each in its own, together or one after the other."""
        provers = Turn(FIRST, (FIRST_CHANNEL,)), Turn(SECOND, (SECOND_CHANNEL,))
        in_order = provers if self._options.prover0_first else provers[::-1]
        speaking = tuple((turn,) for turn in in_order) if self._options.sequential else (provers,)
        verifier = ((Turn(VERIFIER, (FIRST_CHANNEL, SECOND_CHANNEL)),),)
        return verifier + speaking if self._options.verifier_first else speaking + verifier


class Mnip(Debate):
    """Two provers argue for the same verdict and cannot hear each other: their answers can be cross-examined."""

    stances: ClassVar[Stances] = {FIRST: "accept", SECOND: "accept"}
    channels: ClassVar[Channels] = {FIRST_CHANNEL: (FIRST, VERIFIER), SECOND_CHANNEL: (SECOND, VERIFIER)}


class MerlinArthur(InteractionProtocol):
    """One of two provers with opposite stances, drawn by chance, says one thing (arXiv 2206.00759)."""

    stances: ClassVar[Stances] = {FIRST: "reject", SECOND: "accept"}
    channels: ClassVar[Channels] = {MAIN: (FIRST, SECOND, VERIFIER)}
    max_rounds = 2

    def draw(self, rng: random.Random) -> Draw:
        """Stances, and which prover speaks."""
        drawn = super().draw(rng)
        return drawn._replace(provers=(rng.choice((FIRST, SECOND)),))

    def cycle(self, draw: Draw) -> tuple[tuple[Turn, ...], ...]:
        """The prover that was drawn, the verifier."""
        return tuple(Turn(prover, (MAIN,)) for prover in draw.provers), (Turn(VERIFIER, (MAIN,)),)
