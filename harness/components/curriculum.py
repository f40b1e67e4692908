"""The epochwise curriculum: selects the groups of an epoch to train on. Pure; the rule itself is in `processors`."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.processors.curate.candidates import bounds_by_agent, largest_range, mean
from rollstream.processors.curate.curriculum import CurriculumProgress, GroupRewards, Kept, begin, epochwise_filter
from rollstream.schemas.events import EpochSealed
from rollstream.schemas.finetuning import CurriculumLearningConfig, Trajectory
from rollstream.schemas.settings import CurriculumSettings

Groups = Sequence[Sequence[Trajectory]]


def settings_of(config: CurriculumLearningConfig) -> CurriculumSettings:
    """Our settings; fields that NAT's configuration lacks keep their defaults."""
    known = {name: getattr(config, name) for name in CurriculumSettings.model_fields if hasattr(config, name)}
    return CurriculumSettings(**{**known, "steer": False})


def name_of(group: Sequence[Trajectory], index: int, settings: CurriculumSettings) -> str:
    """A group's name: its example's id, or its index in the collection."""
    known = next((t.metadata["id"] for t in group if t.metadata and "id" in t.metadata), None)
    return str(known) if settings.groups_by_example and known is not None else f"{index:06d}"


def choose(
    groups: Groups,
    settings: CurriculumSettings,
    progress: CurriculumProgress,
    epoch: int,
    *,
    seed: int,
    rng: random.Random | None = None,
) -> tuple[CurriculumProgress, list[tuple[int, tuple[int, ...]]]]:
    """The curriculum's progress after an epoch, and the selection: indices of groups by rank, each with the indices of
    its trajectories.
    """
    rewards = [
        GroupRewards(
            f"{index:06d}", name_of(group, index, settings), tuple(one.reward for one in group), _range_by_agent(group)
        )
        for index, group in enumerate(groups)
    ]
    progress, kept = epochwise_filter(rewards, settings, progress, epoch, seed, rng)
    return progress, [_selection(one) for one in kept]


def resumed(settings: CurriculumSettings, seals: Mapping[int, EpochSealed]) -> CurriculumProgress:
    """The progress after the epochs that are sealed: each change of the recorded percentile was an expansion."""
    progress = begin(settings)
    for epoch, seal in sorted(seals.items()):
        if seal.curriculum_percentile > progress.percentile:
            progress = CurriculumProgress(seal.curriculum_percentile, epoch)
    return progress


def reward_stats(groups: Groups) -> dict[str, Any]:
    """{avg_reward, min_reward, max_reward, num_trajectories, num_groups} over all trajectories; none without any."""
    rewards = [trajectory.reward for group in groups for trajectory in group]
    return {
        "avg_reward": mean(rewards) if rewards else None,
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "num_trajectories": len(rewards),
        "num_groups": len(groups),
    }


def _range_by_agent(group: Sequence[Trajectory]) -> float:
    """Largest difference of rewards of one agent; trajectories that name no agent are of one."""
    return largest_range(bounds_by_agent((str((one.metadata or {}).get("agent")), one.reward) for one in group))


def _selection(kept: Kept) -> tuple[int, tuple[int, ...]]:
    return int(kept.group_id), kept.members
