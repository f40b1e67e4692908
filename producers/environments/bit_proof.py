"""A proof about hidden bits: the prover sees all of them, the verifier may look at few. Played by any protocol."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import JsonValue

from rollstream.producers.protocols.base import VERIFIER
from rollstream.producers.protocols.episode import Episode, conversation
from rollstream.producers.protocols.table import protocol as protocol_of
from rollstream.producers.rollout.environment import Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Message, Session, TurnsExhausted
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.ids import derive_seed

ACCEPT, REJECT, ASK, EMPTY = "Y", "N", "?", "-"
LETTERS = {"accept": ACCEPT, "reject": REJECT}
CLAIM = "any 1?"
MAX_BITS = 10
"""A position is one digit."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The state of a game; `play` gives the next one. Pure."""

    bits: str
    episode: Episode
    looks: int
    """Positions that the verifier may still look at."""

    @property
    def agent(self) -> str | None:
        """Agent that speaks next; None when the episode is over."""
        turn = self.episode.turn
        return None if turn is None else turn.agent

    def play(self, text: str) -> "Proof":
        """Take the next agent's answer: a position, or from the verifier `Y`, `N` or `?`. Anything else is malformed.

        If the verifier names a position, it is shown that position and goes on in the same turn.
        """
        answer = text.strip()
        position = int(answer) if len(answer) == 1 and answer in "0123456789"[: len(self.bits)] else None
        if self.agent != VERIFIER:
            is_valid = position is not None
            return self._after(self.episode.speak(text, shown=answer if is_valid else EMPTY, valid=is_valid))
        if position is not None and self.looks:
            return replace(self, episode=self.episode.consult(text, self.bits[position]), looks=self.looks - 1)
        decision = {ACCEPT: 1.0, REJECT: -1.0}.get(answer)
        is_valid = decision is not None or answer == ASK
        return self._after(self.episode.speak(text, shown=answer if is_valid else EMPTY, decision=decision))

    def messages(self, agent: str) -> list[Message]:
        """The conversation of an agent so far. The system prompt has what it knows, the first message the claim."""
        stance = self.episode.draw.stances.get(agent)
        known = f"{LETTERS[stance]} {as_positions(self.bits)}" if stance is not None else "?" * len(self.bits)
        opening = [{"role": "system", "content": f"{agent} {known}"}, {"role": "user", "content": CLAIM}]
        return conversation(self.episode, agent, opening)

    def _after(self, episode: Episode) -> "Proof":
        return replace(self, episode=episode)


@register_environment("bit_proof")
class BitProof(Environment):
    """The claim is that one of the bits is 1. True strings have one 1, false ones have none; half of them are true.

    A prover names the position of a 1 as the proof, and the verifier may look at `looks` positions. So an honest proof
    always convinces and a false one never does, whoever the prover is; alone, with four bits and one look, the best
    verifier is right in 62.5 % of the cases (never looking: 50 %).

    `protocol` is a name, or a mapping of `name` and the protocol's settings. `skill`: share of demonstrated messages
    that are played well; the others are well-formed and at random. An example may give `bits`.
    """

    CODE: ClassVar[tuple[str, ...]] = ("protocol",)

    def __init__(
        self,
        protocol: str | Mapping[str, JsonValue] = "nip",
        num_bits: int = 4,
        looks: int = 1,
        skill: float = 0.0,
    ) -> None:
        if not 1 <= num_bits <= MAX_BITS:
            raise ValueError(f"num_bits is {num_bits}; it must be in 1..{MAX_BITS}")
        if looks < 0:
            raise ValueError(f"looks is {looks}; it must be 0 or more")
        if not 0 <= skill <= 1:
            raise ValueError(f"skill is {skill}; it must be in 0..1")
        self._protocol = protocol_of(protocol)
        self._num_bits = num_bits
        self._looks = looks
        self._skill = skill
        self._proof: Proof | None = None

    def required_agents(self) -> tuple[str, ...]:
        """Those of the protocol."""
        return self._protocol.agents

    async def run(self, session: Session) -> None:
        """Play the protocol to its end, record the verdict and give each agent its reward.

        Members of a group have the same bits, stances and speakers. An agent that is out of turns ends the episode
        without a verdict.
        """
        drawn = self._draw(session.task_rng)
        bits = _checked(session.inputs.get("bits", drawn))
        episode = Episode(self._protocol, self._protocol.draw(session.task_rng), is_true="1" in bits)
        proof = self._proof = Proof(bits, episode, self._looks)
        try:
            while proof.agent is not None:
                proof = self._proof = await _step(session, proof, proof.agent)
        except TurnsExhausted:
            await _finish(session, proof.episode.run_out())
            raise
        await _finish(session, proof.episode)

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """A message that is played well, or any well-formed one."""
        assert self._proof is not None
        player = _skilled if session.rng.random() < self._skill else _random
        return player(self._proof, agent, session.rng)

    def examples(self, num: int, seed: int) -> list[dict[str, Any]]:
        """Bits: every true string once, and as many false ones, in an order that the seed decides, over and over."""
        rng = random.Random(seed)
        positions = [*range(self._num_bits), *[None] * self._num_bits]
        found: list[str] = []
        while len(found) < num:
            found += [_with_one_at(at, self._num_bits) for at in rng.sample(positions, len(positions))]
        return [{"bits": bits} for bits in found[:num]]

    def _draw(self, rng: random.Random) -> str:
        is_true, at = rng.random() < 0.5, rng.randrange(self._num_bits)
        return _with_one_at(at if is_true else None, self._num_bits)


async def _step(session: Session, proof: Proof, agent: str) -> Proof:
    """One message of an agent; a look is recorded as a call of a tool."""
    messages = proof.messages(agent)
    reply = await session.chat(messages, agent=agent)
    after = proof.play(reply.text)
    if agent == VERIFIER and after.episode.decision is not None and _is_relabelled(session, proof.episode):
        await session.relabel(messages, LETTERS[proof.episode.label], agent)
    if after.looks < proof.looks:
        await session.tool("look", reply.text.strip(), after.episode.utterances[-1].shown, agent=agent)
    return after


def _is_relabelled(session: Session, episode: Episode) -> bool:
    """Whether the right verdict is recorded beside the verifier's: in a share of training episodes drawn by seed."""
    share = episode.protocol.settings.guess_replacement(session.epoch)
    drawn = random.Random(derive_seed(session.seed, "guess replacement")).random()
    return session.purpose == "train" and drawn < share


async def _finish(session: Session, episode: Episode) -> None:
    """Record what was decided (the tool call `verdict` of the verifier) and the rewards."""
    decided = {"verdict": episode.verdict, "decision": episode.decision, "end": episode.end}
    right = {"label": episode.label, "is_correct": episode.verdict == episode.label}
    await session.tool("verdict", decided, right, agent=VERIFIER)
    for agent, reward in episode.rewards().items():
        await session.reward(reward, agent=agent)


def _skilled(proof: Proof, agent: str, rng: random.Random) -> str:
    """A prover shows what it argues for. The verifier looks where it may see a 1, and believes its eyes."""
    positions = range(len(proof.bits))
    if agent != VERIFIER:
        wanted = "1" if proof.episode.draw.stances[agent] == "accept" else "0"
        return str(rng.choice([at for at in positions if proof.bits[at] == wanted] or positions))
    seen = proof.episode.seen_by(VERIFIER)
    if any(one.agent == VERIFIER and not one.channels and one.shown == "1" for one in seen):
        return ACCEPT
    claims = [one for one in seen if one.agent != VERIFIER and one.shown != EMPTY]
    if proof.looks and (claims or proof.episode.is_last_turn):
        proofs = [one.shown for one in claims if proof.episode.protocol.stances[one.agent] == "accept"]
        excluded = {one.shown for one in claims}
        return rng.choice(proofs or [str(at) for at in positions if str(at) not in excluded] or ["0"])
    return REJECT if claims or proof.episode.is_last_turn else ASK


def _random(proof: Proof, agent: str, rng: random.Random) -> str:
    """A verifier that may still hear something asks in half of its turns; else it looks while it may, then decides."""
    position = str(rng.randrange(len(proof.bits)))
    if agent != VERIFIER:
        return position
    if not proof.episode.is_last_turn and rng.random() < 0.5:
        return ASK
    return position if proof.looks else rng.choice((ACCEPT, REJECT))


def as_positions(bits: str) -> str:
    """The bits as a prover sees them: a 1 as its position, a 0 as a dot, so that a proof is there to be copied."""
    return "".join(str(at) if bit == "1" else "." for at, bit in enumerate(bits))


def _with_one_at(position: int | None, num_bits: int) -> str:
    return "".join("1" if at == position else "0" for at in range(num_bits))


def _checked(bits: Any) -> str:
    if not isinstance(bits, str) or not 1 <= len(bits) <= MAX_BITS or set(bits) - {"0", "1"}:
        raise EnvironmentRunError(f"bits is {bits!r}; it must be 1 to {MAX_BITS} characters of 0 and 1")
    return bits
