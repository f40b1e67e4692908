"""Identities, all derived from what happened, so that a retry repeats them. No randomness but `new_run_id`."""

import hashlib
import re
import secrets

MAX_NAME = 80
"""Characters of a name that a run's id begins with."""


def new_run_id(name: str) -> str:
    """A fresh run id: the given name and six hex digits. The only id that is not derived.

    What an id cannot have becomes '-': a slash would end it, for other ids begin with it.
    """
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:MAX_NAME]
    return f"{clean or 'run'}-{secrets.token_hex(3)}"


def group_id(run_id: str, job: str, epoch: int, index: int) -> str:
    """Id of the group (and of its task) at `index` of an epoch of a job."""
    return f"{run_id}/{job}/e{epoch:05d}/t{index:05d}"


def validation_group_id(run_id: str, job: str, epoch: int, asked: str, index: int) -> str:
    """Id of the group (and of its task) at `index` of a validation before `epoch` of a job.

    `asked`: a few hex digits of a digest of its examples and settings.
    """
    return f"{run_id}/{job}/v{epoch:05d}-{asked}/t{index:05d}"


def is_validation(group: str) -> bool:
    """Whether a group id is that of a validation."""
    parts = group.split("/")
    return len(parts) == 4 and parts[2].startswith("v") and parts[2][1:].split("-", 1)[0].isdigit()


def rollout_id(group: str, member: int, attempt: int) -> str:
    """Id of one attempt at member `member` of a group."""
    return f"{group}/m{member}/a{attempt}"


def trajectory_id(rollout: str, agent: str) -> str:
    """Id of what one agent did in one rollout."""
    return f"{rollout}/{agent}"


def job_id(run_id: str, name: str) -> str:
    """Id of the job called `name` in a run."""
    return f"{run_id}/{name}"


def batch_id(job: str, index: int) -> str:
    """Id of manifest `index` of a job; `job` is the job's id."""
    return f"{job}/b{index:06d}"


def model_group(run_id: str, name: str) -> str:
    """Full name of a model group of a run."""
    return f"{run_id}/{name}"


def run_of(key: str) -> str:
    """The run that a group, rollout, job or model group id belongs to."""
    return key.split("/", 1)[0]


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed from its parts; equal parts give the equal seed on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
