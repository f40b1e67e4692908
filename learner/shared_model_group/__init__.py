"""Agents that share one trained model: fine-tuning jobs on the log, and the state of the group as a fold of it."""

from rollstream.learner.shared_model_group import fine_tune_job, group_view, job_queue
from rollstream.learner.shared_model_group.job_lifecycle import FineTuneJob, JobStatus
from rollstream.learner.shared_model_group.model_group import SharedModelGroup, SharedModelGroupState
from rollstream.learner.shared_model_group.parameters import (
    FineTuneOptions,
    GroupAgent,
    JobStateError,
    SharedAgentParams,
)

__all__ = [
    "FineTuneJob",
    "FineTuneOptions",
    "GroupAgent",
    "JobStateError",
    "JobStatus",
    "SharedAgentParams",
    "SharedModelGroup",
    "SharedModelGroupState",
    "fine_tune_job",
    "group_view",
    "job_queue",
]
