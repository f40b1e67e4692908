"""The rows of `benchmarks.trl_parity`: our settings, and the function of TRL that they are compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.trl_losses import (
    MAX_COMPLETION,
    THRESHOLD,
    Found,
    Inputs,
    dpo,
    grpo,
    iw_opd,
    kto,
    rloo,
    sft,
)
from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.algorithms import (
    CispoSettings,
    DpoSettings,
    GrpoSettings,
    GspoSettings,
    KtoSettings,
    OpdSettings,
    SapoSettings,
    SftSettings,
    VespoSettings,
)
from rollstream.schemas.policy_gradient import OffPolicySettings

MASK_THRESHOLD = 0.05
"""Threshold of off-policy sequence masking: some answers of negative advantage are above it, and some below."""


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    settings: AlgorithmSettings
    function: str
    theirs: Callable[[Inputs], Found]
    options: str = ""
    on_policy: bool = False
    """The policy sampled the batch itself: its behaviour log-probabilities are the current ones."""
    loss_counts: bool = True
    differs: str = ""
    pairs: bool = False


BOUNDS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
TRL_BOUNDS: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
PLAIN_KL: dict[str, Any] = {"beta": 0.04, "use_bias_correction_kl": False}


def corrections() -> list[Case]:
    """Off-policy correction, in TRL's modes."""
    found: list[Case] = []
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            for low, high in ((None, 1.5), (0.5, 1.2), (0.8, None)):
                named = {"mode": f"{level}_{mode}", "clip_min": low, "clip_max": high}
                off = OffPolicySettings.model_validate(named)
                options = {
                    "vllm_importance_sampling_mode": f"{level}_{mode}",
                    "vllm_importance_sampling_clip_min": low,
                    "vllm_importance_sampling_clip_max": high,
                }
                name = f"off_policy {level}, {mode}, {low} to {high}"
                theirs = grpo(vllm=True, loss_type="dapo", **TRL_BOUNDS, **options)
                found.append(Case(GrpoSettings(**BOUNDS, off_policy=off), "GRPOTrainer dapo", theirs, name))
    off = OffPolicySettings(level="token", mode="truncate", clip_max=3.0)
    named = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 3.0}
    theirs = grpo(vllm=True, loss_type="bnpo", **PLAIN_KL, **TRL_BOUNDS, **named)
    kl = GrpoSettings(**BOUNDS, off_policy=off, kl_coefficient=0.04)
    why = "the correction weighs our KL penalty too, which old tokens are sampled by; TRL adds it unweighted"
    found.append(Case(kl, "GRPOTrainer bnpo", theirs, "off_policy and KL penalty", differs=why))
    theirs = grpo(vllm=True, loss_type="vespo", **named)
    why = "TRL takes the correction into the sequence's ratio; ours weighs tokens, as with every other loss"
    found.append(Case(VespoSettings(off_policy=off), "GRPOTrainer vespo", theirs, "off_policy", differs=why))
    return found


def masks() -> list[Case]:
    """Off-policy sequence masking, alone and beside what else counts."""
    key: dict[str, Any] = {"off_policy_mask_threshold": MASK_THRESHOLD}
    off = OffPolicySettings(level="token", mode="truncate", clip_max=1.5)
    named = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5}
    sequence: dict[str, Any] = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
    wide: dict[str, Any] = {"epsilon": 0.9, "epsilon_high": 0.9}
    own_wide: dict[str, Any] = {"clip_low": 0.9, "clip_high": 0.9}
    name = "off_policy_mask_threshold"
    return [
        Case(GrpoSettings(**own_wide, **key), "GRPOTrainer dapo, masked", grpo(loss_type="dapo", **wide, **key), name),
        Case(GrpoSettings(**own_wide, **key, kl_coefficient=0.04), "GRPOTrainer bnpo, masked, beta",
             grpo(loss_type="bnpo", **PLAIN_KL, **wide, **key), f"{name}, KL penalty"),
        Case(GrpoSettings(**own_wide, **key, off_policy=off), "GRPOTrainer dapo, masked, token_truncate",
             grpo(vllm=True, loss_type="dapo", **wide, **key, **named), f"{name}, off_policy"),
        Case(GspoSettings(**own_wide, **key), "GRPOTrainer grpo, masked, sequence",
             grpo(**wide, **key, **sequence), name),
        Case(CispoSettings(clip_high=0.2, **key), "GRPOTrainer cispo, masked",
             grpo(loss_type="cispo", epsilon_high=1.2, **key), name),
        Case(SapoSettings(**key), "GRPOTrainer sapo, masked", grpo(loss_type="sapo", **key), name),
        Case(VespoSettings(**key), "GRPOTrainer vespo, masked", grpo(loss_type="vespo", **key), name),
    ]  # fmt: skip


def ratios() -> list[Case]:
    """Losses by importance ratios."""
    bnpo = grpo(loss_type="bnpo", **TRL_BOUNDS)
    sequence: dict[str, Any] = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
    dr_grpo = {"advantage": "group_mean", "aggregation": "constant", "aggregation_length": MAX_COMPLETION}
    masked = "TRL's divisor counts sequences that are left out; ours does not"
    cispo_trl = grpo(loss_type="cispo", epsilon_high=1.2)
    return [
        Case(GrpoSettings(**BOUNDS, aggregation="sequences"), "GRPOTrainer grpo", grpo(loss_type="grpo", **TRL_BOUNDS),
             "aggregation sequences"),
        Case(GrpoSettings(**BOUNDS), "GRPOTrainer bnpo", bnpo, "aggregation tokens"),
        Case(GrpoSettings(**BOUNDS), "GRPOTrainer dapo", grpo(loss_type="dapo", **TRL_BOUNDS), "aggregation tokens"),
        Case(GrpoSettings(**BOUNDS, **dr_grpo), "GRPOTrainer dr_grpo",
             grpo(loss_type="dr_grpo", scale_rewards="none", **TRL_BOUNDS), "group_mean, aggregation constant"),
        Case(GrpoSettings(**BOUNDS, dual_clip=1.4), "GRPOTrainer bnpo, delta",
             grpo(loss_type="bnpo", delta=1.4, **TRL_BOUNDS), "dual_clip 1.4"),
        Case(GrpoSettings(**BOUNDS, kl_coefficient=0.04), "GRPOTrainer bnpo, beta",
             grpo(loss_type="bnpo", **PLAIN_KL, **TRL_BOUNDS), "KL penalty"),
        Case(GrpoSettings(**BOUNDS, kl_coefficient=0.04, unbiased_kl=True), "GRPOTrainer bnpo, use_bias_correction_kl",
             grpo(loss_type="bnpo", beta=0.04, use_bias_correction_kl=True, **TRL_BOUNDS), "unbiased_kl"),
        Case(GspoSettings(clip_low=0.05, clip_high=0.08, kl_coefficient=0.04), "GRPOTrainer grpo, sequence, beta",
             grpo(epsilon=0.05, epsilon_high=0.08, **PLAIN_KL, **sequence), "KL penalty"),
        Case(CispoSettings(clip_high=0.2, kl_coefficient=0.04), "GRPOTrainer cispo, beta",
             grpo(loss_type="cispo", epsilon_high=1.2, **PLAIN_KL), "KL penalty"),
        Case(SapoSettings(kl_coefficient=0.04), "GRPOTrainer sapo, beta",
             grpo(loss_type="sapo", **PLAIN_KL), "KL penalty"),
        Case(VespoSettings(kl_coefficient=0.04), "GRPOTrainer vespo, beta",
             grpo(loss_type="vespo", **PLAIN_KL), "KL penalty"),
        Case(GrpoSettings(**BOUNDS, entropy_coefficient=0.01), "GRPOTrainer bnpo, entropy_coef",
             grpo(loss_type="bnpo", entropy_coef=0.01, **TRL_BOUNDS), "entropy bonus"),
        Case(GrpoSettings(**BOUNDS, mask_truncated=True), "GRPOTrainer dapo, mask_truncated_completions",
             grpo(loss_type="dapo", mask_truncated_completions=True, **TRL_BOUNDS), "mask_truncated"),
        Case(GrpoSettings(**BOUNDS, mask_truncated=True, aggregation="sequences"),
             "GRPOTrainer grpo, mask_truncated_completions",
             grpo(loss_type="grpo", mask_truncated_completions=True, **TRL_BOUNDS),
             "mask_truncated, aggregation sequences", differs=masked),
        Case(GrpoSettings(**BOUNDS, advantage="gdpo", reward_weights={"a": 1000.0, "b": 2000.0}),
             "GRPOTrainer bnpo, normalize_then_sum",
             grpo(loss_type="bnpo", multi_objective_aggregation="normalize_then_sum", **TRL_BOUNDS), "gdpo"),
        Case(GrpoSettings(**BOUNDS, advantage="leave_one_out", aggregation="constant", aggregation_length=1),
             "RLOOTrainer", rloo, "leave_one_out, constant 1; gradient alone", on_policy=True, loss_counts=False),
        Case(GspoSettings(clip_low=0.05, clip_high=0.08), "GRPOTrainer grpo, importance_sampling_level sequence",
             grpo(epsilon=0.05, epsilon_high=0.08, **sequence)),
        Case(CispoSettings(clip_high=0.2), "GRPOTrainer cispo, epsilon_high 1.2", cispo_trl, "clip_high 0.2"),
        Case(SapoSettings(), "GRPOTrainer sapo", grpo(loss_type="sapo")),
        Case(VespoSettings(), "GRPOTrainer vespo", grpo(loss_type="vespo")),
    ]  # fmt: skip


def imitations() -> list[Case]:
    """Losses without ratios, or against a reference."""
    smoothed = "TRL's robust DPO takes the share of wrong pairs off and rescales; ours is conservative DPO"
    by_tokens = "TRL's mean is over the tokens of all chosen answers; ours over pairs, of the means of each"
    mixed: dict[str, Any] = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    good: dict[str, Any] = {"reward_threshold": THRESHOLD, "beta": 0.1}
    return [
        Case(SftSettings(), "SFTTrainer", sft),
        Case(DpoSettings(), "DPOTrainer sigmoid", dpo(loss_type=["sigmoid"]), pairs=True),
        Case(DpoSettings(average_logprobs=True), "DPOTrainer sigmoid_norm", dpo(loss_type=["sigmoid_norm"]),
             "average_logprobs", pairs=True),
        Case(DpoSettings(loss_type="ipo", average_logprobs=True), "DPOTrainer ipo", dpo(loss_type=["ipo"]),
             "ipo, average_logprobs", pairs=True),
        Case(DpoSettings(label_smoothing=0.2), "DPOTrainer aot, one pair a batch",
             dpo(loss_type=["aot"], label_smoothing=0.2, one_by_one=True), "label_smoothing 0.2", pairs=True),
        Case(DpoSettings(label_smoothing=0.2), "DPOTrainer robust", dpo(loss_type=["robust"], label_smoothing=0.2),
             "label_smoothing 0.2", pairs=True, differs=smoothed),
        Case(DpoSettings(sft_weight=0.5), "DPOTrainer sigmoid and sft, one pair a batch",
             dpo(one_by_one=True, **mixed), "sft_weight 0.5", pairs=True),
        Case(DpoSettings(sft_weight=0.5), "DPOTrainer sigmoid and sft", dpo(**mixed), "sft_weight 0.5", pairs=True,
             differs=by_tokens),
        Case(KtoSettings(**good, desirable_weight=1.5), "KTOTrainer apo_zero_unpaired",
             kto(loss_type="apo_zero_unpaired", desirable_weight=1.5), "reference_point zero"),
        Case(KtoSettings(**good, reference_point="sampled"), "KTOTrainer kto, its KL batch the rollouts themselves",
             kto(loss_type="kto"), "reference_point sampled", on_policy=True),
        Case(OpdSettings(teacher="reference"), "IWOPDTrainer, iw_opd_gamma 0", iw_opd, on_policy=True),
    ]  # fmt: skip
