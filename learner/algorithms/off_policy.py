"""Tokens that another policy sampled than the one that is trained: weights, masks, and how far the two are apart."""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollstream.learner.algorithms.base import OTHER_GROUP
from rollstream.learner.algorithms.tokens import MAX_LOG_RATIO, TokenBatch
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.policy_gradient import OffPolicySettings, PolicyGradientSettings
from rollstream.schemas.revisions import COMPARES_OWN_SINCE

logger = logging.getLogger(__name__)

PREFIX = "off_policy/"
MISMATCH, DRIFT = "mismatch/", "drift/"
"""Prefixes of metrics: of tokens sampled by the very version that is trained, and of tokens of earlier versions."""
STALENESS = "staleness/tokens_"
AGES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, None))
"""Versions between the policy that sampled a token and the one that is trained: bounds of the counts, the last none."""
MAX_MISMATCH = 0.01
"""KL divergence (k3, nats a token) above which engine and learner are said to differ at one version: float32 engines
stay below 1e-6, bfloat16 ones usually below 1e-3."""


def applied(tokens: TokenBatch, settings: AlgorithmSettings) -> tuple[TokenBatch, dict[str, Tensor]]:
    """The tokens `masked` and `corrected` as the settings of their algorithm say; and sums."""
    sums: dict[str, Tensor] = {}
    if not isinstance(settings, PolicyGradientSettings):
        return tokens, sums
    if settings.off_policy_mask_threshold is not None:  # before the proximal policy takes the sampling one's place
        tokens, sums = masked(tokens, settings.off_policy_mask_threshold)
    if settings.off_policy is not None:
        tokens, seen = corrected(tokens, settings.off_policy)
        sums = sums | seen
    return tokens, sums


@torch.no_grad()
def corrected(tokens: TokenBatch, settings: OffPolicySettings) -> tuple[TokenBatch, dict[str, Tensor]]:
    """The tokens with the proximal policy as the one to compare with, weighted by proximal / behaviour; and sums.

    See `OffPolicySettings`. Bounds count for w itself; a rejected sequence weighs 0. Normalisers count all tokens.
    """
    assert tokens.proximal_N is not None
    log_w_N = (tokens.proximal_N - tokens.behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if settings.level == "sequence":
        level_N = tokens.to_tokens(tokens.by_row(log_w_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    else:
        level_N = log_w_N
    w_N = level_N.exp()
    low = 0.0 if settings.clip_min is None else settings.clip_min
    high = math.inf if settings.clip_max is None else settings.clip_max
    is_out_N = (w_N < low) | (w_N > high)
    bounded_N = w_N.clamp(low, high)
    weights_N = torch.where(is_out_N, torch.zeros_like(w_N), w_N) if settings.mode == "mask" else bounded_N
    is_rejected_N = torch.zeros_like(is_out_N)
    if settings.reject is not None:
        is_rejected_N = tokens.to_tokens(tokens.mean_by_row(_kl(log_w_N, settings.reject)) > settings.reject_above)
        weights_N = torch.where(is_rejected_N, torch.zeros_like(w_N), weights_N)
    own = weights_N if tokens.weights_N is None else tokens.weights_N * weights_N
    sums = {
        "w": w_N.sum(),
        "squared_w": w_N.square().sum(),
        "clipped": is_out_N.sum(),
        "rejected": is_rejected_N.sum(),
        "k1": _kl(log_w_N, "k1").sum(),
        "k3": _kl(log_w_N, "k3").sum(),
    }
    found = {f"{PREFIX}{name}": value for name, value in sums.items()}
    return tokens._replace(behaviour_N=tokens.proximal_N, weights_N=own), found


@torch.no_grad()
def masked(tokens: TokenBatch, threshold: float) -> tuple[TokenBatch, dict[str, Tensor]]:
    """The tokens without the negative advantages of sequences that the current policy holds for much less likely; sums.

    DeepSeek-V3.2 (arXiv 2512.02556, equation 9): where A < 0 and the mean over the sequence of log p(sampling) - log
    p(current) is above the threshold, only the policy gradient is masked: a KL penalty and an entropy bonus stay. A
    token of a log-ratio beyond MAX_LOG_RATIO counts as that. Normalisers count all tokens.
    """
    log_w_N = (tokens.logprobs_N - tokens.behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    is_far_N = tokens.to_tokens(tokens.mean_by_row(_kl(log_w_N, "k1")) > threshold)
    is_masked_N = is_far_N & (tokens.advantages_N < 0)
    advantages_N = torch.where(is_masked_N, torch.zeros_like(tokens.advantages_N), tokens.advantages_N)
    return tokens._replace(advantages_N=advantages_N), {f"{PREFIX}masked": is_masked_N.sum()}


def metrics(sums: Mapping[str, float], num_tokens: int) -> dict[str, float]:
    """Metrics of all tokens of a batch, with verl's meanings; none if nothing was corrected or masked.

    off_policy/masked: share of tokens that `masked` left without a policy gradient. weight: mean of w before it is
    bounded; ess: (sum w)^2 / (N sum w^2), 1 where the policies agree; chi2: mean w^2 - 1, the chi-squared divergence;
    kl and kl_k3: estimates of KL(behaviour || proximal); clipped, rejected: shares of tokens.
    """
    if not num_tokens:
        return {}
    masks = {name: sums[name] / num_tokens for name in (f"{PREFIX}masked",) if name in sums}
    if f"{PREFIX}w" not in sums:
        return masks
    value = {name: sums[f"{PREFIX}{name}"] for name in ("w", "squared_w", "clipped", "rejected", "k1", "k3")}
    found = {
        "weight": value["w"] / num_tokens,
        "ess": value["w"] ** 2 / (num_tokens * value["squared_w"]) if value["squared_w"] else 0.0,
        "chi2": value["squared_w"] / num_tokens - 1,
        "kl": value["k1"] / num_tokens,
        "kl_k3": value["k3"] / num_tokens,
        "clipped": value["clipped"] / num_tokens,
        "rejected": value["rejected"] / num_tokens,
    }
    return {f"{PREFIX}{name}": one for name, one in found.items()} | masks


def ages(rows: Iterable[tuple[NDArray[np.int64], NDArray[np.bool_]]], version: int) -> dict[str, float]:
    """Number of a batch's tokens by age in versions, in the ranges of `AGES`; `rows`: versions (T,) and masks (T,).

    Tokens that no known version sampled are not counted. All names are there, so that sums over batches are right.
    """
    counts = [0] * len(AGES)
    for versions_T, mask_T in rows:
        age_K = np.maximum(version - versions_T[mask_T & (versions_T >= 0)], 0)
        for index, (first, last) in enumerate(AGES):
            counts[index] += int(((age_K >= first) & (age_K <= (age_K if last is None else last))).sum())
    return {age_name(first, last): float(count) for (first, last), count in zip(AGES, counts, strict=True)}


def age_name(first: int, last: int | None) -> str:
    """The metric's name: staleness/tokens_2, staleness/tokens_3_4, staleness/tokens_17_up."""
    return f"{STALENESS}{first}" if last == first else f"{STALENESS}{first}_{'up' if last is None else last}"


class AgedTokens(NamedTuple):
    """The tokens of a micro-batch by the version that sampled them: indices (int64), and on how many versions it is."""

    equal_K: Tensor
    """Sampled by the very version that is trained."""
    other_K: Tensor
    """Sampled by other known weights: another version, or another model group."""
    versions: int
    """Versions between them and the one that is trained, summed over tokens of the same model group."""
    rows: int
    """Rows that have a token of `equal_K`."""
    shares_K: Tensor
    """Weight of each token in `equal_K`: 1 divided by the number of those in its row."""


def aged_tokens(versions_N: NDArray[np.int64], lengths_B: Sequence[int], version: int) -> AgedTokens:
    """Group `TokenBatch.versions_N` by age, with the rows' lengths, in main memory; `version`: that of the weights."""
    is_known_N, is_equal_N = versions_N >= 0, versions_N == version
    is_other_N = (is_known_N & ~is_equal_N) | (versions_N == OTHER_GROUP)
    equal_K, other_K = np.flatnonzero(is_equal_N), np.flatnonzero(is_other_N)
    found = int((version - versions_N[is_known_N]).sum())
    rows_K = np.repeat(np.arange(len(lengths_B)), lengths_B)[equal_K]
    counts_B = np.bincount(rows_K, minlength=len(lengths_B))
    shares_K = torch.from_numpy(1 / counts_B[rows_K])
    return AgedTokens(
        torch.from_numpy(equal_K), torch.from_numpy(other_K), found, int(np.count_nonzero(counts_B)), shares_K
    )


@torch.no_grad()
def compared(tokens: TokenBatch, aged: AgedTokens) -> dict[str, Tensor]:
    """Sums of how far the policy, before any step on the tokens, is from those that sampled them."""
    log_w_N = (tokens.logprobs_N - tokens.behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    counts = {
        f"{MISMATCH}tokens": len(aged.equal_K),
        f"{DRIFT}tokens": len(aged.other_K),
        f"{MISMATCH}rows": len(tokens.lengths_B) if tokens.revision < COMPARES_OWN_SINCE else aged.rows,
        f"{DRIFT}versions": aged.versions,
    }
    found = {name: log_w_N.new_full((), count, dtype=torch.float64) for name, count in counts.items()}
    for prefix, chosen_K in ((MISMATCH, aged.equal_K), (DRIFT, aged.other_K)):
        log_w_K = log_w_N[chosen_K]
        sums = {
            "w": log_w_K.exp().sum(),
            "squared_w": (2 * log_w_K).exp().sum(),
            "k1": _kl(log_w_K, "k1").sum(),
            "k3": _kl(log_w_K, "k3").sum(),
        }
        found |= {f"{prefix}{name}": value for name, value in sums.items()}
    if tokens.revision < COMPARES_OWN_SINCE:
        found[f"{MISMATCH}log_ppl"] = tokens.mean_by_row(-log_w_N).sum()
    else:
        found[f"{MISMATCH}log_ppl"] = -(log_w_N[aged.equal_K] * aged.shares_K.to(log_w_N.dtype)).sum()
    return found


def compared_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics with verl's and prime-rl's meanings, over the tokens of the batch's first mini-batch; none if none was
    compared.

    mismatch/... of tokens that the trained version sampled itself, drift/... of other weights' tokens: kl and kl_k3,
    estimates of KL(sampling || trained) in nats a token; ess and chi2 as in `metrics`. mismatch/log_ppl_diff: mean over
    the sequences with tokens that the trained version sampled, of the log-perplexity of these under the trained policy
    less that under the sampling one; before COMPARES_OWN_SINCE, of all tokens and sequences. drift/tokens: share of
    tokens that other weights sampled; drift/versions: how many versions old a token is on average, where one of another
    model group counts as 0.
    """
    if f"{MISMATCH}rows" not in sums:
        return {}
    found: dict[str, float] = {}
    for prefix in (MISMATCH, DRIFT):
        count, w, squared = (sums[f"{prefix}{name}"] for name in ("tokens", "w", "squared_w"))
        if count:
            found[f"{prefix}kl"] = sums[f"{prefix}k1"] / count
            found[f"{prefix}kl_k3"] = sums[f"{prefix}k3"] / count
            found[f"{prefix}ess"] = w**2 / (count * squared) if squared else 0.0
            found[f"{prefix}chi2"] = squared / count - 1
    total = sums[f"{MISMATCH}tokens"] + sums[f"{DRIFT}tokens"]
    if sums[f"{MISMATCH}rows"]:
        found[f"{MISMATCH}log_ppl_diff"] = sums[f"{MISMATCH}log_ppl"] / sums[f"{MISMATCH}rows"]
    found[f"{DRIFT}tokens"] = sums[f"{DRIFT}tokens"] / total if total else 0.0
    found[f"{DRIFT}versions"] = sums[f"{DRIFT}versions"] / total if total else 0.0
    return found


def _kl(log_w_N: Tensor, estimate: str) -> Tensor:
    """Estimates of KL(behaviour || proximal) by token (Schulman, "Approximating KL Divergence"): k1 = -log w,
    k2 = (log w)^2 / 2, k3 = w - 1 - log w.
    """
    if estimate == "k1":
        return -log_w_N
    if estimate == "k2":
        return log_w_N.square() / 2
    return log_w_N.exp() - 1 - log_w_N


def warn_of_mismatch(metrics: Mapping[str, float], version: int, model_group: str) -> None:
    """Log a warning if engine and learner differ by more than MAX_MISMATCH, by the metrics of a step."""
    found = metrics.get(f"{MISMATCH}kl_k3", 0.0)
    if found > MAX_MISMATCH:
        logger.warning(
            "engine and learner differ at version=%s of model_group=%s: KL %.3g nats a token where they should "
            "agree; compare their dtype, chat template and sampling, or train with algorithm.off_policy",
            version,
            model_group,
            found,
        )
