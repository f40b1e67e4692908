"""Revisions of recorded settings: the rules that each brought, and the revision that each rule begins with.

A job, a plan and a group record a `revision` and keep its rules: a recorded one is resumed, verified and trained again
by them. New ones have the newest. A new rule is a sentence of a table, a constant `..._SINCE`, and one more value of
the field's Literal (`JobSettings`, `PlanSettings`, `GroupStarted`).
"""

from collections.abc import Mapping
from typing import Literal

JOB_REVISIONS: Mapping[int, str] = {
    2: "Dropout is off where a ratio or a log-ratio is computed, and linear and cosine schedules reach "
    "`final_fraction` after the last step, so that the last step trains.",
    3: "Hidden states are gathered before the head and the head is applied to a chunk of tokens at a time, which sums "
    "in another order.",
    4: "What rows have in common at their beginning is computed once, rows are not padded, and the size of a "
    "micro-batch goes by the device.",
    5: "Steps record how far engine and learner are apart.",
    6: "Log-probabilities under a reference are events (ReferenceScored).",
    7: "Metrics of pairs are means over those that were trained.",
    8: "A GPU may compute by fused kernels.",
    9: "Steps record how many tokens are how many versions old.",
    10: "`max_rl` fails at a negative reward, `aggregation: constant` divides by the rows of each mini-batch, "
    "`reinforce_pp` normalises over trained tokens alone, log-ratios to a teacher are bounded on both sides, and two "
    "metrics count other tokens (`clip/divergence` of dppo, `mismatch/log_ppl_diff`).",
    11: "Each token's log-ratio of the policy that sampled to the reference is bounded on both sides (the KL penalty "
    "of `reinforce_pp`, the sampled reference point of `kto`).",
    12: "Rewards of steps are discounted by the agent's own steps in between (before, also by those of tools and of "
    "other agents), and on a CPU, query heads read the keys and values that they share in place, which sums their "
    "gradients in another order.",
    13: "The versions of another model group, as in a what-if, are not compared with that of the weights.",
    14: "Rows of pairs name the member that gave the answer (before, the batch's first), and advantages and weights "
    "that float32 does not hold fail the job (before, their steps were skipped).",
    15: "Rollouts of weight 0 count in the mean of `expert_iteration`, the learning-rate schedule of a retried "
    "fine-tuning job goes on (before, it began again), a reward above `MAX_REWARD_SUM` fails the job, and the KL "
    "penalty of `reinforce_pp` is summed over a rollout (before, over a row).",
    16: "The ratio that weighs the estimate of `unbiased_kl` is bounded, and an off-policy correction weighs the "
    "entropy bonus of `mix`, too.",
}
"""Rules by which the learner trains, by the `JobSettings.revision` that they begin with."""
PLAN_REVISIONS: Mapping[int, str] = {
    2: "A group smaller than `min_generations` is viable if all of it is complete; of an epoch's validations the one "
    "whose group closed last is judged, by all its groups; a refill asks for an example twice only where there is no "
    "other.",
    3: "Manifests count the rollbacks before them, and schedule and percentage none; the gate counts rewards without "
    "sampled tokens.",
    4: "The curriculum compares by agent.",
    5: "A refill replaces groups that a rollback made stale, too.",
}
"""Rules of planning, by the `PlanSettings.revision` that they begin with."""
GROUP_REVISIONS: Mapping[int, str] = {
    2: "Trajectories name the finish reasons of their completions, and outcomes the stop reasons of their attempts.",
    3: "Several answers to one request are dead branches together, but for those that a later call goes on from or "
    "uses; or all are alive.",
}
"""Rules of assembly, by the `GroupStarted.revision` that they begin with."""

NEWEST_REVISION: Literal[16] = 16
"""Value of `JobSettings.revision` in new jobs."""
NEWEST_PLAN_REVISION: Literal[5] = 5
"""Value of `PlanSettings.revision` in new plans."""
NEWEST_GROUP_REVISION: Literal[3] = 3
"""Value of `GroupStarted.revision` in new groups."""

# ---- jobs ----

RATIOS_WITHOUT_DROPOUT_SINCE = 2
"""Dropout is off where a ratio or a log-ratio is computed."""
LAST_STEP_TRAINS_SINCE = 2
"""Schedules reach their final fraction after the last step."""
SELECTS_LOGPROBS_SINCE = 3
"""Hidden states are gathered before the head."""
SHARES_PREFIXES_SINCE = 4
"""Rows that begin alike are computed as a prefix tree."""
SIZES_BY_DEVICE_SINCE = 4
"""The size of a micro-batch goes by the device."""
COMPARES_SINCE = 5
"""The policy is compared with those that sampled: metrics of a step are a part of its record."""
SCORES_SINCE = 6
"""Log-probabilities under a reference are events."""
COUNTS_PAIRS_SINCE = 7
"""A batch's metrics are means over the pairs that were trained, not those of skipped steps."""
FUSES_KERNELS_SINCE = 8
"""A GPU may compute by fused kernels."""
COUNTS_AGES_SINCE = 9
"""A step records how old its tokens are."""
CHECKS_NEGATIVE_SINCE = 10
"""A negative reward fails the job where the estimator divides by a mean."""
CONSTANT_BY_MINI_BATCH_SINCE = 10
"""`aggregation: constant` divides by the rows of each mini-batch."""
NORMALISES_TRAINED_SINCE = 10
"""`reinforce_pp` normalises over trained tokens alone."""
BOUNDS_TARGETS_SINCE = 10
"""Log-ratios to a teacher have a lower bound too."""
MASKS_ADVANTAGES_SINCE = 10
"""`clip/divergence` of dppo counts tokens with an advantage alone."""
COMPARES_OWN_SINCE = 10
"""`mismatch/log_ppl_diff` counts tokens that the trained version sampled alone."""
BOUNDS_RECORDED_SINCE = 11
"""Recorded log-ratios to the reference are bounded by token."""
OWN_STEPS_SINCE = 12
"""A discount counts a member's own steps alone."""
SHARES_KEYS_SINCE = 12
"""A CPU attends to shared keys and values in place."""
OWN_VERSIONS_SINCE = 13
"""Only versions of the model group that is trained have an age."""
PAIRS_HAVE_MEMBERS_SINCE = 14
"""Rows of pairs name the member that gave the answer."""
CHECKS_PREPARED_SINCE = 14
"""Advantages and weights that float32 does not hold fail the job."""
COUNTS_WEIGHT_0_SINCE = 15
"""Rollouts of weight 0 count in the mean over all tokens."""
RETRIES_GO_ON_SINCE = 15
"""A retry goes on with the learning-rate schedule of the attempts before it."""
CHECKS_REWARDS_SINCE = 15
"""A reward that is too large fails the job with the name of its rollout."""
SUMS_ROLLOUTS_SINCE = 15
"""A KL penalty is summed over all rows of a rollout."""
BOUNDS_KL_RATIOS_SINCE = 16
"""The ratio that weighs an unbiased estimate of KL has a bound."""
WEIGHS_ENTROPY_SINCE = 16
"""An off-policy correction weighs the entropy bonus of `mix`."""

# ---- plans ----

SMALL_GROUPS_SINCE = 2
"""A group smaller than `min_generations` is viable if all of it is complete."""
JUDGES_NEWEST_SINCE = 2
"""The one of an epoch's validations whose group closed last is judged, by all its groups."""
REFILLS_OTHERS_SINCE = 2
"""A refill asks for an example twice only where there is no other."""
COUNTS_ADOPTED_SINCE = 3
"""Manifests count the rollbacks before them."""
JUDGES_ALL_SINCE = 3
"""Rewards of trajectories without a sampled token are counted by the gate."""
JUDGES_AGENTS_SINCE = 4
"""The curriculum compares rewards of the same agent."""
REPLACES_STALE_SINCE = 5
"""A refill replaces groups that a rollback made stale, too."""

# ---- groups ----

FINISH_REASONS_SINCE = 2
"""Trajectories name the finish reasons of their completions."""
STOP_REASONS_SINCE = 2
"""Outcomes name the stop reasons of their attempts."""
ANSWERS_SINCE = 3
"""Several answers to one request are discarded, or kept, together."""
