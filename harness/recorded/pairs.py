"""Forms preference pairs from the scored candidates of test-time-compute steps.

Pure. Steps may be events of the log, NAT's objects, or the JSON of either; only their end events are needed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from rollstream.producers.traces.messages import answer_of, prompt_of
from rollstream.schemas.algorithm_settings import pairs_by_score
from rollstream.schemas.events.intermediate_steps import IntermediateStepPayload, IntermediateStepType

Prompt = tuple[tuple[str, str], ...] | str
"""Role and text of each message, or one text."""


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """One answer of a turn."""

    example_id: str
    rollout_id: str
    turn_id: str
    turn_index: int | None
    index: int
    """Index of the candidate in its turn; its position if the step does not state one."""
    prompt: Prompt
    response: str
    score: float
    reference: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Reference to its record on the log: rollout_id, step_index, and exact `tokens` if they are known."""


@dataclass(frozen=True, slots=True)
class CandidatePair:
    """Two candidates of a turn with the same prompt and different texts; the higher score comes first."""

    chosen: ScoredCandidate
    rejected: ScoredCandidate

    @property
    def score_diff(self) -> float:
        """Difference of the scores, above 0."""
        return self.chosen.score - self.rejected.score


@dataclass(frozen=True, slots=True)
class PairSelection:
    """Rules for the selection of pairs of candidates."""

    exhaustive_pairs: bool = True
    """Every better and worse candidate of a turn; else only the best with the worst."""
    min_score_diff: float = 0.0
    max_pairs_per_turn: int | None = None
    """Maximum pairs in a turn; those with the largest differences are kept. None: all."""
    require_multiple_candidates: bool = True
    """A turn with one candidate is counted as dropped."""


@dataclass(slots=True)
class Found:
    """Candidates and pairs, and the number dropped by reason."""

    candidates: list[ScoredCandidate] = field(default_factory=list[ScoredCandidate])
    pairs: list[CandidatePair] = field(default_factory=list[CandidatePair])
    dropped: Counter[str] = field(default_factory=Counter[str])


def candidates_of(
    steps: Iterable[Any],
    *,
    name: str,
    example_id: str,
    rollout_id: str = "",
    tokens: Mapping[int, Mapping[str, Any]] | None = None,
) -> Found:
    """The candidates in TTC_END steps of that name. `tokens`: exact tokens of LLM calls by step index."""
    found = Found()
    for step in steps:
        payload, step_index = _payload(step)
        if payload is None or payload.event_type != IntermediateStepType.TTC_END or payload.name != name:
            continue
        fields: dict[str, Any] = {**(payload.metadata or {}), **(payload.data.model_dump() if payload.data else {})}
        turn_id, score = fields.get("turn_id"), _number(fields.get("score"))
        if turn_id is None or score is None:
            found.dropped["without turn_id or score"] += 1
            continue
        prompt = _prompt(payload)
        if prompt is None:
            found.dropped["without a prompt of texts"] += 1
            continue
        index = fields.get("candidate_index")
        said_at = fields.get("step_index", step_index)
        known = (tokens or {}).get(said_at) if isinstance(said_at, int) else None
        reference = {"rollout_id": rollout_id, "step_index": said_at} | ({"tokens": known} if known else {})
        found.candidates.append(
            ScoredCandidate(
                example_id=example_id,
                rollout_id=rollout_id,
                turn_id=str(turn_id),
                turn_index=fields.get("turn_index"),
                index=index if isinstance(index, int) else len(found.candidates),
                prompt=prompt,
                response=_text(answer_of(payload).get("content")) or "",
                score=score,
                reference=reference,
            )
        )
    return found


def select_pairs(candidates: Iterable[ScoredCandidate], selection: PairSelection) -> Found:
    """The pairs of every turn, turn by turn in the order in which they began, the largest differences first.

    Candidates with equal scores, equal texts or different prompts do not form a pair.
    """
    found = Found()
    turns: dict[tuple[str, str, str], list[ScoredCandidate]] = {}
    for candidate in candidates:
        turns.setdefault((candidate.example_id, candidate.rollout_id, candidate.turn_id), []).append(candidate)
    for turn in turns.values():
        if len(turn) == 1:
            found.dropped["the only candidate of its turn"] += selection.require_multiple_candidates
            continue
        pairs, dropped = pairs_by_score(
            turn,
            selection,
            score=lambda candidate: candidate.score,
            tie_break=lambda candidate: candidate.index,
            refusal=_refusal,
        )
        found.pairs += [CandidatePair(*pair) for pair in pairs]
        found.dropped += dropped
    return found


def _refusal(chosen: ScoredCandidate, rejected: ScoredCandidate) -> str:
    if chosen.response == rejected.response:
        return "equal texts"
    prompts = [side.reference.get("tokens", {}).get("prompt_token_ids") for side in (chosen, rejected)]
    if chosen.prompt != rejected.prompt or (None not in prompts and prompts[0] != prompts[1]):
        return "different prompts"
    return ""


def _payload(step: Any) -> tuple[IntermediateStepPayload | None, int | None]:
    """A step's payload and its index on the log; None if it does not have the shape of NAT's steps."""
    content: Any = step.model_dump() if isinstance(step, BaseModel) else step
    if not isinstance(content, Mapping):
        return None, None
    inner = cast("Mapping[str, Any]", content.get("payload", content))
    if isinstance(inner, BaseModel):
        inner = inner.model_dump()
    known = ("event_type", "name", "data", "metadata")
    try:
        payload = IntermediateStepPayload.model_validate({key: inner[key] for key in known if key in inner})
    except ValidationError:
        return None, None
    return payload, content.get("step_index")


def _prompt(payload: IntermediateStepPayload) -> Prompt | None:
    """The candidate's prompt, without the answer itself if it is the last message."""
    raw = payload.data.input if payload.data is not None else None
    if isinstance(raw, str):
        return raw or None
    messages = prompt_of(None, payload) or ()
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    texts = [(str(message.get("role")), _text(message.get("content"))) for message in messages]
    found = tuple((role, text) for role, text in texts if text is not None)
    return found if found and len(found) == len(texts) else None


def _text(content: Any) -> str | None:
    """Content as text; None if it is anything else."""
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return content if isinstance(content, str) else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None
