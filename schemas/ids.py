"""Identities, all derived from what happened, so that a retry repeats them. No randomness but `new_run_id`."""

import functools
import hashlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

MAX_NAME = 80
"""Characters of a name that a run's id begins with."""
MODEL_GROUP = "policy"
"""Name of the model group that a run of the command line trains."""
TRAINING = "rl"
"""Name of the job that trains a run's policy."""
WARM_START = "sft"
"""Name of the job before it that imitates demonstrations."""
FROZEN = "frozen"
"""Name, before its model group's, of a job that publishes weights and trains nothing."""


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


def named_group(run_id: str, job: str, name: str) -> str:
    """Id of the group that `EPOCH/INDEX` names in a job of a run; any other text is taken for an id."""
    found = _EPOCH_INDEX.fullmatch(name)
    return name if found is None else group_id(run_id, job, int(found[1]), int(found[2]))


_EPOCH_INDEX = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


def rollout_id(group: str, member: int, attempt: int) -> str:
    """Id of one attempt at member `member` of a group."""
    return f"{group}/m{member}/a{attempt}"


def step_id(rollout: str, index: int) -> str:
    """Id of a recorded step of a rollout."""
    return f"{rollout}/s{index}"


def reward_id(rollout: str, index: int) -> str:
    """Id of a recorded reward of a rollout."""
    return f"{rollout}/r{index}"


_ATTEMPT = re.compile(r"/m([0-9]{1,9})/a([0-9]{1,9})")
INDEXED = r"(.*)/t([0-9]{5,9})"
"""A group's id without its index, and the index; a pattern of Python and of SQL."""
_INDEXED = re.compile(INDEXED, re.DOTALL)
_EPOCH = re.compile(r"(.*)/e([0-9]{5,9})", re.DOTALL)
_GROUP = re.compile(r"(?P<job>[^/]+/[^/]+)/(?P<kind>[ev])(?P<epoch>[0-9]{1,9})(-[0-9a-f]+)?/t(?P<index>[0-9]{1,9})")


def attempt_of(group: str, rollout: str) -> tuple[int, int] | None:
    """Member and attempt that a rollout's id names; None if it is not one of the group's."""
    found = _ATTEMPT.fullmatch(rollout, len(group)) if rollout.startswith(group) else None
    return None if found is None else (int(found[1]), int(found[2]))


def group_of(rollout: str) -> str:
    """Id of the group whose attempt a rollout is."""
    return rollout.rpartition("/m")[0]


def split_index(group: str) -> tuple[str, int] | None:
    """A group's id without its index, and the index; None if it ends with none as `group_id` writes it."""
    found = _INDEXED.fullmatch(group)
    return (found[1], int(found[2])) if found is not None and f"{int(found[2]):05d}" == found[2] else None


def epoch_position(group: str) -> tuple[str, int, int] | None:
    """Job's id, epoch and index of a group that an epoch asked for; None for any other group."""
    split = split_index(group)
    found = None if split is None else _EPOCH.fullmatch(split[0])
    if split is None or found is None or f"{int(found[2]):05d}" != found[2] or "/" not in found[1]:
        return None
    return found[1], int(found[2]), split[1]


@dataclass(frozen=True, slots=True)
class GroupName:
    """Parts of a group's id."""

    job_id: str
    epoch: int
    index: int
    is_validation: bool


def parsed_group(group: str) -> GroupName | None:
    """Parse the id of a group of an epoch or of a validation; None if it is not such an id."""
    found = _GROUP.fullmatch(group)
    if found is None:
        return None
    return GroupName(found["job"], int(found["epoch"]), int(found["index"]), found["kind"] == "v")


def trajectory_id(rollout: str, agent: str) -> str:
    """Id of one agent's trajectory in one rollout."""
    return f"{rollout}/{agent}"


def job_id(run_id: str, name: str, group: str | None = None) -> str:
    """Id of the job called `name` in a run; `group`: name of its model group, if the job beside it plans its tasks."""
    return f"{run_id}/{name}" if group is None else f"{run_id}/{name}-{group}"


_FINE_TUNE = re.compile(r"-(sft|dpo|rl)-[0-9a-f]{16}(-r[0-9]{1,4})?")


def fine_tune_job_id(group: str, kind: str, digest: str, attempt: int = 0) -> str:
    """Id of a job of a shared model group; `group` is the model group's id, `digest` that of data, configuration and
    parent version. Attempt 0 is the first, the others are retries."""
    return f"{group}-{kind}-{digest[:16]}" + (f"-r{attempt}" if attempt else "")


def is_fine_tune_of(group: str, job: str) -> bool:
    """Whether a job's id is one that `fine_tune_job_id` makes for the model group."""
    return job.startswith(group) and _FINE_TUNE.fullmatch(job, len(group)) is not None


def submission_id(job: str, epoch: int, digest: str) -> str:
    """Id of the submission for an epoch of a job; `job` is the job's id, `digest` that of the content."""
    return f"{job}/e{epoch:05d}/{digest[:16]}"


def batch_id(job: str, index: int) -> str:
    """Id of manifest `index` of a job; `job` is the job's id."""
    return f"{job}/b{index:06d}"


def model_group(run_id: str, name: str) -> str:
    """Full name of a model group of a run."""
    return f"{run_id}/{name}"


SCRIPTED = "scripted:"
"""Prefix of the name of a player that the environment plays by itself."""
PLAYER = r"([^@]+)@([0-9]{1,9})"
"""Model group and version of a player that is not a scripted one; a pattern of Python and of SQL."""
_PLAYER = re.compile(PLAYER)


def player(group: str, version: int) -> str:
    """Name of a weight version as a player of matches; `group` is the full name of its model group."""
    return version_name(group, version)


@functools.lru_cache(maxsize=1024)
def version_of(player: str) -> tuple[str, int] | None:
    """Model group and version of a player; None if it is a scripted one."""
    found = None if player.startswith(SCRIPTED) else _PLAYER.fullmatch(player)
    return None if found is None else (found[1], int(found[2]))


_VERSION = re.compile(r"(?P<run>[^@/\s]+)(/(?P<group>[^@/\s]+))?@v?(?P<version>[0-9]{1,18})")


def parsed_version(text: str) -> tuple[str, str, int] | None:
    """Run, model group's name and version that `RUN@VERSION` or `RUN/GROUP@VERSION` says, the name empty in the former.

    None if the text is neither.
    """
    found = _VERSION.fullmatch(text)
    return None if found is None else (found["run"], found["group"] or "", int(found["version"]))


def version_name(owner: str, version: int, group: str = "") -> str:
    """`OWNER@VERSION`, which `parsed_version` reads; `owner`: id of a run, whose model group is named `group`, or of a
    model group.
    """
    return f"{owner}/{group}@{version}" if group else f"{owner}@{version}"


def run_of(key: str) -> str:
    """The run that a group, rollout, job or model group id belongs to."""
    return key.split("/", 1)[0]


def name_of(key: str) -> str:
    """Name of a job or of a model group: what its id has after the run's."""
    return key.split("/", 1)[-1]


def event_id(kind: str, subject: str) -> str:
    """Id of the event of this kind about `subject`: the id of a run, group, rollout or job, or what begins with one."""
    return f"{kind}:{subject}"


def split_event(event: str) -> tuple[str, str]:
    """Kind and subject of an event's id."""
    kind, _, subject = event.partition(":")
    return kind, subject


def epoch_event(kind: str, job: str, epoch: int) -> str:
    """Id of the event of this kind that an epoch of a job has; `job` is the job's id."""
    return event_id(kind, f"{job}/e{epoch}")


def version_event(kind: str, name: str, version: int, writer: str | int | None = None) -> str:
    """Id of the event of this kind about a weight version; `name`: id of its job or of its model group.

    `writer`: the term or the engine, for kinds of which each may write one; None for the prefix of all of them.
    """
    return event_id(kind, f"{name}/v{version}" + ("" if writer is None else f"/{writer}"))


def versions_event(kind: str, name: str, first: int, last: int) -> str:
    """Id of the event of this kind about the weight versions from `first` to `last`; `name` as in `version_event`."""
    return event_id(kind, f"{name}/v{first}-v{last}")


def claim_event(group: str, term: int, learner: str | None = None) -> str:
    """Id of a LearnerClaimed; `group`: the model group's id; `learner` None: what all claims of the term begin with."""
    return event_id("learner_claimed", f"{group}/{term}" + ("" if learner is None else f"/{learner}"))


def is_key_of_run(key: bytes, run_id: str) -> bool:
    """Whether a record's key belongs to a run: it is `RUN` or begins with `RUN/`."""
    run = run_id.encode()
    return key.startswith(run) and key[len(run) : len(run) + 1] in (b"", b"/")


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed from its parts; equal parts give the equal seed on every machine."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seeder(*parts: str | int) -> Callable[[str], int]:
    """`derive_seed(*parts, last)` as a function of the last part; the others are hashed once."""
    begun = hashlib.sha256("\x1f".join([*map(str, parts), ""]).encode())

    def seed(last: str) -> int:
        whole = begun.copy()
        whole.update(last.encode())
        return int.from_bytes(whole.digest()[:8], "little") >> 1

    return seed


@functools.lru_cache(maxsize=1024)
def member_seed(task_seed: int, member: int) -> int:
    """Seed of one member of a group; every attempt at it has the same."""
    return derive_seed(task_seed, member)


def tree_depth(num_members: int, responses_per_step: int) -> int:
    """Levels of a tree with so many branches at each node that the members of a group fill; 0 for a branching of 1."""
    depth = 0
    while 1 < responses_per_step ** (depth + 1) <= num_members:
        depth += 1
    return depth


def answer_seed(task_seed: int, member: int, agent: str, number: int, *, level: int = 0, shared_by: int = 1) -> int:
    """Seed of answer `number` of an agent in one member of a group.

    Members are the leaves of a tree in their order, and `shared_by` of them have the branch of `level` in common, so
    they have the same seed; 1: the member is alone.
    """
    if shared_by > 1:
        return derive_seed(task_seed, "tree", level, member // shared_by, agent, number)
    return derive_seed(member_seed(task_seed, member), agent, number)
