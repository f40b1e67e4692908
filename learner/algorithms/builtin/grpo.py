"""GRPO: the ratio clipped on both sides, bounded for negative advantages; every token of a batch weighs the same."""

from collections.abc import Mapping

import torch

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, dual_clipped, log_ratio, means, regularised
from rollstream.schemas.algorithms import GrpoSettings
from rollstream.schemas.policy_gradient import ClippedSettings


class Clipped(PolicyGradient):
    """PPO's clipped objective; see `loss`. Algorithms that share it differ in their advantages."""

    def loss(self, tokens: TokenBatch, settings: ClippedSettings) -> Losses:
        """-min(r A, clip(r, 1 - low, 1 + high) A) - c H + b KL by token, r = exp(current - behaviour).

        Clip-higher and token-level normalisation as in DAPO (arXiv 2503.14476, equations 8 and 12). KL is that of
        `regularised`; `policy/kl` is the same estimate, k3 = r - 1 - log r, of KL(behaviour || current). With
        `dual_clip` c the objective of a token with A < 0 is at least c A (dual-clip PPO, arXiv 1912.09729, equation 5):
        it has no gradient where r > c. A token with a log-ratio above MAX_LOG_RATIO has no gradient from it.
        """
        log_ratio_N = log_ratio(tokens.logprobs_N, tokens.behaviour_N)
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        objective_N = torch.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
        losses_N = -dual_clipped(objective_N, tokens.advantages_N, settings.dual_clip)
        losses_N, sums = regularised(losses_N, ratio_N, tokens, settings, kl_ratio_N=ratio_N)
        with torch.no_grad():
            is_low_N = (ratio_N < 1 - settings.clip_low) & (tokens.advantages_N < 0)
            is_high_N = (ratio_N > 1 + settings.clip_high) & (tokens.advantages_N > 0)
            sums |= {
                "kl": (ratio_N - 1 - log_ratio_N).sum(),
                "clip_low": is_low_N.sum(),
                "clip_high": is_high_N.sum(),
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
        names = {"kl": "policy/kl", "clip_low": "clip/low", "clip_high": "clip/high", "clip_dual": "clip/dual"}
        found = means(sums, counts.tokens, {**names, "advantage": "advantage/abs"})
        squared = counts.tokens * sums["squared_ratio"]
        return {**found, "policy/ess": sums["ratio"] ** 2 / squared if squared else 0.0}


class Grpo(Clipped):
    """Advantages as `advantage` says."""

    Settings = GrpoSettings
