"""VESPO: a smooth weight of each sequence by the product of its tokens' ratios."""

import math
from collections.abc import Mapping

import torch

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.tokens import MAX_LOG_RATIO, Losses, TokenBatch, means, regularised
from rollstream.schemas.algorithms import VespoSettings

_MIN_LOG_RATIO = math.log(1e-8)


class Vespo(PolicyGradient):
    """See `loss`."""

    Settings = VespoSettings

    def loss(self, tokens: TokenBatch, settings: VespoSettings) -> Losses:
        """-sg(f(w)) A log p - c H + b KL by token, f(w) = w^k exp(l (1 - w)), w the product of the sequence's ratios.

        k and l are those of the advantage's sign, which f is 1 at w = 1 for; log w is held within log 1e-8 and 20.
        "Variational Sequence-Level Soft Policy Optimization" (arXiv 2602.10693v3, equation 20), with the bounds of
        log w in TRL's `loss_type: vespo`.
        """
        with torch.no_grad():
            ratios_N = (tokens.logprobs_N - tokens.behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            log_w_N = tokens.to_tokens(tokens.by_row(ratios_N).clamp(_MIN_LOG_RATIO, MAX_LOG_RATIO))
            is_positive_N = tokens.advantages_N >= 0
            k_N = torch.full_like(log_w_N, settings.k_negative).masked_fill(is_positive_N, settings.k_positive)
            lambda_N = torch.full_like(log_w_N, settings.lambda_negative)
            lambda_N = lambda_N.masked_fill(is_positive_N, settings.lambda_positive)
            weight_N = (k_N * log_w_N + lambda_N * (1 - log_w_N.exp())).exp()
        losses_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
        losses_N, sums = regularised(losses_N, ratios_N.exp(), tokens, settings)
        sums["weight"] = weight_N.sum()
        return Losses(losses_N, sums)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all completion tokens; policy/weight: of their sequences."""
        return means(sums, counts.tokens, {"weight": "policy/weight"})
