"""A GSPO-like algorithm in one file: one ratio a sequence, against the policy before the batch's first step."""

from dataclasses import replace

import torch
from pydantic import Field

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import Normaliser
from rollstream.learner.algorithms.tokens import Losses, log_ratio
from rollstream.schemas.policy_gradient import PolicyGradientSettings


class GspoSettings(PolicyGradientSettings):
    clip: float = Field(default=0.2, gt=0)

    @property
    def needs(self):
        return super().needs.model_copy(update={"proximal": True, "versions": True})


class Gspo(PolicyGradient):
    Settings = GspoSettings

    def prepare(self, batch, settings):
        return replace(super().prepare(batch, settings), normaliser=Normaliser("sequences"))

    def loss(self, tokens, settings):
        assert tokens.proximal_N is not None
        ratio_B = tokens.mean_by_row(log_ratio(tokens.logprobs_N, tokens.proximal_N)).exp()
        advantages_B = tokens.mean_by_row(tokens.advantages_N)
        clipped_B = ratio_B.clamp(1 - settings.clip, 1 + settings.clip)
        losses_B = -torch.minimum(ratio_B * advantages_B, clipped_B * advantages_B)
        return Losses(losses_B, {"loss": losses_B.detach().sum()}, per="row")

    def metrics(self, sums, counts):
        return {"loss/total": sums["loss"] / counts.sequences}
