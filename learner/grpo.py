"""GRPO: the clipped ratio with a bound of its own on each side, every token of a mini-batch counting the same."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rollstream.learner.token_batch import TokenBatch, TokenLosses
from rollstream.schemas.settings import AlgorithmSettings

MAX_LOG_RATIO = 20.0
"""A log-ratio counts for no more: some engines write -9999 for a token that they held for hardly possible, and the
exponential of what that leads to is no number.
"""


def losses(batch: TokenBatch, settings: AlgorithmSettings) -> TokenLosses:
    """-min(r A, clip(r, 1 - low, 1 + high) A) - c H + b KL by token, r = exp(current - behaviour).

    Clip-higher and token-level normalisation as in DAPO (arXiv 2503.14476, equations 8 and 12). The estimate of
    KL(behaviour || current) is k3 = r - 1 - log r (Schulman, "Approximating KL Divergence"); the same estimate of
    KL(current || base version) is the penalty (DeepSeekMath, arXiv 2402.03300, equation 4). A token with a log-ratio
    above MAX_LOG_RATIO has no gradient from it.
    """
    log_ratio_N = _bounded(batch.logprobs_N - batch.behaviour_N)
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective_N = torch.minimum(ratio_N * batch.advantages_N, clipped_N * batch.advantages_N)
    losses_N = -objective_N
    if settings.entropy_coefficient:
        losses_N = losses_N - settings.entropy_coefficient * batch.entropies_N
    to_reference_N = None
    if settings.kl_coefficient and batch.reference_N is not None:
        log_odds_N = _bounded(batch.reference_N - batch.logprobs_N)
        to_reference_N = log_odds_N.exp() - 1 - log_odds_N
        losses_N = losses_N + settings.kl_coefficient * to_reference_N
    with torch.no_grad():
        is_low_N = (ratio_N < 1 - settings.clip_low) & (batch.advantages_N < 0)
        is_high_N = (ratio_N > 1 + settings.clip_high) & (batch.advantages_N > 0)
        sums = {
            "loss": losses_N.sum(),
            "entropy": batch.entropies_N.sum(),
            "kl": (ratio_N - 1 - log_ratio_N).sum(),
            "clip_low": is_low_N.sum(),
            "clip_high": is_high_N.sum(),
            "ratio": ratio_N.sum(),
            "squared_ratio": ratio_N.square().sum(),
            "advantage": batch.advantages_N.abs().sum(),
        }
        if to_reference_N is not None:
            sums["kl_reference"] = to_reference_N.sum()
    return TokenLosses(losses_N, sums)


def metrics(sums: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Means over all completion tokens; policy/ess is (sum r)^2 / (N sum r^2), 1 when on-policy."""
    to_reference = {"policy/kl_reference": sums["kl_reference"] / num_tokens} if "kl_reference" in sums else {}
    return to_reference | {
        "loss/total": sums["loss"] / num_tokens,
        "policy/entropy": sums["entropy"] / num_tokens,
        "policy/kl": sums["kl"] / num_tokens,
        "policy/ratio": sums["ratio"] / num_tokens,
        "policy/ess": sums["ratio"] ** 2 / (num_tokens * sums["squared_ratio"]) if sums["squared_ratio"] else 0.0,
        "clip/low": sums["clip_low"] / num_tokens,
        "clip/high": sums["clip_high"] / num_tokens,
        "advantage/abs": sums["advantage"] / num_tokens,
    }


def _bounded(log_ratios_N: Tensor) -> Tensor:
    return log_ratios_N.clamp(max=MAX_LOG_RATIO)
