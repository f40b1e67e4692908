"""SAPO: a soft gate on the ratio in place of a clip."""

from collections.abc import Mapping

import torch

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Counts
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, log_ratio, means, regularised
from rollstream.schemas.algorithms import SapoSettings


class Sapo(PolicyGradient):
    """See `loss`."""

    Settings = SapoSettings

    def loss(self, tokens: TokenBatch, settings: SapoSettings) -> Losses:
        """-sigmoid(t (r - 1)) 4 / t A - c H + b KL by token, r = exp(current - behaviour), t by the sign of A.

        "Soft Adaptive Policy Optimization" (arXiv 2511.20347, equations 5 and 6): the gradient's weight is r times
        4 g (1 - g) with the gate g, 1 at r = 1, and fades on both sides.
        """
        ratio_N = log_ratio(tokens.logprobs_N, tokens.behaviour_N).exp()
        temperature_N = torch.full_like(ratio_N, settings.temperature_negative)
        temperature_N = temperature_N.masked_fill(tokens.advantages_N > 0, settings.temperature_positive)
        gate_N = torch.sigmoid(temperature_N * (ratio_N - 1))
        losses_N = -gate_N * 4 / temperature_N * tokens.advantages_N
        losses_N, sums = regularised(losses_N, ratio_N, tokens, settings)
        sums["gate"] = (4 * gate_N * (1 - gate_N)).detach().sum()
        return Losses(losses_N, sums)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all completion tokens; policy/gate: what the gate leaves of the gradient, 1 at a ratio of 1."""
        return means(sums, counts.tokens, {"gate": "policy/gate"})
