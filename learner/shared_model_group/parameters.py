"""The agents of a shared model group: what they must have in common, and how their jobs train."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field, FiniteFloat

from rollstream.schemas.algorithm_settings import AlgorithmSettings, JobKind
from rollstream.schemas.algorithms import DpoSettings, GrpoSettings, SftSettings
from rollstream.schemas.base import Settings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.revisions import NEWEST_REVISION
from rollstream.schemas.settings import Device, JobSettings, LoraSettings, ModelSettings, OptimizerSettings


class JobStateError(ConfigError):
    """A job or its group is not in the state that a call needs."""


class SharedAgentParams(Settings):
    """Parameters that all agents of a group share, because they are those of the one model."""

    model_name: str
    """A transformers folder or a hub name."""
    freeze_agent: bool = False
    """The model is used and never trained."""
    agent_lr_factor: FiniteFloat | None = Field(default=None, gt=0)
    """Factor of the group's learning rate."""
    num_epochs: int | None = Field(default=None, ge=1)
    """Passes over the data of a job; None: as the group's options say."""
    dpo_beta: FiniteFloat | None = Field(default=None, gt=0)
    """None: as `DpoSettings`."""
    use_lora: bool = True
    lora_rank: int = Field(default=64, ge=1)
    lora_alpha: int | None = Field(default=None, ge=1)
    lora_alpha_scale: FiniteFloat | None = Field(default=1.0, gt=0)
    """Alpha divided by rank; the default counts only where `lora_alpha` is not given."""
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)
    lora_target_modules: Literal["all-linear"] | tuple[str, ...] = LoraSettings().target_modules
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Device = "auto"

    @property
    def alpha(self) -> int:
        """LoRA's alpha: `lora_alpha`, or `lora_alpha_scale` times `lora_rank`.

        Raises ConfigError unless exactly one of the two is given and the product is an integer.
        """
        is_scale_given = "lora_alpha_scale" in self.model_fields_set and self.lora_alpha_scale is not None
        if self.lora_alpha is not None and is_scale_given:
            raise ConfigError("lora_alpha and lora_alpha_scale are both given; give exactly one of them")
        if self.lora_alpha is not None:
            return self.lora_alpha
        if self.lora_alpha_scale is None:
            raise ConfigError("neither lora_alpha nor lora_alpha_scale is given; give exactly one of them")
        alpha = self.lora_alpha_scale * self.lora_rank
        if not alpha.is_integer() or alpha < 1:
            raise ConfigError(
                f"lora_alpha_scale {self.lora_alpha_scale:g} x lora_rank {self.lora_rank} is {alpha:g}; choose them so "
                f"that alpha is a whole number"
            )
        return int(alpha)


class FineTuneOptions(Settings):
    """Settings of a group's jobs."""

    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    """Its learning rate is the group's, before `agent_lr_factor`."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the data of a job, unless the agents' parameters say otherwise."""
    batch_size: int = Field(default=256, ge=1, le=512)
    """Examples (rollouts, pairs or groups) of a batch; each batch yields a version."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps of a batch."""
    max_tokens_per_micro_batch: int | None = Field(default=None, ge=1)
    min_examples: int = Field(default=10, ge=1)
    """A job of fewer examples is skipped: the model stays as it is."""
    deadline_s: FiniteFloat | None = Field(default=None, gt=0)
    """Seconds after which a job that is not over is cancelled."""
    max_staleness: int = Field(default=0, ge=0)
    """Versions that rollouts of an RL job may be behind the version that they train: at least its batches less one."""
    grpo: GrpoSettings = Field(default_factory=GrpoSettings)
    """Settings of RL jobs; `mini_batches` and `max_tokens_per_micro_batch` are those above. `dual_clip` is 3 unless
    given here; None: no bound.
    """
    keep_last: int = Field(default=8, ge=1)
    keep_every: int = Field(default=50, ge=1)
    seed: int = 0
    threads: int | None = Field(default=None, ge=1)


class ModelOfAgents(Protocol):
    """The shared model, as its agents see it."""

    group_name: str

    @property
    def model_name(self) -> str:
        """The model that all agents speak with."""
        ...

    def agent_id(self, name: str) -> int:
        """Index of an agent in the protocol."""
        ...


@dataclass(eq=False, slots=True)
class GroupAgent:
    """An agent that speaks through a shared model."""

    name: str
    params: SharedAgentParams
    shared_model_group: str | None = None
    """Name of its group; None: a group of its own, which has the agent's name."""
    is_verifier: bool = False
    verdict_texts: tuple[str, str] = ("Decision: reject", "Decision: accept")
    """Texts of a verifier for the labels 0 and 1; used to replace guesses."""
    system_prompt: str = ""
    """First message of prompts that are built from message histories."""
    group: ModelOfAgents | None = field(default=None, repr=False)
    """The group that the agent belongs to, once one was made with it."""

    @property
    def model_name(self) -> str:
        """The model that the agent speaks with: its group's, so that all members switch together."""
        return self.params.model_name if self.group is None else self.group.model_name


def checked(agents: Iterable[GroupAgent], group_name: str) -> dict[str, GroupAgent]:
    """The agents of a group by name, in order.

    Raises ConfigError for no agents, two of one name, an agent of another group or already grouped, and parameters
    that differ.
    """
    found: dict[str, GroupAgent] = {}
    for agent in agents:
        if agent.name in found:
            raise ConfigError(f"model group {group_name}: two agents are called {agent.name}; rename one of them")
        if agent.group is not None:
            raise _already_grouped(agent, agent.group)
        wanted = agent.shared_model_group
        if (wanted or agent.name) != group_name:
            says = f"is of model group {wanted}" if wanted else "has no shared_model_group"
            raise ConfigError(f"agent {agent.name} {says}; it cannot be in model group {group_name}")
        found[agent.name] = agent
    if not found:
        raise ConfigError(f"model group {group_name} has no agents; give at least one")
    first = next(iter(found.values()))
    for agent in found.values():
        _check_equal(first, agent, group_name)
    return found


def join(agents: Iterable[GroupAgent], group: ModelOfAgents) -> None:
    """Make a group that of its agents. Raises ConfigError if one of them belongs to another one."""
    for agent in agents:
        if agent.group is not None and agent.group is not group:
            raise _already_grouped(agent, agent.group)
        agent.group = group


def leave(agents: Iterable[GroupAgent], group: ModelOfAgents) -> None:
    """Let go of the agents that belong to a group."""
    for agent in agents:
        if agent.group is group:
            agent.group = None


def _already_grouped(agent: GroupAgent, group: ModelOfAgents) -> ConfigError:
    return ConfigError(
        f"agent {agent.name} already belongs to model group {group.group_name}; close that group, or give each agent "
        "one group"
    )


def _check_equal(first: GroupAgent, agent: GroupAgent, group_name: str) -> None:
    for name in SharedAgentParams.model_fields:
        ours, theirs = getattr(first.params, name), getattr(agent.params, name)
        if ours != theirs:
            raise ConfigError(
                f"model group {group_name}: {name} is {ours!r} for agent {first.name} and {theirs!r} for agent "
                f"{agent.name}; agents of a group share one model, so it must be equal"
            )


def job_settings(params: SharedAgentParams, options: FineTuneOptions, kind: JobKind, num_versions: int) -> JobSettings:
    """The learner's settings of a job. Raises ConfigError as `SharedAgentParams.alpha`."""
    lora = None
    if params.use_lora:
        lora = LoraSettings(
            rank=params.lora_rank,
            alpha=float(params.alpha),
            dropout=params.lora_dropout,
            target_modules=params.lora_target_modules,
        )
    rate = options.optimizer.learning_rate * (params.agent_lr_factor or 1.0)
    return JobSettings(
        kind=kind,
        model=ModelSettings(path=params.model_name, lora=lora, dtype=params.dtype, device=params.device),
        algorithm=_algorithm(params, options, kind),  # pyright: ignore[reportArgumentType]
        optimizer=options.optimizer.model_copy(update={"learning_rate": rate}),
        num_versions=num_versions,
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        seed=options.seed,
        threads=options.threads,
        revision=NEWEST_REVISION,
    )


def _algorithm(params: SharedAgentParams, options: FineTuneOptions, kind: JobKind) -> AlgorithmSettings:
    common: dict[str, Any] = {
        "mini_batches": options.mini_batches,
        "max_tokens_per_micro_batch": options.max_tokens_per_micro_batch,
    }
    beta: dict[str, Any] = {} if params.dpo_beta is None else {"beta": params.dpo_beta}
    # Rollouts say neither at what temperature nor in what numbers they were sampled, so no default goes by these.
    grpo = options.grpo.for_run(num_generations=2, temperature=0.0).model_copy(update=common)
    known = (SftSettings(**common), DpoSettings(**common, **beta), grpo)
    return {settings.kind: settings for settings in known}[kind]
