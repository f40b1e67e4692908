"""The data models of NAT's harness: their names, fields and the one rule that they check."""

import pytest
from pydantic import ValidationError

from rollstream.schemas import finetuning
from rollstream.schemas.finetuning import (
    CurriculumLearningConfig,
    EpisodeItem,
    EpisodeItemRole,
    FinetuneRunConfig,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    Trajectory,
    TrajectoryCollection,
)

NAMES = (
    "Trajectory",
    "EpisodeItem",
    "EpisodeItemRole",
    "DPOItem",
    "TrajectoryCollection",
    "TrainingJobRef",
    "TrainingJobStatus",
    "TrainingStatusEnum",
    "CurriculumLearningConfig",
    "FinetuneConfig",
    "FinetuneRunConfig",
    "RewardFunctionConfig",
    "TrainerConfig",
    "TrajectoryBuilderConfig",
    "TrainerAdapterConfig",
)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert hasattr(finetuning, name)


def test_an_assistant_needs_log_probabilities() -> None:
    with pytest.raises(ValidationError, match="logprobs"):
        EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="4")
    assert EpisodeItem(role=EpisodeItemRole.USER, content="2+2=").logprobs is None


def test_a_collection_survives_json() -> None:
    items = [
        EpisodeItem(role=EpisodeItemRole.USER, content="2+2="),
        EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="4", logprobs=[-0.1]),
    ]
    made = TrajectoryCollection(trajectories=[[Trajectory(episode=items, reward=1.0)]], run_id="run")
    assert TrajectoryCollection.model_validate_json(made.model_dump_json()) == made


def test_a_status_has_its_place_and_progress() -> None:
    ref = TrainingJobRef(run_id="run", backend="rollstream")
    status = TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=TrainingStatusEnum.RUNNING, progress=50.0)
    assert status.message is None


def test_a_component_gets_its_type_by_its_class_name_argument() -> None:
    class Ours(TrainerConfig, name="ours"):
        pass

    assert Ours().type == "ours"
    assert Ours.STATIC_TYPE == "ours"


def test_the_curriculum_and_the_command_line_have_their_defaults() -> None:
    assert CurriculumLearningConfig().initial_percentile == 0.3
    assert FinetuneRunConfig().result_json_path == "$"
