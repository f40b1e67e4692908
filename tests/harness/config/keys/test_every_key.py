"""Every key of a run's file, changed alone: what the run does is another, or the key is refused, or told by its path.

What a run does is taken where it leaves the harness: jobs, what services are started with, examples, and what the
trainer that conducts it looks at. That the other side reads all of this is looked up in its sources.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rollstream.harness.config import file as config_file
from rollstream.harness.config import registry
from rollstream.schemas import services
from rollstream.schemas.finetuning import TrainerConfig, TrajectoryBuilderConfig
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.settings import JobSettings, PlanSettings, RolloutSettings
from tests.harness.config.keys.changed_keys import BLOCKS, EPOCHWISE, answer, changed_by, effects_of, table_of
from tests.harness.config.keys.every_key import (
    ART,
    EVAL,
    OTHERS,
    TABLES,
    keys_of,
    unlisted,
)

ROOT = Path(__file__).resolve().parents[4]
REFUSED = {
    *(f"{section}.{name}._type" for section, name in BLOCKS),
    "eval.general.dataset._type",
    "finetuning.enabled",
    "finetuning.trainer",
    "finetuning.trajectory_builder",
    "finetuning.trainer_adapter",
    "trainer_adapters.a.backend.base_model",
    *(f"{block}.engine.{key}" for block in ("trajectory_builders.b", "trainer_adapters.a.endpoint") for key in OTHERS),
}
"""Keys that cannot have another value in these files."""
NEVER_USED = {f"{block}.reward.name" for block in ("trajectory_builders.b", "trainer_adapters.a", "trainers.t")} | {
    "finetuning.run_configuration.config_file",
    "finetuning.run_configuration.override",
    *(f"eval.general.{key}" for key in EVAL if not key.startswith("dataset.")),
    *(f"trainer_adapters.a.{key}" for key in ART if key.startswith("backend.")),
    "trajectory_builders.b.custom_step_name",
    "trajectory_builders.b.workspace",
    "trainer_adapters.a.workspace",
} - REFUSED
"""Known, and told that they have no meaning wherever they are given."""


class OtherBuilderConfig(TrajectoryBuilderConfig, name="test_other_builder"):
    """A builder of another package, of which nothing is known."""


class OtherTrainerConfig(TrainerConfig, name="test_other_trainer"):
    """The same for a trainer."""


@pytest.fixture(autouse=True)
def _others(registered_alone: None) -> None:
    async def build(config: Any, builder: Any) -> AsyncIterator[None]:
        yield None

    registry.register_trajectory_builder(OtherBuilderConfig)(build)
    registry.register_trainer(OtherTrainerConfig)(build)


TLS = {"security_protocol": "SASL_SSL", "username": "me", "cert_file": "c.pem"}
VARIANTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "streamed": changed_by(),
    "streamed, all rolled out": changed_by(finetuning__curriculum_learning__steer=False),
    "streamed with a schedule and a divergence": changed_by(
        trainer_adapters__a__optimizer={"schedule": "cosine"},
        trainer_adapters__a__warm_start={"optimizer": {"schedule": "cosine"}},
        trainer_adapters__a__algorithm={"kl_coefficient": 0.1},
        trainer_adapters__a__max_staleness=4,
    ),
    "streamed with a gate": changed_by(
        trainers__t={"_type": "rollstream", "evaluation_gate": {"min_reward": 0.25}},
        finetuning__run_configuration={"validation_dataset": "examples.jsonl"},
    ),
    "full weights": changed_by(trainer_adapters__a__model__lora=None),
    "epoch by epoch": changed_by(**EPOCHWISE),
    "without a curriculum and a dataset": changed_by(finetuning__curriculum_learning={}, eval={}),
    **{
        name: changed_by(trainer_adapters__a__algorithm={"name": name})
        for name in ("dpo", "sft", "cispo", "gspo", "dppo", "vespo", "kto", "malt", "ppo")
    },
    "expert iteration": changed_by(trainer_adapters__a__algorithm={"name": "expert_iteration"}),
    "weighted expert iteration": changed_by(
        trainer_adapters__a__algorithm={"name": "expert_iteration", "selection": "weighted"}
    ),
    "sapo": changed_by(trainer_adapters__a__algorithm={"name": "sapo", "aggregation": "tokens"}),
    "Dr. GRPO": changed_by(trainer_adapters__a__algorithm={"aggregation": "constant", "aggregation_length": 5}),
    "DAPO": changed_by(trainer_adapters__a__algorithm={"overlong": {"max_length": 5, "buffer": 2}}),
    "opd": changed_by(trainer_adapters__a__algorithm={"name": "opd", "teacher": "other/teacher"}),
    "mix": changed_by(trainer_adapters__a__algorithm={"name": "mix", "ce": 0.25, "ref_kl": 0.25}),
    "opsd": changed_by(trainer_adapters__a__algorithm={"name": "opsd", "context": "{question}"}),
    **{
        f"a Kafka that the {block} names, by its {secret}": changed_by(
            **{f"{path}__bootstrap_servers": "127.0.0.1:9", f"{path}__kafka": {**TLS, secret: value}}
        )
        for block, path in (("builder", "trajectory_builders__b"), ("adapter", "trainer_adapters__a"))
        for secret, value in (("password", "${TEST_OTHER_SECRET}"), ("password_file", "p.txt"))
    },
    "external services": changed_by(
        trajectory_builders__b__bootstrap_servers="127.0.0.1:9",
        trajectory_builders__b__services="external",
        trainer_adapters__a__endpoint=None,
    ),
    "a remote workflow": changed_by(finetuning__run_configuration={"endpoint": "http://127.0.0.1:9"}),
    "NAT's own blocks": changed_by(
        trajectory_builders__b={"_type": "openpipe_art_traj_builder"},
        trainer_adapters__a={"_type": "openpipe_art_trainer_adapter", "backend": {"base_model": "x/y"}},
        trainers__t={"_type": "openpipe_art_trainer", "planning": "stream"},
    ),
    "NAT's own pairs": changed_by(
        trajectory_builders__b={"_type": "dpo_traj_builder"},
        trainer_adapters__a={
            "_type": "openpipe_art_trainer_adapter",
            "algorithm": {"name": "dpo"},
            "backend": {"base_model": "x/y"},
        },
    ),
    "NAT's own pairs, epoch by epoch": changed_by(
        trajectory_builders__b={"_type": "dpo_traj_builder"},
        trainer_adapters__a__algorithm={"name": "dpo"},
        trainers__t={"_type": "openpipe_art_trainer", "planning": "submitted"},
    ),
    "another package's builder": changed_by(
        trajectory_builders__b={"_type": "test_other_builder"}, trainers__t__planning="submitted"
    ),
    "another package's trainer": changed_by(trainers__t={"_type": "test_other_trainer"}),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_key_that_is_added_to_a_configuration_is_added_to_thetable_of(name: str) -> None:
    assert unlisted(name) == set()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_key_has_an_effect_or_is_refused_or_logged(
    base: dict[str, Any], variant: str, caplog: pytest.LogCaptureFixture
) -> None:
    written = VARIANTS[variant](base)
    before = effects_of(config_file.resolve(written))
    silent = [key for key, value in table_of(written).items() if answer(written, before, key, value, caplog) == ""]
    assert not silent, f"{variant}: " + ", ".join(silent)


def test_every_key_has_an_effect_somewhere(base: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    keys: set[str] = set()
    effective: set[str] = set()
    for change in VARIANTS.values():
        written = change(base)
        before, table = effects_of(config_file.resolve(written)), table_of(written)
        keys |= table.keys()
        left = {key: value for key, value in table.items() if key not in effective}
        effective |= {key for key, value in left.items() if answer(written, before, key, value, caplog) == "effect"}
    assert (sorted(keys - effective - NEVER_USED - REFUSED), sorted(NEVER_USED & effective)) == ([], [])


READERS: dict[type[BaseModel], tuple[str, ...]] = {
    JobSettings: ("learner", "schemas/algorithms.py", "schemas/algorithm_settings.py"),
    PlanSettings: ("processors", "harness/components", "schemas/events/recorded.py"),
    RolloutSettings: ("producers", "processors"),
    services.ProducerSettings: ("producers", "eventlog", "schemas"),
    services.EndpointSettings: ("producers", "eventlog", "schemas"),
    services.ProcessorSettings: ("processors", "eventlog", "schemas"),
    services.LearnerSettings: ("learner", "eventlog", "schemas"),
    services.TrackerServiceSettings: ("metrics", "eventlog", "schemas"),
    KafkaSettings: ("eventlog", "schemas"),
}


@pytest.mark.parametrize("settings", READERS, ids=lambda model: model.__name__)
def test_every_resolved_setting_is_read_by_its_service(settings: type[BaseModel]) -> None:
    text = "\n".join(_sources(READERS[settings]))
    fields = {part for key in keys_of(settings) for part in key.split(".")}
    assert [name for name in sorted(fields) if not re.search(rf"\.{name}\b|\"{name}\"", text)] == []


def _sources(folders: tuple[str, ...]) -> Iterator[str]:
    for folder in folders:
        paths = sorted((ROOT / folder).rglob("*.py")) or [ROOT / folder]
        yield from (path.read_text() for path in paths if path.name != "settings.py")
