"""On-policy distillation: the policy's own samples become as likely as under the teacher, token by token."""

from collections.abc import Mapping

from rollstream.learner.algorithms.base import Algorithm, Counts
from rollstream.learner.algorithms.tokens import Losses, TokenBatch, log_ratio
from rollstream.schemas.algorithms import OpdSettings, OpsdSettings


class Opd(Algorithm):
    """See `loss`. Rewards play no part."""

    Settings = OpdSettings

    def loss(self, tokens: TokenBatch, settings: OpdSettings | OpsdSettings) -> Losses:
        """-sg(min(r, max)) sg(A) log p by token, A = log q - log p, r = exp(current - behaviour), sg: no gradient.

        p is the policy, q the teacher. -A is the estimate of the reverse KL divergence KL(p || q) from one sample, and
        the gradient of the loss is that of the divergence at each prefix that was sampled (generalised knowledge
        distillation, arXiv 2306.13649, equation 4 with reverse KL on the student's samples; as an advantage: Thinking
        Machines, "On-Policy Distillation"). r weights tokens that an earlier version sampled. log q - log p counts for
        no more than MAX_LOG_RATIO either way.
        """
        assert tokens.teacher_N is not None
        current_N = tokens.logprobs_N.detach()
        advantages_N = tokens.log_ratio_to(tokens.teacher_N)
        ratio_N = log_ratio(current_N, tokens.behaviour_N).exp()
        losses_N = -ratio_N.clamp(max=settings.ratio_max) * advantages_N * tokens.logprobs_N
        sums = {
            "loss": losses_N.detach().sum(),
            "entropy": tokens.entropies_N.detach().sum(),
            "ratio": ratio_N.sum(),
            "reverse_kl": (current_N - tokens.teacher_N).sum(),
            "advantage": advantages_N.abs().sum(),
            "clip_high": (ratio_N > settings.ratio_max).sum(),
        }
        return Losses(losses_N, sums)

    def metrics(self, sums: Mapping[str, float], counts: Counts) -> dict[str, float]:
        """Means over all completion tokens. teacher/reverse_kl: of log p - log q, which distillation brings to 0."""
        names = {"loss": "loss/total", "entropy": "policy/entropy", "ratio": "policy/ratio", "clip_high": "clip/high"}
        names |= {"reverse_kl": "teacher/reverse_kl", "advantage": "advantage/abs"}
        return {name: sums[key] / counts.tokens for key, name in names.items()}
