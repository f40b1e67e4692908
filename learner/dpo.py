"""DPO: raise the answer of the higher score above the other, measured by log-ratios to a reference policy."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rollstream.schemas.settings import AlgorithmSettings


class PairBatch(NamedTuple):
    """K pairs of answers: log-probability of each answer, summed (or averaged) over its tokens."""

    chosen_K: Tensor
    """Under the current policy; carries the gradient, as the rejected."""
    rejected_K: Tensor
    reference_chosen_K: Tensor
    reference_rejected_K: Tensor
    chosen_nll_K: Tensor
    """Mean negative log-likelihood of the chosen answer's tokens under the current policy."""


class PairLosses(NamedTuple):
    """What the loss makes of a PairBatch."""

    losses_K: Tensor
    sums: dict[str, Tensor]
    """Detached sums over the pairs, added up over micro-batches."""


def losses(batch: PairBatch, settings: AlgorithmSettings) -> PairLosses:
    """-log sigmoid(m) by pair, m = beta * (chosen - reference_chosen) - beta * (rejected - reference_rejected).

    Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290, equation 7); beta times a log-ratio is the
    implicit reward of an answer (equation 5). `sft_weight` adds the chosen answer's mean negative log-likelihood.
    """
    chosen_rewards_K = settings.beta * (batch.chosen_K - batch.reference_chosen_K)
    rejected_rewards_K = settings.beta * (batch.rejected_K - batch.reference_rejected_K)
    margins_K = chosen_rewards_K - rejected_rewards_K
    losses_K = -functional.logsigmoid(margins_K)
    if settings.sft_weight:
        losses_K = losses_K + settings.sft_weight * batch.chosen_nll_K
    with torch.no_grad():
        sums = {
            "loss": losses_K.sum(),
            "accuracy": _share_above(margins_K).sum(),
            "policy_accuracy": _share_above(batch.chosen_K - batch.rejected_K).sum(),
            "margin": margins_K.sum(),
            "chosen_reward": chosen_rewards_K.sum(),
            "rejected_reward": rejected_rewards_K.sum(),
            "chosen_logprob": batch.chosen_K.sum(),
            "rejected_logprob": batch.rejected_K.sum(),
            "chosen_nll": batch.chosen_nll_K.sum(),
        }
    return PairLosses(losses_K, sums)


def metrics(sums: Mapping[str, float], num_pairs: int) -> dict[str, float]:
    """Means over the pairs. Accuracies count a tie as half: dpo/accuracy is 0.5 where the policy is the reference.

    dpo/accuracy: the chosen answer has the higher implicit reward; dpo/policy_accuracy: it is the likelier one.
    """
    names = ("accuracy", "policy_accuracy", "margin", "chosen_reward", "rejected_reward")
    names += ("chosen_logprob", "rejected_logprob", "chosen_nll")
    return {"loss/total": sums["loss"] / num_pairs} | {f"dpo/{name}": sums[name] / num_pairs for name in names}


def _share_above(differences_K: Tensor) -> Tensor:
    return (differences_K > 0).double() + 0.5 * (differences_K == 0).double()
