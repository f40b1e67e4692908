"""The policy as it was at a job's base version, for what is measured against it. Never trained."""

import torch
from torch import Tensor

from rollstream.learner.collate import MicroBatch
from rollstream.learner.model import PolicyModel, from_bytes


class Reference:
    """Weights that stay. Full weights are a copy of the model; adapters are put in place of the policy's for a forward.

    It computes on the policy's device and in its type, without dropout.
    """

    def __init__(self, policy: PolicyModel, weights: bytes, what: str) -> None:
        """`weights`: as published; `what` names them. The policy stays as it is. Raises ModelError."""
        tensors = from_bytes(weights, what)
        self._policy = policy
        self._adapters: list[Tensor] | None = None
        if policy.settings.lora is None:
            self._policy = policy.frozen_copy()
            self._policy.load_weights(tensors)
        else:
            own = _values(policy)
            policy.load_weights(tensors)
            self._adapters = _values(policy)
            _put(policy, own)

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, *, temperature: float) -> Tensor:
        """Log-probabilities (N,) of the N tokens on the mask, row by row."""
        if self._adapters is None:
            return self._terms(batch, temperature)
        own = _values(self._policy)
        was_training = self._policy.module.training
        _put(self._policy, self._adapters)
        self._policy.module.eval()
        try:
            return self._terms(batch, temperature)
        finally:
            self._policy.module.train(was_training)
            _put(self._policy, own)

    def _terms(self, batch: MicroBatch, temperature: float) -> Tensor:
        logprobs_N, _ = self._policy.completion_terms(batch, temperature=temperature, entropy_needs_grad=False)
        return logprobs_N


def _values(policy: PolicyModel) -> list[Tensor]:
    return [parameter.detach().clone() for _, parameter in policy.trainable()]


@torch.no_grad()
def _put(policy: PolicyModel, values: list[Tensor]) -> None:
    for (_, parameter), value in zip(policy.trainable(), values, strict=True):
        parameter.copy_(value)
