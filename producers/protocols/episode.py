"""One episode of a protocol as a value: what was said, who speaks next, what each agent saw, what it earns. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

from rollstream.producers.protocols.base import VERIFIER, Draw, InteractionProtocol, Turn
from rollstream.producers.protocols.rewards import Verdict, prover_reward, verdict_of, verifier_reward

End = Literal["decided", "no_verdict", "invalid_response"]


class Utterance(NamedTuple):
    """One message of an agent."""

    number: int
    """Number of its round, from 0."""
    agent: str
    channels: tuple[str, ...]
    """Empty for a call of a tool, which only the agent itself sees."""
    text: str
    """Text as the agent wrote it."""
    shown: str
    """Text as the others see it."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The state of one episode; each step returns another one."""

    protocol: InteractionProtocol
    draw: Draw
    is_true: bool
    """Whether accept is the right verdict."""
    utterances: tuple[Utterance, ...] = ()
    number: int = 0
    """Number of the round in progress, from 0."""
    num_taken: int = 0
    """Turns of that round that were taken."""
    num_no_guess: int = 0
    decision: float | None = None
    end: End | None = None
    offender: str | None = None
    """The prover whose malformed message ended the episode."""

    @property
    def turn(self) -> Turn | None:
        """The current turn; None when the episode is over."""
        return None if self.end is not None else self.protocol.turns(self.number, self.draw)[self.num_taken]

    @property
    def is_last_turn(self) -> bool:
        """Whether the verifier must decide now or never."""
        is_last = self.number + 1 >= self.protocol.num_rounds(self.draw)
        return is_last and self.turn is not None and self.turn.agent == VERIFIER

    @property
    def verdict(self) -> Verdict | None:
        """The verifier's verdict; None for neither, or nothing yet."""
        return None if self.decision is None else verdict_of(self.decision)

    @property
    def label(self) -> Verdict:
        """The right verdict."""
        return "accept" if self.is_true else "reject"

    def consult(self, text: str, answer: str) -> Self:
        """The agent whose turn it is calls a tool, and keeps its turn. Raises ValueError if the episode is over."""
        call = Utterance(self.number, self._speaker().agent, (), text, answer)
        return replace(self, utterances=(*self.utterances, call))

    def speak(self, text: str, *, shown: str | None = None, decision: float | None = None, valid: bool = True) -> Self:
        """The agent whose turn it is says something; `shown`: what others see of it, by default all.

        `decision` in [-1, 1]: of the verifier. It counts only in a round in which the protocol lets it decide.
        `valid`: whether a prover's message is well-formed. Raises ValueError if the episode is over.
        """
        turn = self._speaker()
        utterance = Utterance(self.number, turn.agent, turn.channels, text, text if shown is None else shown)
        episode = replace(self, utterances=(*self.utterances, utterance), num_taken=self.num_taken + 1)
        if turn.agent == VERIFIER:
            return episode._heard(decision)
        if not valid and self.protocol.settings.prover_invalid_response_penalty is not None:
            return replace(episode, end="invalid_response", offender=turn.agent)
        return episode._next_round()

    def run_out(self) -> Self:
        """The episode ends where it is, without a verdict."""
        return self if self.end is not None else replace(self, end="no_verdict")

    def seen_by(self, agent: str) -> tuple[Utterance, ...]:
        """Messages of an agent, and those it heard in earlier rounds, in the order of its conversation.

        In a round its own messages come first: it had not heard the others of the round when it spoke.
        """
        own = [one for one in self.utterances if one.agent == agent]
        heard = [one for one in self.utterances if one.agent != agent and self._hears(agent, one)]
        return tuple(sorted(own + heard, key=lambda one: one.number))

    def rewards(self) -> dict[str, float]:
        """One number for the verifier and for each prover of the episode, when it is over."""
        settings = self.protocol.settings
        verifier = self._verifier_reward()
        rewards = {VERIFIER: verifier}
        for prover in self.draw.provers:
            if prover == self.offender:
                rewards[prover] = settings.prover_invalid_response_penalty or 0.0
            elif settings.shared_reward:
                rewards[prover] = verifier
            else:
                rewards[prover] = prover_reward(self.draw.stances[prover], self.decision or 0.0, settings)
        return rewards

    def _speaker(self) -> Turn:
        turn = self.turn
        if turn is None:
            raise ValueError(f"the episode is over ({self.end}); no further turn is possible")
        return turn

    def _hears(self, agent: str, utterance: Utterance) -> bool:
        is_earlier = utterance.number < self.number
        return is_earlier and any(self.protocol.sees(agent, channel) for channel in utterance.channels)

    def _heard(self, decision: float | None) -> Self:
        """After the verifier spoke."""
        forced = self.protocol.settings.force_guess
        if forced is not None:
            decision = 1.0 if (self.label if forced == "label" else forced) == "accept" else -1.0
        if decision is not None and self.protocol.may_decide(self.number):
            return replace(self, decision=decision, end="decided")
        after = self._next_round()
        return after if after.end is not None else replace(after, num_no_guess=self.num_no_guess + 1)

    def _next_round(self) -> Self:
        if self.num_taken < len(self.protocol.turns(self.number, self.draw)):
            return self
        number = self.number + 1
        is_over = number >= self.protocol.num_rounds(self.draw)
        return replace(self, number=number, num_taken=0, end="no_verdict" if is_over else None)

    def _verifier_reward(self) -> float:
        settings = self.protocol.settings
        reward = settings.verifier_no_guess_reward * self.num_no_guess
        if self.end == "no_verdict":
            return reward + settings.verifier_terminated_penalty
        if self.decision is None:
            return reward
        return reward + verifier_reward(self.decision, is_true=self.is_true, settings=settings)


def conversation(episode: Episode, agent: str, opening: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages of an agent: the opening, its own messages, answers of its tools, and the messages it heard."""
    messages = list(opening)
    for one in episode.seen_by(agent):
        if one.agent != agent:
            messages.append({"role": "user", "content": f"{one.agent} {one.shown}"})
            continue
        messages.append({"role": "assistant", "content": one.text})
        if not one.channels:
            messages.append({"role": "tool", "content": one.shown})
    return messages
