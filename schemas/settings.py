"""Resolved settings that events carry: what a rollout, a plan or a job is to do. Values only, no secrets."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator

from rollstream.schemas.base import added


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys forbidden, and no infinite number, which an event cannot carry."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Sampling(Settings):
    """How tokens are drawn."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 means no limit. Recorded log-probabilities are those of what top_p and top_k leave, renormalised; losses
    with an importance ratio compare them with the whole distribution's."""
    max_new_tokens: int = Field(default=64, ge=1)


class RolloutSettings(Settings):
    """All that a producer needs to run a task, beside the task's own inputs."""

    environment: str
    """A registered name, or `python:module.function`."""
    environment_config: dict[str, JsonValue] = Field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    """Registered reward functions, run after the environment's own rewards."""
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weight by reward name; a reward that is not named counts 1."""
    agents: dict[str, str] = Field(default_factory=dict)
    """Model group by agent name."""
    sampling: Sampling = Field(default_factory=Sampling)
    max_turns: int = Field(default=16, ge=1)
    max_attempts: int = Field(default=3, ge=1)
    rollout_timeout_s: float = Field(default=120.0, gt=0)
    group_timeout_s: float = Field(default=600.0, gt=0)
    policy: Literal["model", "demonstration"] = "model"
    """`demonstration` plays the environment's own demonstrator (data for SFT)."""
    evaluators: dict[str, dict[str, JsonValue]] = added({})
    """Configurations of those `rewards` that are evaluators, by name, as written (`${ENV}` not expanded)."""
    missing_score: Literal["error", "reject", "unneeded"] = added("error")
    """A rollout without a score fails (error), is rejected as `no_score`, or is used all the same (unneeded)."""


class CurriculumSettings(Settings):
    """The curriculum over the windowed reward store; the first six as in NAT."""

    enabled: bool = False
    initial_percentile: float = Field(default=0.3, gt=0, le=1)
    increment_percentile: float = Field(default=0.2, gt=0, le=1)
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs between two expansions."""
    min_reward_diff: float = Field(default=0.1, ge=0)
    sort_ascending: bool = False
    random_subsample: float | None = Field(default=None, gt=0, le=1)
    window_versions: int = Field(default=50, ge=1)
    """Rewards older than so many versions leave the window."""
    explore_share: float = Field(default=0.05, ge=0, le=1)
    """Share of an epoch's tasks drawn from excluded examples."""
    steer: bool = True
    """Choose what is rolled out next; off: roll out all and filter afterwards."""
    seeded_subsample: bool = added(True)
    """Draw `random_subsample` by seeds that derive from the run; off: by chance, as NAT does (classic mode only)."""
    filter_single_group: bool = added(True)
    """Hold a group that is alone in its epoch to `min_reward_diff` too; off: pass it, as NAT does."""
    groups_by_example: bool = added(True)
    """Tell included groups by their example ids; off: by their places in the collection, as NAT does."""


class PlanSettings(Settings):
    """How a job's epochs become tasks and batches."""

    planning: Literal["stream", "submitted"] = "stream"
    num_epochs: int = Field(default=1, ge=1)
    tasks_per_epoch: int = Field(default=8, ge=1)
    batches_per_epoch: int = Field(default=1, ge=1)
    num_generations: int = Field(default=8, ge=1)
    min_generations: int = Field(default=2, ge=1)
    """A group with fewer complete members is not viable."""
    max_staleness: int = Field(default=0, ge=0)
    drop_zero_variance: bool = True
    needs_logprobs: bool = added(True)
    """Reject trajectories without log-probabilities of the behaviour policy."""
    curriculum: CurriculumSettings = Field(default_factory=CurriculumSettings)
    knows_single_group: bool = added(False)
    """Whether `curriculum.filter_single_group` counts; a plan that was recorded without it passes a single group."""


class LoraSettings(Settings):
    """Low-rank adapters (peft)."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")


class ModelSettings(Settings):
    """The base model and how it is held."""

    path: str
    """A transformers folder or a hub name."""
    lora: LoraSettings | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on the CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-5, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """What is left of the learning rate at the job's last version."""


class AlgorithmSettings(Settings):
    """The loss and its numbers."""

    name: Literal["grpo", "sft", "dpo"] = "grpo"
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.28, gt=0)
    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std", "batch_mean"] = "group_std"
    """group_*, leave_one_out: compared with the rollouts of the same task; batch_*: with all of the batch, so that one
    rollout a task is enough.
    """
    step_rewards: Literal["total", "process"] = added("total")
    """total: one advantage for all tokens of a member, from the sum of its rewards; process: process supervision, in
    which a token answers for the rewards of its own step and of those after it. Groups of equal sums are left out of
    batches all the same, unless `drop_zero_variance` is off.
    """
    entropy_coefficient: float = Field(default=0.0, ge=0)
    kl_coefficient: float = added(0.0, ge=0)
    """grpo: weight of the KL divergence from the job's base version; 0 keeps no copy of that."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps a batch."""
    max_tokens_per_micro_batch: int = Field(default=16384, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    """Of the behaviour policy, so that ratios compare equal distributions."""
    beta: float = added(0.1, gt=0)
    """dpo: how much a log-ratio to the reference counts; the larger, the nearer the policy stays to it."""
    exhaustive_pairs: bool = added(True)
    """dpo: every two answers to a prompt whose scores differ are a pair; else only the best with the worst."""
    min_score_diff: float = added(0.0, ge=0)
    """dpo: a smaller difference of scores makes no pair; equal scores never do."""
    max_pairs_per_turn: int | None = added(None, ge=1)
    """dpo: of one prompt, so many pairs with the largest differences."""
    sft_weight: float = added(0.0, ge=0)
    """dpo: weight of the chosen answer's mean negative log-likelihood in the loss."""
    average_logprobs: bool = added(False)
    """dpo: an answer's log-probability is the mean over its tokens instead of their sum."""

    @model_validator(mode="after")
    def _estimator_fits_steps(self) -> "AlgorithmSettings":
        if self.step_rewards == "process" and self.advantage == "leave_one_out":
            raise ValueError(
                "advantage leave_one_out compares members, not steps; use group_std or group_mean with "
                "step_rewards process"
            )
        return self


class JobSettings(Settings):
    """All that a learner needs for one job."""

    kind: Literal["rl", "sft", "dpo"]
    model: ModelSettings
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    num_versions: int = Field(default=1, ge=1)
    """Versions that the job yields at most; the schedule ends there."""
    checkpoint_every: int = Field(default=1, ge=1)
    keep_last: int = Field(default=8, ge=1)
    keep_every: int = Field(default=50, ge=1)
    seed: int = 0
    threads: int | None = Field(default=None, ge=1)
    """Fixed number of CPU threads; part of what makes a replay equal."""


class ArtifactRef(Settings):
    """An immutable artifact: where it lies and what its bytes must hash to."""

    uri: str
    sha256: str
    size_bytes: int = Field(ge=0)
