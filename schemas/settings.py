"""Resolved settings that events carry: what a rollout, a plan or a job is to do. Values only, no secrets."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Discriminator, Field, FiniteFloat, JsonValue, Tag, model_validator

from rollstream.schemas import ids
from rollstream.schemas.algorithms import Algorithm, GrpoSettings
from rollstream.schemas.base import Settings, added
from rollstream.schemas.league import LeagueSettings, OpponentVersions
from rollstream.schemas.revisions import NEWEST_PLAN_REVISION, SMALL_GROUPS_SINCE

EXTERNAL: Literal["external"] = "external"
"""Kind of a job, and policy of its rollouts, that another training backend trains."""
MAX_TIMEOUT_S = 365 * 86_400.0
MAX_SESSION_S = 2_147_483.0
"""Largest session time-out of a consumer group that Kafka's protocol holds; brokers take 1800 unless set otherwise."""
FROZEN: Literal["frozen"] = "frozen"
"""Kind of a job that publishes the weights of a model group that is not trained."""
OTHERS = "*"
"""Key of `reward_weights`: the weight of every reward that is not named there."""

MAX_TASKS = 100_000
MAX_REFILLS = 100
"""Maximum for one epoch. A record with a higher count becomes a dead letter, so that no single record blocks a process.
"""
MAX_MEMBERS = 4096
"""Maximum number of members of a group."""
MAX_REWARD_SUM = 1e150
"""Largest absolute sum of an agent\'s weighted rewards: sums of squares over rollouts are finite."""


def _checked_device(written: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", written):
        raise ValueError(f"{written!r} is not a device; write auto, cpu, cuda or cuda:N")
    return written


FlashAttention = Literal["FA2", "FA3", "FA4"]
Device = Annotated[str, AfterValidator(_checked_device)]
"""`cpu`, `cuda:N`, `cuda` for cuda:0, or `auto`: cuda:0 if there is a GPU, else cpu."""


class Sampling(Settings):
    """Settings for the sampling of tokens."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 means no limit. Recorded log-probabilities are those of what top_p and top_k leave, renormalised."""
    max_new_tokens: int = Field(default=64, ge=1)
    record_kept_ids: bool | None = added(None)
    """Record with each token the ids that top_p and top_k left, so that a loss with importance ratios is computed over
    these alone. None, in a configuration: if the loss has such ratios."""


class RolloutSettings(Settings):
    """All that a producer needs to run a task, beside the task's own inputs."""

    environment: str
    """A registered name, or `python:module.function`."""
    environment_config: dict[str, JsonValue] = Field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    """Registered reward functions, run after the environment's own rewards."""
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weight by reward name; one that is not named has the weight of `*` (`OTHERS`), which is 1 where that is not."""
    agents: dict[str, str] = Field(default_factory=dict)
    """Model group by agent name."""
    sampling: Sampling = Field(default_factory=Sampling)
    max_turns: int = Field(default=16, ge=1)
    max_attempts: int = Field(default=3, ge=1)
    rollout_timeout_s: float = Field(default=120.0, gt=0, le=MAX_TIMEOUT_S)
    group_timeout_s: float = Field(default=600.0, gt=0, le=MAX_TIMEOUT_S)
    policy: Literal["model", "demonstration", "external"] = "model"
    """`demonstration` plays the environment's own demonstrator (data for SFT). With `external` the model is another
    training backend's: neither its weights nor its tokenizer are here."""
    evaluators: dict[str, dict[str, JsonValue]] = added({})
    """Configurations of those `rewards` that are evaluators, by name, as written (`${ENV}` not expanded)."""
    missing_score: Literal["error", "reject", "unneeded"] = added("error")
    """A rollout without a score fails (error), is rejected as `no_score`, or is used all the same (unneeded)."""
    league: LeagueSettings | None = added(None)
    """Opponents of the newest weights; None: they play every agent."""
    responses_per_step: int = added(1, ge=1)
    """Answers that are sampled to each prompt: above 1 the rollouts of a task are the branches of a tree."""
    drop_dead_branches: bool = added(False)
    """Leave out answers that no later prompt of their agent goes on from, unless they are its last one."""
    renderer: str = added("auto", min_length=1)
    """Renderer for calls with tools: `auto` (as the model's chat template writes), `none`, or a family's name."""
    frozen_agents: tuple[str, ...] = added(())
    """Agents whose model groups are not trained; they need no reward."""
    algorithm_weights: tuple[dict[str, FiniteFloat], ...] = added(())
    """Reward weights of each algorithm that has its own: a reward that counts in one of them is a score."""


class CurriculumSettings(Settings):
    """The curriculum over the windowed reward store; the first seven as in NAT."""

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
    """Draw `random_subsample` with seeds derived from the run; off: unseeded, as in NAT (epochwise runs only)."""
    filter_single_group: bool = added(True)
    """Hold a group that is alone in its epoch to `min_reward_diff` too; off: pass it, as NAT does."""
    groups_by_example: bool = added(True)
    """Identify included groups by their example ids; off: by their positions in the collection, as NAT does."""


class GateSettings(Settings):
    """The evaluation gate: which validated versions are good. One that is not is replaced by the last good one."""

    min_reward: float | None = None
    """Mean reward of a validation that a good version reaches."""
    max_drop: float | None = Field(default=None, ge=0)
    """Maximum distance of a good version below the best validation so far."""

    @model_validator(mode="after")
    def _has_a_limit(self) -> "GateSettings":
        if self.min_reward is None and self.max_drop is None:
            raise ValueError("give min_reward, max_drop or both")
        return self


class PlanSettings(Settings):
    """Settings by which a job's epochs become tasks and batches."""

    planning: Literal["stream", "submitted"] = "stream"
    num_epochs: int = Field(default=1, ge=1)
    tasks_per_epoch: int = Field(default=8, ge=1, le=MAX_TASKS)
    batches_per_epoch: int = Field(default=1, ge=1)
    num_generations: int = Field(default=8, ge=1, le=MAX_MEMBERS)
    min_generations: int = Field(default=2, ge=1)
    """A group with fewer complete members is not viable."""
    max_staleness: int = Field(default=0, ge=0)
    drop_zero_variance: bool = True
    needs_logprobs: bool = added(True)
    """Reject trajectories without log-probabilities of the behaviour policy."""
    curriculum: CurriculumSettings = Field(default_factory=CurriculumSettings)
    tasks_of: str = added("")
    """Id of the job beside it that asks for the tasks of its epochs; this one trains its own agents' trajectories of
    them. Empty: it asks for its own."""
    knows_single_group: bool = added(False)
    """Whether `curriculum.filter_single_group` counts; a plan that was recorded without it passes a single group."""
    gate: GateSettings | None = added(None)
    """Judges the versions that are validated."""
    max_refills: int = added(0, ge=0, le=MAX_REFILLS)
    """Maximum number of requests, in an epoch of one batch, for tasks in place of groups that it cannot train on."""
    oversampling: int = added(0, ge=0, le=MAX_MEMBERS)
    """Rollouts of a task beyond `num_generations`; its group closes once `num_generations` are complete."""
    has_recorded_sizes: bool = added(False)
    """Whether a task asks for no more rollouts than its example's inputs hold recorded ones."""
    revision: Literal[1, 2, 3, 4, 5] = added(1)
    """Rules of planning (`PLAN_REVISIONS`); a recorded plan keeps its own."""

    def minimum_of(self, size: int) -> int:
        """Complete rollouts that a group of that size must have to be trained on: all of a small one."""
        minimum = min(self.min_generations, self.num_generations)
        return max(1, min(minimum, size)) if self.revision >= SMALL_GROUPS_SINCE else minimum


NEW_PLAN: Mapping[str, Any] = {"knows_single_group": True, "revision": NEWEST_PLAN_REVISION}
"""Fields of new plans by which they follow the newest rules."""


EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})
"""Names of the modules that may have one weight together."""


def has_embeddings(target_modules: Iterable[str]) -> bool:
    """Whether an adapter is on the embeddings or the head, of which peft keeps the base weights beside it."""
    return not EMBEDDINGS.isdisjoint(target_modules)


class LoraSettings(Settings):
    """Low-rank adapters (peft)."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of modules; all-linear: every linear layer but the head."""
    use_rslora: bool = added(False)
    """Scale by alpha / sqrt(rank) in place of alpha / rank (arXiv 2312.03732)."""
    use_dora: bool = added(False)
    """Train a magnitude for each output beside the direction (arXiv 2402.09353). vLLM does not serve it."""


class ModelSettings(Settings):
    """The base model and how it is held."""

    path: str
    """A transformers folder or a hub name."""
    lora: LoraSettings | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on the CPU."""
    device: Device = "auto"
    gradient_checkpointing: bool = added(False)
    """Compute a layer's activations again in the backward pass: less memory, about a third more time."""
    attn_implementation: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = added("auto")
    """Attention implementation by transformers' names; auto: transformers' choice. Rows that begin alike are shared
    only with sdpa.
    """
    flash_attention: FlashAttention = added("FA2")
    """Version of Flash attention on a GPU in bfloat16, by torch's names: FA2 comes with torch, FA3 (Hopper) and FA4
    (Hopper, Blackwell) are packages of their own (docs/performance.md).
    """
    fp32_head: bool = added(False)
    """Compute logits in float32 also where the model computes in bfloat16."""
    deterministic: bool = added(True)
    """Train with algorithms that give the same bits each time. False: whatever is fastest; where a version is trained
    again with other bits, the published one counts (docs/performance.md), and the learner keeps the versions since its
    newest checkpoint.
    """
    compile: bool = added(False)
    """Compile the layers with torch.compile."""
    fused_kernels: bool = added(True)
    """Compute log-probabilities by Triton kernels on a GPU where they give the right numbers. False: by chunks of
    logits, as on a CPU."""
    reference_dtype: Literal["auto", "float32", "bfloat16"] = added("auto")
    """Data type of full weights that the loss compares with; auto: that of the trained weights."""
    quantization: Literal["nf4"] | None = added(None)
    """Quantization of the base model below adapters (QLoRA): NormalFloat in 4 bits, by bitsandbytes."""

    @model_validator(mode="after")
    def _check_adapters(self) -> "ModelSettings":
        if self.quantization is not None and self.lora is None:
            raise ValueError(f"quantization {self.quantization} is for a base model below adapters; add lora")
        if self.reference_dtype != "auto" and self.lora is not None:
            raise ValueError("reference_dtype has no effect below adapters, which share their base; leave it out")
        return self


NF4: Mapping[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""Options of `quantization: nf4` by transformers' names: learner and engine load the same numbers (arXiv 2305.14314).
"""
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """The optimizer and its schedule."""

    kind: Literal["adamw", "muon", "adamw_8bit"] = added("adamw")
    """muon: matrices of the layers by Muon (orthogonalised momentum), embeddings, head and vectors by AdamW;
    adamw_8bit: AdamW of bitsandbytes, with both moments in 8 bits."""
    offload: Literal["cpu"] | None = added(None)
    """cpu: hold the optimizer's state in main memory between its steps."""
    learning_rate: float = Field(default=1e-5, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """linear, cosine: what is left of the learning rate when the job is over."""
    max_skipped_steps: int = added(2, ge=0)
    """So many optimizer steps in a row are skipped if their loss or gradient is not finite; one more ends the job."""


GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")]
"""Name of a model group in a configuration; it becomes part of ids and of folder names."""


def _form(value: Any) -> str:
    return "map" if isinstance(value, Mapping) else "list"


Agents = Annotated[
    Annotated[tuple[str, ...], Tag("list")] | Annotated[dict[str, GroupName], Tag("map")], Discriminator(_form)
]
"""Names of agents, or a model group by name of an agent."""


class EarlyStopping(Settings):
    """End a run in order once its validation no longer gets better."""

    patience: int = Field(default=3, ge=1)
    """Validations in a row without a better mean reward."""
    min_delta: float = Field(default=0.0, ge=0)
    """A mean reward counts as better if it is above the best one so far by more than this."""


class WarmStart(Settings):
    """An SFT job on the environment's demonstrations, before the RL job."""

    num_epochs: int = Field(default=1, ge=1)
    tasks_per_epoch: int = Field(default=8, ge=1, le=MAX_TASKS)
    batches_per_epoch: int = Field(default=1, ge=1)
    num_generations: int = Field(default=8, ge=1, le=MAX_MEMBERS)
    mini_batches: int = Field(default=1, ge=1)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    in_forks: bool = False
    """Whether it also applies in a run that branches from a version of another one, which has trained weights."""


class JobSettings(Settings):
    """All that a learner needs for one job."""

    kind: Literal["rl", "sft", "dpo", "external", "frozen"]
    """`external`: another training backend does it, and no learner takes it; `frozen`: it publishes and ends."""
    model: ModelSettings
    algorithm: Algorithm = Field(default_factory=GrpoSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    num_versions: int = Field(default=1, ge=1)
    """Versions that the job trains at most; the schedule ends there."""
    checkpoint_every: int = Field(default=1, ge=1)
    keep_last: int = Field(default=8, ge=1)
    keep_every: int = Field(default=50, ge=1)
    seed: int = 0
    threads: int | None = Field(default=None, ge=1)
    """Fixed number of CPU threads; part of the conditions for an equal replay."""
    revision: Literal[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16] = added(1)
    """Rules by which the learner trains (`JOB_REVISIONS`); a recorded job keeps those that it was trained by."""
    opponents: OpponentVersions | None = added(None)
    """Versions that a league may draw; None: there is no league."""


class ForkPoint(Settings):
    """The run and version that a run, or one of its model groups, branched from."""

    run_id: str
    version: int = Field(ge=0)
    model_group: str = added("")
    """Name of the model group there; empty: that of the model group that branches."""

    def parent_of(self, model_group: str) -> str:
        """The model group that `model_group` branched from."""
        return ids.model_group(self.run_id, self.model_group or ids.name_of(model_group))


class JobSpec(NamedTuple):
    """One job of a run, as its events say it."""

    job_id: str
    model_group: str
    job: JobSettings
    plan: PlanSettings
    rollout: RolloutSettings
    fork: ForkPoint | None = None
    """The version that its model group begins with; None: the base model, or what the whole run branches from."""

    @property
    def is_frozen(self) -> bool:
        """Whether it trains nothing."""
        return self.job.kind == FROZEN


class ArtifactRef(Settings):
    """An immutable artifact: its location and the hash of its bytes."""

    uri: str
    sha256: str
    size_bytes: int = Field(ge=0)
