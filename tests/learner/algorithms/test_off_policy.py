"""Correction of tokens that another policy sampled: weights and diagnostics against numpy, and a step with them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rollstream.learner.algorithms import off_policy
from rollstream.learner.algorithms.base import Row
from rollstream.learner.algorithms.tokens import TokenBatch
from rollstream.schemas.algorithms import GrpoSettings, GspoSettings
from rollstream.schemas.events.rollouts import Completion, VersionSpan
from rollstream.schemas.policy_gradient import OffPolicySettings

LENGTHS = (3, 1, 4)
GROUPS = (("x/m", 5), ("w/m", 5), ("w/m", 4), ("x/m", 4))
ROW_OF = np.repeat(np.arange(3), LENGTHS)
RNG = np.random.default_rng(7)
BEHAVIOUR, PROXIMAL = RNG.normal(-2.0, 0.8, 8), RNG.normal(-2.0, 0.8, 8)
LOG_W = PROXIMAL - BEHAVIOUR


def tokens(weights: Any = None) -> TokenBatch:
    columns = [torch.tensor(one, dtype=torch.float64) for one in (PROXIMAL, np.ones(8), BEHAVIOUR, np.ones(8))]
    return TokenBatch(
        *columns,
        proximal_N=columns[0],
        weights_N=weights,
        rows_N=torch.tensor(ROW_OF),
        lengths_B=LENGTHS,
    )


def of_rows(values: np.ndarray) -> np.ndarray:
    """Sums by sequence, for each of its tokens."""
    return np.array([values[row == ROW_OF].sum() for row in range(3)])[ROW_OF]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("clip_min", [None, 0.5])
def test_weights_are_those_of_trls_modes(level: Any, mode: Any, clip_min: float | None) -> None:
    settings = OffPolicySettings(level=level, mode=mode, clip_min=clip_min, clip_max=1.4)
    w = np.exp(LOG_W if level == "token" else of_rows(LOG_W))
    low = clip_min or 0.0
    is_out = (w < low) | (w > 1.4)
    assert is_out.any()
    assert not is_out.all()
    expected = np.where(is_out, 0, w) if mode == "mask" else np.clip(w, low, 1.4)
    found, sums = off_policy.corrected(tokens(), settings)
    assert found.weights_N is not None
    assert found.weights_N.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    assert found.behaviour_N is found.proximal_N, "ratios are those to the proximal policy"
    metrics = off_policy.metrics({name: float(value) for name, value in sums.items()}, 8)
    assert metrics["off_policy/ess"] == pytest.approx(w.sum() ** 2 / (8 * (w**2).sum()))
    assert metrics["off_policy/chi2"] == pytest.approx((w**2).mean() - 1)
    assert metrics["off_policy/kl"] == pytest.approx(-LOG_W.mean())
    assert metrics["off_policy/kl_k3"] == pytest.approx((np.exp(LOG_W) - 1 - LOG_W).mean())
    assert metrics["off_policy/clipped"] == is_out.mean()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_trls_names_of_the_modes_are_read_as_level_and_mode(level: Any, mode: Any) -> None:
    found = OffPolicySettings.model_validate({"mode": f"{level}_{mode}", "clip_max": None})
    assert (found.level, found.mode, found.clip_max) == (level, mode, None)
    assert OffPolicySettings.model_validate({"mode": f"{level}_{mode}", "level": level}).mode == mode
    other = "token" if level == "sequence" else "sequence"
    with pytest.raises(ValidationError, match=f"mode {level}_{mode} is of level {level}, not {other}"):
        OffPolicySettings.model_validate({"mode": f"{level}_{mode}", "level": other})


@pytest.mark.parametrize("mode", ["sequence", "sequence_", "token_clip", "row_mask"])
def test_a_mode_that_is_none_of_trls_is_refused(mode: str) -> None:
    with pytest.raises(ValidationError, match="Input should be 'truncate' or 'mask'"):
        OffPolicySettings.model_validate({"mode": mode})


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_without_an_upper_bound_only_the_lower_one_counts(mode: str) -> None:
    settings = OffPolicySettings.model_validate({"mode": mode, "clip_min": 0.5, "clip_max": None})
    w = np.exp(LOG_W if mode.startswith("token") else of_rows(LOG_W))
    assert w.max() > 1.4
    expected = np.where(w < 0.5, 0.0, w) if mode.endswith("mask") else np.maximum(w, 0.5)
    found, _ = off_policy.corrected(tokens(), settings)
    assert found.weights_N is not None
    assert found.weights_N.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


def test_sequences_much_less_likely_now_lose_their_negative_advantages() -> None:
    """Equation 9 of DeepSeek-V3.2, by numpy; the KL divergence is that to the policy that sampled, not the proximal."""
    means = of_rows(-LOG_W) / np.array(LENGTHS)[ROW_OF]
    threshold = float(np.sort(np.unique(means))[1:].mean())
    advantages = np.array([-1.0, 2.0, 0.0, -1.0, -2.0, -1.0, 3.0, -1.0])
    given = tokens()._replace(advantages_N=torch.tensor(advantages))
    found, sums = off_policy.masked(given, threshold)
    is_masked = (means > threshold) & (advantages < 0)
    assert 0 < is_masked.sum() < (advantages < 0).sum()
    assert found.advantages_N.tolist() == np.where(is_masked, 0.0, advantages).tolist()
    assert off_policy.metrics({name: float(value) for name, value in sums.items()}, 8) == {
        "off_policy/masked": is_masked.mean()
    }
    both = GrpoSettings(off_policy_mask_threshold=threshold, off_policy=OffPolicySettings())
    applied, sums = off_policy.applied(given, both)
    assert applied.advantages_N.tolist() == found.advantages_N.tolist()
    assert {"off_policy/masked", "off_policy/w"} <= sums.keys()


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_sequences_that_are_too_far_off_are_rejected_whole(estimate: Any) -> None:
    values = {"k1": -LOG_W, "k2": LOG_W**2 / 2, "k3": np.exp(LOG_W) - 1 - LOG_W}[estimate]
    means = of_rows(values) / np.array(LENGTHS)[ROW_OF]
    above = float(np.sort(np.unique(means))[1:].mean() / 2 + np.sort(np.unique(means))[0] / 2)
    settings = OffPolicySettings(level="token", mode="truncate", reject=estimate, reject_above=max(above, 1e-6))
    found, sums = off_policy.corrected(tokens(torch.full((8,), 2.0, dtype=torch.float64)), settings)
    is_rejected = means > settings.reject_above
    assert found.weights_N is not None
    expected = np.where(is_rejected, 0, 2 * np.minimum(np.exp(LOG_W), 3.0))
    assert found.weights_N.tolist() == pytest.approx(expected.tolist())
    assert float(sums["off_policy/rejected"]) == is_rejected.sum()


def test_nothing_is_corrected_between_equal_policies() -> None:
    same = tokens()._replace(proximal_N=torch.tensor(BEHAVIOUR))
    found, sums = off_policy.corrected(same, OffPolicySettings())
    assert found.weights_N is not None
    assert found.weights_N.tolist() == [1.0] * 8
    metrics = off_policy.metrics({name: float(value) for name, value in sums.items()}, 8)
    assert (metrics["off_policy/ess"], metrics["off_policy/chi2"], metrics["off_policy/kl"]) == (1, 0, 0)


def test_the_proximal_policy_is_needed_and_bounds_are_in_order() -> None:
    assert GrpoSettings(off_policy=OffPolicySettings()).needs.proximal
    assert not GrpoSettings().needs.proximal
    with pytest.raises(ValidationError, match="gspo has one ratio a sequence"):
        GspoSettings(off_policy=OffPolicySettings(level="token"))
    with pytest.raises(ValidationError, match="clip_min 3 is not below clip_max 2"):
        OffPolicySettings(clip_min=3, clip_max=2)


def test_engine_and_learner_are_compared_apart_from_drift() -> None:
    versions = np.array([5, 5, 4, 5, 3, -1, 4, 5])
    compared = tokens()._replace(versions_N=torch.tensor(versions))
    sums = off_policy.compared(compared, off_policy.aged_tokens(versions, LENGTHS, 5))
    metrics = off_policy.compared_metrics({k: float(v) for k, v in sums.items()})
    for prefix, chosen in (("mismatch", versions == 5), ("drift", (versions >= 0) & (versions != 5))):
        log_w = LOG_W[chosen]
        w = np.exp(log_w)
        assert metrics[f"{prefix}/kl"] == pytest.approx(-log_w.mean())
        assert metrics[f"{prefix}/kl_k3"] == pytest.approx((w - 1 - log_w).mean())
        assert metrics[f"{prefix}/ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
        assert metrics[f"{prefix}/chi2"] == pytest.approx((w**2).mean() - 1)
    own = [-LOG_W[(row == ROW_OF) & (versions == 5)].mean() for row in (0, 1, 2)]
    assert metrics["mismatch/log_ppl_diff"] == pytest.approx(np.mean(own))
    assert metrics["drift/tokens"] == pytest.approx(3 / 7)
    assert metrics["drift/versions"] == pytest.approx((1 + 2 + 1) / 7)


def log_ppl_diff(versions: np.ndarray, revision: int) -> float | None:
    compared = tokens()._replace(versions_N=torch.tensor(versions), revision=revision)
    sums = off_policy.compared(compared, off_policy.aged_tokens(versions, LENGTHS, 5))
    return off_policy.compared_metrics({k: float(v) for k, v in sums.items()}).get("mismatch/log_ppl_diff")


def test_old_tokens_do_not_count_as_a_mismatch_of_engine_and_learner() -> None:
    by_row = [-LOG_W[row == ROW_OF].mean() for row in range(3)]
    drifted = np.where(ROW_OF == 0, 5, 4)
    assert log_ppl_diff(drifted, 10) == pytest.approx(by_row[0])
    assert log_ppl_diff(np.full(8, 4), 10) is None
    assert log_ppl_diff(np.full(8, 5), 10) == log_ppl_diff(drifted, 9) == pytest.approx(np.mean(by_row))


def test_nothing_compared_gives_no_metric_and_one_kind_of_tokens_only_its_own() -> None:
    assert off_policy.compared_metrics({}) == {}
    new = tokens()._replace(versions_N=torch.full((8,), 2))
    sums = off_policy.compared(new, off_policy.aged_tokens(np.full(8, 2), LENGTHS, 2))
    found = off_policy.compared_metrics({k: float(v) for k, v in sums.items()})
    assert found["drift/tokens"] == found["drift/versions"] == 0.0
    assert "drift/kl" not in found


def test_tokens_of_another_model_group_are_of_other_weights_and_have_no_age() -> None:
    """As all tokens of a what-if: version 5 of the recorded run is not version 5 of the what-if."""
    spans = tuple(VersionSpan(model_group=group, version=version, length=2) for group, version in GROUPS)
    completions = (Completion(start=1, length=8, step_index=0, spans=spans),)
    row = Row(np.arange(9, dtype=np.int32), np.arange(9) > 0, np.zeros(9, np.float32), 0, completions)
    assert row.versions[1:].tolist() == [5, 5, 5, 5, 4, 4, 4, 4]
    versions = replace(row, model_group="w/m").versions[1:]
    assert versions.tolist() == [-2, -2, 5, 5, 4, 4, -2, -2]
    sums = off_policy.compared(
        tokens()._replace(versions_N=torch.tensor(versions)), off_policy.aged_tokens(versions, LENGTHS, 5)
    )
    metrics = off_policy.compared_metrics({k: float(v) for k, v in sums.items()})
    assert metrics["mismatch/kl"] == pytest.approx(-LOG_W[2:4].mean())
    assert metrics["drift/kl"] == pytest.approx(-LOG_W[[0, 1, 4, 5, 6, 7]].mean())
    assert metrics["drift/tokens"] == pytest.approx(6 / 8)
    assert metrics["drift/versions"] == pytest.approx(2 / 8)
    assert sum(off_policy.ages([(versions, np.array([True] * 8))], 5).values()) == 4


def test_tokens_are_counted_by_how_many_versions_old_they_are() -> None:
    versions = [np.array([20, 20, 19, 18, 17, -1, 16]), np.array([15, 12, 11, 4, 3, 0, 21])]
    masks = [np.array([True] * 6 + [False]), np.array([True] * 7)]
    assert off_policy.ages(zip(versions, masks, strict=True), 20) == {
        "staleness/tokens_0": 3.0,
        "staleness/tokens_1": 1.0,
        "staleness/tokens_2": 1.0,
        "staleness/tokens_3_4": 1.0,
        "staleness/tokens_5_8": 2.0,
        "staleness/tokens_9_16": 2.0,
        "staleness/tokens_17_up": 2.0,
    }
    assert sum(off_policy.ages([], 20).values()) == 0
