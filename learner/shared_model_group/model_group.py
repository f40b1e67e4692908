"""A model that several agents share, fine-tuned by jobs on the log: a thin shell over an event log and artifacts.

The group trains nothing itself. A job is a JobSubmitted whose examples are an artifact; producers play the examples
from their records, processors assemble and plan them, and a learner trains them, as those of any run. What the group
knows is a fold of the log, so another process that opens the group goes on with its jobs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.log import EventLog, wall_ms
from rollstream.learner.shared_model_group import examples, fine_tune_job, parameters
from rollstream.learner.shared_model_group.job_lifecycle import (
    FAILURES,
    FineTuneJob,
    JobStatus,
    ModelGroupState,
    initial,
)
from rollstream.learner.shared_model_group.job_queue import JobQueue
from rollstream.learner.shared_model_group.parameters import FineTuneOptions, GroupAgent, JobStateError
from rollstream.schemas import ids
from rollstream.schemas.algorithm_settings import JobKind
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import RunEnded
from rollstream.schemas.events.recorded import RecordedGroup
from rollstream.schemas.events.weights import FineTune


@dataclass(frozen=True, slots=True)
class SharedModelGroupState:
    """State of a group in a checkpoint; everything else is on the log."""

    fine_tune_job_id: str | None = None
    fine_tuned_model_name: str | None = None
    """None while the group speaks with its base model."""


class SharedModelGroup:
    """One model and all agents that speak through it. Use `open`, or `async with`."""

    state_class = SharedModelGroupState

    def __init__(
        self,
        log: EventLog,
        artifacts: ArtifactStore,
        agents: Iterable[GroupAgent],
        *,
        run_id: str,
        group_name: str,
        agent_names: Sequence[str] | None = None,
        max_message_rounds: int = 1,
        options: FineTuneOptions | None = None,
        now_ms: Callable[[], int] = wall_ms,
    ) -> None:
        """`run_id`: an existing run, or one that the group begins; the model group is `<run_id>/<group_name>`.

        `agent_names`: all agents of the protocol, whose order gives the ids of agents (default: those of the group).
        `now_ms`: the clock of submissions and deadlines. Raises ConfigError for agents that cannot share a model.
        """
        self._agents = parameters.checked(agents, group_name)
        names = tuple(self._agents) if agent_names is None else tuple(agent_names)
        for name in self._agents:
            if name not in names:
                raise ConfigError(f"agent {name} is not an agent of the protocol; its agents are {', '.join(names)}")
        self.group_name = group_name
        self.model_group = ids.model_group(run_id, group_name)
        self.max_message_rounds = max_message_rounds
        self.params = next(iter(self._agents.values())).params
        self.base_model_name = self.params.model_name
        self.is_training_mode = False
        self.options = options or FineTuneOptions()
        self._agent_names = names
        self._log = log
        self._artifacts = artifacts
        self._run_id = run_id
        self._now_ms = now_ms
        self._opened: JobQueue | None = None
        self._job_id: str | None = None
        self._version: int | None = None
        """The version of a restored checkpoint, or of a switch to its job; None: that of the newest switch."""
        parameters.join(self._agents.values(), self)

    @classmethod
    async def open(
        cls, log: EventLog, artifacts: ArtifactStore, agents: Iterable[GroupAgent], **keywords: Any
    ) -> "SharedModelGroup":
        """A group with its state from the log; begins its run if the log has none. Parameters as the constructor's.

        Jobs that another process left unfinished go on. Raises ConfigError, JobStateError if the run is over.
        """
        group = cls(log, artifacts, agents, **keywords)
        await group._begin()
        return group

    async def __aenter__(self) -> Self:
        if self._opened is None:
            await self._begin()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the log and of the agents. Jobs go on; the run stays open."""
        if self._opened is not None:
            await self._opened.close()
            self._opened = None
        parameters.leave(self._agents.values(), self)

    async def end_run(self) -> None:
        """End the run, and with it every open job: for a run that the group began."""
        await self._log.send(RunEnded(run_id=self._run_id, time_ms=self._now_ms(), cause="completed"))

    # ---- what the group is ----

    @property
    def is_trainable(self) -> bool:
        """False for a frozen group: it creates no jobs."""
        return not self.params.freeze_agent

    @property
    def version(self) -> int:
        """The weight version that the group speaks with; 0 is the base model."""
        return self._state.version if self._version is None else self._version

    @property
    def model_name(self) -> str:
        """`<run>/<group>@<version>` once the group has switched to a fine-tuned model, before that the base model."""
        return self.base_model_name if not self.version else ids.player(self.model_group, self.version)

    @property
    def lora_alpha(self) -> int:
        """LoRA's alpha. Raises ConfigError unless exactly one of alpha and scale gives a whole number."""
        return self.params.alpha

    @property
    def num_epochs(self) -> int:
        """Passes of a job over its data."""
        return self.params.num_epochs or self.options.num_epochs

    @property
    def rl_learning_rate(self) -> float:
        """Learning rate of jobs: that of the options times the agents' `agent_lr_factor`."""
        return self.options.optimizer.learning_rate * (self.params.agent_lr_factor or 1.0)

    @property
    def fine_tune_job_id(self) -> str | None:
        """The job that the other members speak of: the one created last."""
        return self._job_id

    @property
    def jobs(self) -> tuple[FineTuneJob, ...]:
        """All jobs of the model group, oldest first."""
        return self._state.history

    @property
    def agents(self) -> Mapping[str, GroupAgent]:
        """The members by name, in the order of the group."""
        return self._agents

    def agent_ids_and_names(self) -> Iterator[tuple[int, str]]:
        """(index of the agent in the protocol, name) of each member, in the order of the group."""
        for name in self._agents:
            yield self.agent_id(name), name

    def agent_id(self, name: str) -> int:
        """Index of a member in the protocol."""
        return self._agent_names.index(name)

    # ---- modes ----

    async def eval(self) -> None:
        """Inference mode: nothing to switch, because engines load published versions while jobs train."""
        self.is_training_mode = False

    async def train(self) -> None:
        """Training mode: nothing to free, for the same reason."""
        self.is_training_mode = True

    async def wait_for_ready(self, timeout: float = 300.0) -> None:
        """Wait until the version that the group speaks with is published, and an engine that follows the group has it.

        The base model is ready without either. Raises TimeoutError after `timeout` seconds.
        """
        await self._queue.wait_until(
            self._is_ready, timeout, f"version {self.version} of {self.model_group} is not served"
        )

    def _is_ready(self) -> bool:
        state = self._state
        is_loaded = not state.loaded or max(state.loaded.values()) >= self.version
        return not self.version or (state.newest_version >= self.version and is_loaded)

    # ---- jobs ----

    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: Mapping[str, examples.Rollouts],
        guess_replaced_rollouts: Mapping[str, examples.Labelled] | None = None,
        job_name: str | None = None,
    ) -> str:
        """Fine-tune on what the agents said; returns the job's id. Raises ConfigError as `sft_examples`."""
        found = examples.sft_examples(self._agents, self.model_group, rollouts_per_agent, guess_replaced_rollouts or {})
        return await self._create("sft", found, job_name)

    async def create_dpo_fine_tune_job(
        self,
        positive_examples_per_agent: Mapping[str, examples.Rollouts],
        negative_examples_per_agent: Mapping[str, examples.Rollouts],
        job_name: str | None = None,
    ) -> str:
        """Fine-tune on preferences; returns the job's id. Raises ConfigError as `dpo_examples`."""
        found = examples.dpo_examples(
            self._agents, self.model_group, positive_examples_per_agent, negative_examples_per_agent
        )
        return await self._create("dpo", found, job_name)

    async def create_rl_fine_tune_job(
        self, groups_per_agent: Mapping[str, examples.Groups], job_name: str | None = None
    ) -> str:
        """Fine-tune on the rewards of groups of rollouts; returns the job's id. Raises ConfigError as `rl_examples`."""
        return await self._create(
            "rl", examples.rl_examples(self._agents, self.model_group, groups_per_agent), job_name
        )

    async def get_fine_tune_job_status(self, job_id: str | None = None) -> JobStatus:
        """Status of a job; `not_found` for an id that the log does not have.

        Sends what is due for open jobs: their examples once assembled, a cancellation after the deadline.
        Raises JobStateError if no job was created.
        """
        wanted = self._wanted(job_id)
        await self._queue.advance()
        return self._state.job(wanted).status

    async def fine_tune_job_failed(self, job_id: str | None = None) -> bool:
        """Whether the status is `failed`, `cancelled` or `not_found`."""
        return await self.get_fine_tune_job_status(job_id) in FAILURES

    async def get_fine_tune_job_error_repr(self, job_id: str | None = None) -> str:
        """The reason why a job failed, was cancelled or was skipped; empty for any other. Raises JobStateError for an
        unknown job.
        """
        await self._queue.advance()
        return self._known(job_id).error

    async def get_fine_tune_job_progress(self, job_id: str | None = None) -> float:
        """Progress of a job, 0 to 100. Raises JobStateError for no such job."""
        await self._queue.advance()
        return self._known(job_id).progress

    async def wait_for_fine_tune_job(self, job_id: str | None = None, timeout: float | None = None) -> JobStatus:
        """The status of a job once it is over. Raises TimeoutError, JobStateError for no such job."""
        await self._queue.advance()
        wanted = self._known(job_id).job_id
        await self._queue.wait_until(lambda: self._state.job(wanted).is_over, timeout, f"job {wanted} is not over")
        return self._state.job(wanted).status

    async def cancel_fine_tune_job(self, job_id: str | None = None, cause: str = "cancelled by its group") -> None:
        """Cancel a job; one that is over stays as it is. Raises JobStateError for no such job."""
        await self._queue.advance()
        await self._queue.cancel(self._known(job_id).job_id, cause)

    async def retry_fine_tune_job(self, job_id: str | None = None) -> str:
        """A further attempt at a job that failed or was cancelled, from the batch that its attempts have reached.

        Returns the attempt's id, or that of the newest attempt if it is open or has succeeded. Raises JobStateError for
        a job in any other status, and if the run has ended.
        """
        await self._queue.advance()
        job = self._known(job_id)
        if job.status not in FAILURES or job.submitted is None or job.submitted.fine_tune is None:
            raise JobStateError(f"job {job.job_id} is {job.status}; only a failed or cancelled job can be retried")
        again = self._job_id = await self._queue.retry(job.submitted, self.options.deadline_s)
        return again

    async def switch_to_next_model(self) -> str:
        """Adopt the model of the job created last; returns its name. A skipped job leaves the model as it is.

        Switching again changes nothing. Raises JobStateError unless the job succeeded.
        """
        await self._queue.advance()
        job = self._known(None)
        version = job.final_version
        if version is None:
            why = f": {job.error}" if job.error else ""
            raise JobStateError(f"job {job.job_id} is {job.status}{why}; switch once it has succeeded")
        if job.switched_to is None:
            await self._queue.switch(job.job_id, version)
        self._version = None if version == self._state.version else version
        return self.model_name

    # ---- checkpoints ----

    def get_state_dict(self) -> dict[str, Any]:
        """The state as a JSON-able dict."""
        name = self.model_name if self.version else None
        return asdict(SharedModelGroupState(self._job_id, name))

    def get_state(self) -> SharedModelGroupState:
        """State of the group for a checkpoint."""
        return self.state_class(**self.get_state_dict())

    def set_state(self, checkpoint: SharedModelGroupState | Mapping[str, Any]) -> None:
        """Restore a state, also from a dict as JSON gives it.

        Raises ConfigError for other keys, a job that the log does not have, and a model that the group never had.
        """
        given = asdict(checkpoint) if isinstance(checkpoint, SharedModelGroupState) else dict(checkpoint)
        if unknown := sorted(given.keys() - asdict(SharedModelGroupState()).keys()):
            raise ConfigError(
                f"a state of a shared model group has no key {unknown[0]}; restore what get_state_dict() returned"
            )
        job_id, name = given.get("fine_tune_job_id"), given.get("fine_tuned_model_name")
        if job_id is not None and self._state.job(job_id).status == "not_found":
            raise JobStateError(f"job {job_id} does not exist; `rollstream jobs` lists all jobs")
        version = 0
        if name is not None:
            switched = [job.switched_to for job in self.jobs if job.switched_to]
            known = {ids.player(self.model_group, version): version for version in switched}
            if name not in known:
                raise ConfigError(
                    f"model {name} is not one that {self.model_group} switched to; restore what "
                    "get_state_dict() returned"
                )
            version = known[name]
        self._job_id, self._version = job_id, version

    # ---- the log ----

    async def _create(self, kind: JobKind, groups: list[RecordedGroup], name: str | None) -> str:
        if not self.is_trainable:
            raise JobStateError(f"model group {self.model_group} is frozen and cannot be trained; train another group")
        fine_tune_job.check_groups(groups)
        await self._queue.advance()
        self._queue.check_run()
        num_batches = fine_tune_job.num_batches(len(groups), self.options.batch_size, self.num_epochs)
        settings = parameters.job_settings(self.params, self.options, kind, num_batches)
        fine_tune = FineTune(
            data_sha256=fine_tune_job.data_sha256(groups),
            data=await self._queue.stored(groups),
            num_examples=len(groups),
            config_sha256=fine_tune_job.config_sha256(settings, self.options),
            agents=tuple(self._agents),
            parent_version=self.version,
            num_batches=num_batches,
            batch_size=self.options.batch_size,
            max_staleness=self.options.max_staleness,
            name=name or "",
            deadline_s=self.options.deadline_s,
        )
        job_id = fine_tune_job.job_id_of(self.model_group, settings, fine_tune)
        if len(groups) < self.options.min_examples:
            await self._queue.skip(job_id, kind, fine_tune, self.options.min_examples)
        else:
            check = partial(fine_tune_job.check_new, groups, self.model_group, self._agents, settings, self.options)
            job_id = await self._queue.submit(job_id, settings, fine_tune, check)
        self._job_id = job_id
        return job_id

    async def _begin(self) -> None:
        """Open the jobs; a group that cannot be opened lets go of its agents, so that another one may have them."""
        parameters.join(self._agents.values(), self)
        seed, now_ms = self.options.seed, self._now_ms
        try:
            self._opened = await JobQueue.open(self._log, self._artifacts, self.model_group, seed=seed, now_ms=now_ms)
            history = self._state.history
            self._job_id = history[-1].job_id if history else None
            await self._queue.advance()
        except BaseException:
            await self.close()
            raise

    def _wanted(self, job_id: str | None) -> str:
        wanted = job_id or self._job_id
        if wanted is None:
            raise JobStateError(f"model group {self.model_group} has no job; create one first")
        return wanted

    def _known(self, job_id: str | None) -> FineTuneJob:
        job = self._state.job(self._wanted(job_id))
        if job.status == "not_found":
            raise JobStateError(f"job {job.job_id} does not exist; `rollstream jobs` lists all jobs")
        return job

    @property
    def _queue(self) -> JobQueue:
        if self._opened is None:
            raise JobStateError("the group is not open; use `await SharedModelGroup.open(...)`")
        return self._opened

    @property
    def _state(self) -> ModelGroupState:
        return initial(self.model_group) if self._opened is None else self._opened.state
