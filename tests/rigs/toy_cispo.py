"""A CISPO-like algorithm in one file: the ratio is clipped and held constant, so every token keeps a gradient."""

from pydantic import Field

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.tokens import Losses, log_ratio
from rollstream.schemas.policy_gradient import PolicyGradientSettings


class CispoSettings(PolicyGradientSettings):
    clip_high: float = Field(default=4.0, gt=0)


class Cispo(PolicyGradient):
    Settings = CispoSettings

    def loss(self, tokens, settings):
        ratio_N = log_ratio(tokens.logprobs_N, tokens.behaviour_N).exp().clamp(max=1 + settings.clip_high).detach()
        losses_N = -ratio_N * tokens.advantages_N * tokens.logprobs_N
        return Losses(losses_N, {"loss": losses_N.detach().sum(), "ratio": ratio_N.sum()})

    def metrics(self, sums, counts):
        return {"loss/total": sums["loss"] / counts.tokens, "cispo/ratio": sums["ratio"] / counts.tokens}
