"""GRPO: the ratio clipped on both sides, bounded for negative advantages; every token of a batch weighs the same."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.tokens import (
    KL_REFERENCE,
    Losses,
    TokenBatch,
    dual_clipped,
    log_ratio,
    with_entropy_bonus,
    with_kl_penalty,
)
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.policy_gradient import ClippedSettings


class Clipped(PolicyGradient):
    """PPO's clipped objective; see `loss`. Algorithms that share it differ in their advantages."""

    def loss(self, tokens: TokenBatch, settings: ClippedSettings) -> Losses:
        """-min(r A, clip(r, 1 - low, 1 + high) A) - c H + b KL by token, r = exp(current - behaviour).

        Clip-higher and token-level normalisation as in DAPO (arXiv 2503.14476, equations 8 and 12). KL is that of
        `with_kl_penalty`; `policy/kl` is the same estimate, k3 = r - 1 - log r, of KL(behaviour || current). With
        `dual_clip` c the objective of a token with A < 0 is at least c A (dual-clip PPO, arXiv 1912.09729, equation 5):
        it has no gradient where r > c. A token with a log-ratio above MAX_LOG_RATIO has no gradient from it.
        """
        log_ratio_N = log_ratio(tokens.logprobs_N, tokens.behaviour_N)
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        objective_N = torch.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
        losses_N = -dual_clipped(objective_N, tokens.advantages_N, settings.dual_clip)
        losses_N = with_entropy_bonus(losses_N, tokens.entropies_N, settings.entropy_coefficient)
        sums = dict[str, Tensor]()
        losses_N = with_kl_penalty(losses_N, tokens, settings, sums, ratio_N=ratio_N)
        with torch.no_grad():
            is_low_N = (ratio_N < 1 - settings.clip_low) & (tokens.advantages_N < 0)
            is_high_N = (ratio_N > 1 + settings.clip_high) & (tokens.advantages_N > 0)
            sums |= {
                "loss": losses_N.sum(),
                "entropy": tokens.entropies_N.sum(),
                "kl": (ratio_N - 1 - log_ratio_N).sum(),
                "clip_low": is_low_N.sum(),
                "clip_high": is_high_N.sum(),
                "ratio": ratio_N.sum(),
                "squared_ratio": ratio_N.square().sum(),
                "advantage": tokens.advantages_N.abs().sum(),
            }
            if settings.dual_clip is not None:
                sums["clip_dual"] = ((ratio_N > settings.dual_clip) & (tokens.advantages_N < 0)).sum()
        return Losses(losses_N, sums)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all completion tokens; policy/ess is (sum r)^2 / (N sum r^2), 1 when on-policy.

        clip/low, clip/high and clip/dual are the shares of tokens that the respective bound leaves without a gradient.
        """
        num_tokens = counts.tokens
        optional = {KL_REFERENCE: "policy/kl_reference", "clip_dual": "clip/dual"}
        return {name: sums[key] / num_tokens for key, name in optional.items() if key in sums} | {
            "loss/total": sums["loss"] / num_tokens,
            "policy/entropy": sums["entropy"] / num_tokens,
            "policy/kl": sums["kl"] / num_tokens,
            "policy/ratio": sums["ratio"] / num_tokens,
            "policy/ess": sums["ratio"] ** 2 / (num_tokens * sums["squared_ratio"]) if sums["squared_ratio"] else 0.0,
            "clip/low": sums["clip_low"] / num_tokens,
            "clip/high": sums["clip_high"] / num_tokens,
            "advantage/abs": sums["advantage"] / num_tokens,
        }


class Grpo(Clipped):
    """Advantages as `advantage` says."""

    Settings = GrpoSettings
