"""DPO: raise the answer of the higher score above the other, measured by log-ratios to a reference policy."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rollstream.learner.algorithms.base import Algorithm, BatchView, Counts, Normaliser, Prepared
from rollstream.learner.algorithms.tokens import Losses, TokenBatch
from rollstream.schemas.algorithms import DpoSettings, MaltSettings


class PairBatch(NamedTuple):
    """K pairs of answers: log-probability of each answer, summed (or averaged) over its tokens."""

    chosen_K: Tensor
    """Under the current policy; carries the gradient, as the rejected."""
    rejected_K: Tensor
    reference_chosen_K: Tensor
    reference_rejected_K: Tensor
    chosen_nll_K: Tensor
    """Mean negative log-likelihood of the chosen answer's tokens under the current policy."""


class Dpo(Algorithm):
    """See `loss_of`."""

    Settings = DpoSettings

    def prepare(self, batch: BatchView, settings: DpoSettings) -> Prepared:
        """Every pair counts the same."""
        found: dict[str, float] = {"dpo/pairs": float(len(batch.score_diffs))}
        if batch.score_diffs:
            found["dpo/score_diff"] = sum(batch.score_diffs) / len(batch.score_diffs)
        return Prepared(normaliser=Normaliser("sequences"), metrics=found)

    def loss(self, tokens: TokenBatch, settings: DpoSettings) -> Losses:
        """Losses of the pairs, as `loss_of` computes them."""
        return losses_of(tokens, settings)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over the pairs; of the entropy, over the tokens of all answers.

        Accuracies count a tie as half. dpo/accuracy: the chosen answer has the higher implicit reward; where the policy
        is the reference, rounding decides. dpo/policy_accuracy: it is the likelier one.
        """
        names = ("accuracy", "policy_accuracy", "margin", "chosen_reward", "rejected_reward")
        names += ("chosen_logprob", "rejected_logprob", "chosen_nll")
        return {
            "loss/total": sums["loss"] / counts.pairs,
            **{f"dpo/{name}": sums[name] / counts.pairs for name in names},
            "policy/entropy": sums["entropy"] / counts.tokens,
        }


def losses_of(tokens: TokenBatch, settings: DpoSettings | MaltSettings) -> Losses:
    """Losses of a micro-batch's pairs, as `loss_of` computes them; needs their reference log-probabilities."""
    assert tokens.reference_N is not None
    policy_B, reference_B = tokens.by_row(tokens.logprobs_N), tokens.by_row(tokens.reference_N)
    lengths_B = tokens.sizes(policy_B)
    nll_B = -policy_B / lengths_B
    if settings.average_logprobs:
        policy_B, reference_B = policy_B / lengths_B, reference_B / lengths_B
    chosen_K, rejected_K = tokens.located().chosen_K, tokens.located().rejected_K
    pairs = PairBatch(
        policy_B[chosen_K], policy_B[rejected_K], reference_B[chosen_K], reference_B[rejected_K], nll_B[chosen_K]
    )
    found = loss_of(pairs, settings)
    return found._replace(sums={**found.sums, "entropy": tokens.entropies_N.sum()})


def loss_of(batch: PairBatch, settings: DpoSettings | MaltSettings) -> Losses:
    """-log sigmoid(m) by pair, m = beta * (chosen - reference_chosen) - beta * (rejected - reference_rejected).

    Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290, equation 7); beta times a log-ratio is the
    implicit reward of an answer (equation 5). `label_smoothing` e: -(1 - e) log sigmoid(m) - e log sigmoid(-m)
    (Mitchell, "A note on DPO with noisy preferences"). `ipo`: (m / beta - 1 / (2 beta))^2 (arXiv 2310.12036, equation
    17). `sft_weight` adds the chosen answer's mean negative log-likelihood.
    """
    chosen_rewards_K = settings.beta * (batch.chosen_K - batch.reference_chosen_K)
    rejected_rewards_K = settings.beta * (batch.rejected_K - batch.reference_rejected_K)
    margins_K = chosen_rewards_K - rejected_rewards_K
    losses_K = _losses_of(margins_K, settings)
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
    return Losses(losses_K, sums, per="pair")


def _losses_of(margins_K: Tensor, settings: DpoSettings | MaltSettings) -> Tensor:
    if settings.loss_type == "ipo":
        return (margins_K / settings.beta - 1 / (2 * settings.beta)).square()
    losses_K = -functional.logsigmoid(margins_K)
    if settings.label_smoothing:
        share = settings.label_smoothing
        losses_K = (1 - share) * losses_K - share * functional.logsigmoid(-margins_K)
    return losses_K


def _share_above(differences_K: Tensor) -> Tensor:
    return (differences_K > 0).double() + 0.5 * (differences_K == 0).double()
