"""Rewards of the verifier and the provers for a verdict. Pure numbers; a decision is in [-1, 1], reject to accept."""

from typing import Literal

from rollstream.schemas.base import Settings

Verdict = Literal["accept", "reject"]


class RewardSettings(Settings):
    """Rewards for the end of an episode."""

    verifier_reward: float = 1.0
    """Reward for full confidence in the true label."""
    verifier_incorrect_penalty: float = -1.0
    """Reward for full confidence in the wrong label."""
    verifier_neither_reward: float | None = None
    """Reward for a decision of 0, which is for neither; None: the midpoint of the two above."""
    verifier_terminated_penalty: float = -1.0
    """Reward if the rounds are over without a verdict."""
    verifier_no_guess_reward: float = 0.0
    """Reward for each turn of the verifier without a verdict, except the last one."""
    prover_reward: float = 1.0
    """Reward if the verdict is the one that the prover argues for, 0 if not."""
    prover_invalid_response_penalty: float | None = None
    """Paid to a prover for a malformed message, which then ends the episode; none: it counts as an empty message."""
    shared_reward: bool = False
    """Provers get the verifier's reward instead of `prover_reward`."""


def verdict_of(decision: float) -> Verdict | None:
    """Verdict of a decision; None for 0."""
    return "accept" if decision > 0 else "reject" if decision < 0 else None


def verifier_reward(decision: float, *, is_true: bool, settings: RewardSettings) -> float:
    """Piecewise linear in the agreement of decision and label: wrong (-1), neither (0), right (1).

    Raises ValueError for a decision outside of [-1, 1].
    """
    if not -1 <= decision <= 1:
        raise ValueError(f"decision is {decision}; it must be in [-1, 1]")
    agreement = decision if is_true else -decision
    right, wrong, neither = settings.verifier_reward, settings.verifier_incorrect_penalty, neither_reward(settings)
    end = right if agreement >= 0 else wrong
    # a weighted mean, so that rounding never leaves the range
    return neither * (1 - abs(agreement)) + end * abs(agreement)


def neither_reward(settings: RewardSettings) -> float:
    """Reward of the verifier for a decision of 0."""
    if settings.verifier_neither_reward is not None:
        return settings.verifier_neither_reward
    return (settings.verifier_reward + settings.verifier_incorrect_penalty) / 2


def prover_reward(stance: Verdict, decision: float, settings: RewardSettings) -> float:
    """`prover_reward` if the verdict is the prover's stance, else 0."""
    return settings.prover_reward if verdict_of(decision) == stance else 0.0
