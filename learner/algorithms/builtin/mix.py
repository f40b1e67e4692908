"""Components of a loss in one batch: policy gradient, cross-entropy and reverse KL, each over tokens of its own."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from rollstream.learner.algorithms.advantages import PolicyGradient
from rollstream.learner.algorithms.base import BatchView, Counts, PerToken, Prepared
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, log_ratio, with_entropy_bonus
from rollstream.schemas.algorithms import MixSettings
from rollstream.schemas.policy_gradient import PolicyGradientSettings
from rollstream.schemas.revisions import WEIGHS_ENTROPY_SINCE

RL, CE, REF_KL = "rl", "ce", "ref_kl"


class Mix(PolicyGradient):
    """See `loss`."""

    Settings = MixSettings

    def prepare(self, batch: BatchView, settings: PolicyGradientSettings) -> Prepared:
        """Advantages, and which tokens count for which component.

        rl and ref_kl are for tokens that some version of the policy sampled, ce for all others and for those of good
        rollouts.
        """
        assert isinstance(settings, MixSettings)
        components: dict[str, list[PerToken]] = {RL: [], CE: [], REF_KL: []}
        for row in batch.rows:
            is_sampled = row.versions != -1
            is_good = batch.members[row.member].reward >= settings.ce_threshold
            components[RL].append((settings.rl * is_sampled).astype(np.float32))
            components[CE].append((settings.ce * (~is_sampled | is_good)).astype(np.float32))
            components[REF_KL].append((settings.ref_kl * is_sampled).astype(np.float32))
        return replace(super().prepare(batch, settings), components=components)

    def loss(self, tokens: TokenBatch, settings: MixSettings) -> Losses:
        """rl: -sg(m) A log p; ce: -log p; ref_kl: -sg(m (log q - log p)) log p; m = min(r, 1 + high), sg: no gradient.

        r = exp(current - behaviour), q is the teacher, or the base version. m also has the weights of an off-policy
        correction. See `cispo`, `sft` and `opd`; the sum over components with a denominator each is prime-rl's.
        """
        current_N = tokens.logprobs_N.detach()
        ratio_N = log_ratio(current_N, tokens.behaviour_N).exp()
        weight_N = ratio_N.clamp(max=1 + settings.clip_high)
        if tokens.weights_N is not None:
            weight_N = weight_N * tokens.weights_N
        parts = {RL: -weight_N * tokens.advantages_N * tokens.logprobs_N, CE: -tokens.logprobs_N}
        entropies_N = tokens.entropies_N
        if tokens.weights_N is not None and tokens.revision >= WEIGHS_ENTROPY_SINCE:
            entropies_N = tokens.weights_N * entropies_N
        parts[RL] = with_entropy_bonus(parts[RL], entropies_N, settings.entropy_coefficient)
        target_N = tokens.reference_N if tokens.teacher_N is None else tokens.teacher_N
        if target_N is not None:
            parts[REF_KL] = -weight_N * tokens.log_ratio_to(target_N) * tokens.logprobs_N
        values_N = torch.stack([tokens.components[name] * part_N for name, part_N in parts.items()]).sum(dim=0)
        sums = {"entropy": tokens.entropies_N.detach().sum(), "ratio": ratio_N.sum()}
        counted = tokens.located().counted
        for name, part_N in parts.items():
            sums[f"{name}_loss"] = part_N.detach()[counted[name]].sum()
            sums[f"{name}_weighted"] = (tokens.components[name] * part_N.detach()).sum()
            sums[f"{name}_tokens"] = current_N.new_full((), len(counted[name]), dtype=torch.float64)
        if target_N is not None:
            sums["reverse_kl"] = (current_N - target_N)[counted[REF_KL]].sum()
        return Losses(values_N, sums, parts=parts)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """loss/COMPONENT: the mean over the tokens on which it counts, before its weight; loss/total: with it."""
        names = [name for name in (RL, CE, REF_KL) if sums.get(f"{name}_tokens")]
        found = {f"loss/{name}": sums[f"{name}_loss"] / sums[f"{name}_tokens"] for name in names}
        found |= {f"tokens/{name}": sums[f"{name}_tokens"] for name in names}
        if sums.get("ref_kl_tokens"):
            found["teacher/reverse_kl"] = sums["reverse_kl"] / sums["ref_kl_tokens"]
        return found | {
            "loss/total": sum(sums[f"{name}_weighted"] / sums[f"{name}_tokens"] for name in names),
            "policy/entropy": sums["entropy"] / counts.tokens,
            "policy/ratio": sums["ratio"] / counts.tokens,
        }
