"""GSPO: one ratio a sequence, the geometric mean of its tokens' ratios, clipped on both sides."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import BatchView, Counts, Normaliser, Prepared
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, dual_clipped, log_ratio, means, regularised
from rollstream.schemas.algorithms import GspoSettings
from rollstream.schemas.policy_gradient import PolicyGradientSettings


class Gspo(PolicyGradient):
    """See `loss`."""

    Settings = GspoSettings

    def prepare(self, batch: BatchView, settings: PolicyGradientSettings) -> Prepared:
        """Every sequence counts the same, whatever `aggregation` says."""
        return replace(super().prepare(batch, settings), normaliser=Normaliser("sequences"))

    def loss(self, tokens: TokenBatch, settings: GspoSettings) -> Losses:
        """-min(s A, clip(s, 1 - low, 1 + high) A) - c H + b KL by sequence, s = exp(mean of its tokens' log-ratios).

        arXiv 2507.18071, equations 5 and 7; A, H and KL are means over the sequence's tokens. The paper has no bound
        where A < 0: with `dual_clip` c the objective is at least c A there, as of `grpo`.
        """
        ratio_B = tokens.mean_by_row(log_ratio(tokens.logprobs_N, tokens.behaviour_N)).exp()
        advantages_B = tokens.mean_by_row(tokens.advantages_N)
        clipped_B = ratio_B.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        objective_B = torch.minimum(ratio_B * advantages_B, clipped_B * advantages_B)
        losses_B = -dual_clipped(objective_B, advantages_B, settings.dual_clip)
        losses_B, sums = regularised(losses_B, ratio_B, tokens, settings, by_row=True)
        sums["clip_low"] = ((ratio_B < 1 - settings.clip_low) & (advantages_B < 0)).sum()
        sums["clip_high"] = ((ratio_B > 1 + settings.clip_high) & (advantages_B > 0)).sum()
        if settings.dual_clip is not None:
            sums["clip_dual"] = ((ratio_B > settings.dual_clip) & (advantages_B < 0)).sum()
        return Losses(losses_B, sums, per="row")

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all sequences; clip/low, clip/high and clip/dual are the shares of those without a gradient."""
        names = {"clip_low": "clip/low", "clip_high": "clip/high", "clip_dual": "clip/dual"}
        return means(sums, counts.sequences, names)
