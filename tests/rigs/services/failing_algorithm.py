"""An algorithm that raises where its job says, in the processes that it names."""

import os
from typing import Any, Literal

import torch

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.tokens import Losses
from rollstream.schemas.policy_gradient import PolicyGradientSettings

NAME = "python:tests.rigs.services.failing_algorithm.Failing"
MESSAGE = "a planted error"


class FailingSettings(PolicyGradientSettings):
    fails_in: Literal["prepare", "loss", "backward"]
    ranks: tuple[int, ...] = (1,)

    def fail(self, method: str) -> None:
        if method == self.fails_in and int(os.environ.get("RANK", "0")) in self.ranks:
            raise RuntimeError(MESSAGE)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, settings: FailingSettings) -> torch.Tensor:
        ctx.settings = settings
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.settings.fail("backward")
        return gradients[0], None


class Failing(PolicyGradient):
    Settings = FailingSettings

    def prepare(self, batch: Any, settings: Any) -> Any:
        settings.fail("prepare")
        return super().prepare(batch, settings)

    def loss(self, tokens: Any, settings: FailingSettings) -> Losses:
        settings.fail("loss")
        losses_N = -tokens.advantages_N * FailingBackward.apply(tokens.logprobs_N, settings)
        return Losses(losses_N, {"loss": losses_N.detach().sum()})

    def metrics(self, sums: Any, counts: Any) -> dict[str, float]:
        return {"loss/total": sums["loss"] / counts.tokens}
