"""Components by the type of their configuration: what is refused, what is found, and how it is built and let go of."""

import asyncio
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rollstream.harness.components.build import Builder, Components, as_component_error, components_of
from rollstream.harness.components.interfaces import Trainer, TrainerAdapter, TrajectoryBuilder
from rollstream.harness.config import registry
from rollstream.harness.config.components import RollstreamTrajectoryBuilderConfig
from rollstream.harness.config.registry import register_trainer, register_trainer_adapter, register_trajectory_builder
from rollstream.harness.config.resolve import block_of
from rollstream.producers.protocols import table as protocols
from rollstream.producers.rollout import registry as environments
from rollstream.producers.rollout import user_code as users_code
from rollstream.producers.rollout.registry import environment
from rollstream.schemas.errors import ComponentError, ConfigError
from rollstream.schemas.finetuning import (
    FinetuneConfig,
    FinetuneRunConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from rollstream.schemas.permissions import NOTHING

pytestmark = pytest.mark.usefixtures("registered_alone")


class MyTrainerConfig(TrainerConfig, name="my_trainer"):
    number: int = 1


class MyBuilderConfig(TrajectoryBuilderConfig, name="my_builder"):
    pass


class MyAdapterConfig(TrainerAdapterConfig, name="my_adapter"):
    pass


class File(BaseModel):
    """The file that a run's configuration names."""

    trainers: dict[str, Any]
    trajectory_builders: dict[str, Any]
    trainer_adapters: dict[str, Any]


def concrete(interface: type) -> Any:
    return type("Concrete", (interface,), dict.fromkeys(interface.__abstractmethods__, lambda self: None))


def test_our_own_types_and_their_aliases_are_known() -> None:
    assert {"rollstream", "openpipe_art_trainer"} <= set(registry.config_types("trainers"))
    builders = {"rollstream", "openpipe_art_traj_builder", "dpo_traj_builder"}
    assert builders <= set(registry.config_types("trajectory_builders"))
    assert {"rollstream", "openpipe_art_trainer_adapter"} <= set(registry.config_types("trainer_adapters"))


def test_a_type_is_the_name_of_its_configuration_class() -> None:
    @register_trainer(config_type=MyTrainerConfig)
    async def build(config: MyTrainerConfig, builder: Builder) -> Any:
        yield concrete(Trainer)(config)

    assert registry.config_types("trainers")["my_trainer"] is MyTrainerConfig
    register_trainer(config_type=MyTrainerConfig)(build)  # once more, the same


def test_a_name_registered_twice_is_refused_with_the_known_names() -> None:
    class Same(TrainerConfig, name="rollstream"):
        pass

    async def build(config: Any, builder: Any) -> Any:
        yield None

    with pytest.raises(ConfigError, match=r"trainer 'rollstream' is registered twice: by .*registered: .*openpipe_art"):
        register_trainer(config_type=Same)(build)


def test_a_function_that_returns_is_refused_with_the_remedy() -> None:
    async def build(config: Any, builder: Any) -> Any:
        return None

    with pytest.raises(ConfigError, match=r"build: must be an async generator .*`yield` instead of `return`"):
        register_trainer(config_type=MyTrainerConfig)(build)


def test_a_configuration_without_a_name_or_of_another_kind_is_refused() -> None:
    class Nameless(MyTrainerConfig):
        pass

    async def build(config: Any, builder: Any) -> Any:
        yield None

    with pytest.raises(ConfigError, match="Nameless has no name"):
        register_trainer(config_type=Nameless)(build)
    with pytest.raises(ConfigError, match=r"needs a subclass of TrainerAdapterConfig, not .*\.MyTrainerConfig"):
        register_trainer_adapter(config_type=MyTrainerConfig)  # pyright: ignore[reportArgumentType]


async def a_function(config: Any, builder: Any) -> Any:
    yield None


@pytest.mark.parametrize("register", [register_trainer, register_trajectory_builder, register_trainer_adapter])
@pytest.mark.parametrize("bare", [a_function, functools.partial(a_function), File, a_function(None, None)])
def test_a_decorator_without_its_configuration_class_is_refused_at_once(register: Any, bare: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^@{register.__name__} needs a subclass of .*; write @{register.__name__}\(YOUR_CLASS\)$"
    ):
        register(bare)


def test_a_factory_may_be_a_partial_function() -> None:
    register_trainer(config_type=MyTrainerConfig)(functools.partial(a_function))
    with pytest.raises(ConfigError, match=r"registered twice: by tests\..*\.a_function and by tests\..*\.a_function"):
        register_trainer(config_type=MyTrainerConfig)(functools.partial(a_function))


def test_a_package_that_cannot_be_imported_is_skipped_and_named_in_later_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_components.py").write_text("raise RuntimeError('no GPU')")
    (tmp_path / "good_components.py").write_text("LOADED = True")
    folder = tmp_path / "demo-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[rollstream.components]\nbroken = broken_components\ngood = good_components\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.discover(again=True)
    assert "no GPU" in users_code.failed_imports["broken"]
    assert sys.modules["good_components"].LOADED
    with pytest.raises(
        ConfigError, match=r"environment 'brokne' is unknown; .*; components of broken .* cannot be imported: .*no GPU"
    ):
        environment("brokne", NOTHING)
    del users_code.failed_imports["broken"]


REGISTERING = {
    "environment": """
from rollstream.harness import register_environment
@register_environment("of_two_packages")
async def play(session): ...
""",
    "reward": """
from rollstream.harness import register_reward
@register_reward("of_two_packages")
def score(rollout): ...
""",
    "protocol": """
from rollstream.producers.protocols.builtin import Nip
from rollstream.producers.protocols.table import register_protocol
@register_protocol("of_two_packages")
class Asked(Nip): ...
""",
    "trainer": """
from rollstream.harness import register_trainer
from rollstream.schemas.finetuning import TrainerConfig
class Config(TrainerConfig, name="of_two_packages"): ...
@register_trainer(Config)
async def build(config, builder): yield None
""",
}


@pytest.mark.parametrize("what", REGISTERING)
def test_a_name_of_two_packages_is_reported_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    for module, tables in ((environments, ("_environments", "_rewards")), (protocols, ("_protocols",))):
        for table in tables:
            monkeypatch.setattr(module, table, dict(getattr(module, table)))
    monkeypatch.syspath_prepend(str(tmp_path))
    for number in (1, 2):
        module, folder = f"{what}_package_{number}", tmp_path / f"{what}s_{number}-1.0.dist-info"
        (tmp_path / f"{module}.py").write_text(REGISTERING[what])
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {what}s-{number}\nVersion: 1.0\n")
        (folder / "top_level.txt").write_text(module)
        (folder / "entry_points.txt").write_text(f"[rollstream.components]\n{module} = {module}\n")
    registry.discover(again=True)
    (failed,) = [name for name in users_code.failed_imports if name.startswith(what)]
    message = users_code.failed_imports.pop(failed)
    order = (1, 2) if failed.endswith("2") else (2, 1)
    one, other = (rf"by {what}_package_{number}\.\w+ of {what}s-{number}" for number in order)
    remedy = "rename one of them, or uninstall the package of one"
    assert re.search(f"{what} 'of_two_packages' is registered twice: {one} and {other}; {remedy}", message), message


@pytest.fixture
def finetune() -> FinetuneConfig:
    file = File(
        trainers={"t": MyTrainerConfig()},
        trajectory_builders={"b": MyBuilderConfig()},
        trainer_adapters={"a": MyAdapterConfig()},
    )
    run = FinetuneRunConfig(config_file=file)
    return FinetuneConfig(enabled=True, trainer="t", trajectory_builder="b", trainer_adapter="a", run_configuration=run)


def register_all(happened: list[str]) -> None:
    def builds(name: str, interface: type) -> Any:
        async def build(config: Any, builder: Builder) -> Any:
            happened.append(f"{name} in {builder.workspace}")
            try:
                yield concrete(interface)(config)
            finally:
                happened.append(f"{name} out")

        return build

    register_trainer(config_type=MyTrainerConfig)(builds("trainer", Trainer))
    register_trajectory_builder(config_type=MyBuilderConfig)(builds("builder", TrajectoryBuilder))
    register_trainer_adapter(config_type=MyAdapterConfig)(builds("adapter", TrainerAdapter))


async def built(finetune: FinetuneConfig, work: Callable[[Components], None] = lambda components: None) -> None:
    async with components_of(finetune, Path("w")) as components:
        work(components)


def test_components_are_let_go_of_when_the_run_is_over(finetune: FinetuneConfig) -> None:
    happened: list[str] = []
    register_all(happened)

    def work(components: Components) -> None:
        trainer, builder, adapter = components
        assert isinstance(trainer, Trainer)
        assert isinstance(builder, TrajectoryBuilder)
        assert isinstance(adapter, TrainerAdapter)
        assert trainer.trainer_config is block_of(finetune, "trainer")
        happened.append("run")
        raise LookupError("run")

    with pytest.raises(LookupError, match="run"):
        asyncio.run(built(finetune, work))
    assert happened == [
        *("adapter in w", "builder in w", "trainer in w", "run"),
        *("trainer out", "builder out", "adapter out"),
    ]


def test_our_blocks_and_those_derived_from_them_are_given_the_commands_workspace(finetune: FinetuneConfig) -> None:
    class DerivedConfig(RollstreamTrajectoryBuilderConfig, name="derived_builder"):
        pass

    happened: list[str] = []
    register_all(happened)
    registry.trajectory_builders[DerivedConfig] = registry.trajectory_builders[MyBuilderConfig]
    derived = DerivedConfig(workspace=Path("elsewhere"))
    assert finetune.run_configuration is not None
    assert isinstance(finetune.run_configuration.config_file, File)
    finetune.run_configuration.config_file.trajectory_builders["b"] = derived
    asyncio.run(built(finetune))
    assert derived.workspace == Path("w")


def test_a_builder_that_yields_nothing_or_another_kind_is_named_by_its_path(finetune: FinetuneConfig) -> None:
    register_all([])

    async def nothing(config: Any, builder: Any) -> Any:
        if config is None:
            yield None

    async def number(config: Any, builder: Any) -> Any:
        yield 1

    for build, reported in (
        (nothing, "nothing yields nothing; it must yield one component"),
        (number, "yields a int; it must yield a Trainer"),
    ):
        registry.trainers[MyTrainerConfig] = build
        with pytest.raises(ConfigError, match=rf"^trainers.t: .*{reported}"):
            asyncio.run(built(finetune))


def test_an_exception_in_a_component_is_one_line_with_path_file_and_line(finetune: FinetuneConfig) -> None:
    register_all([])

    async def broken(config: Any, builder: Any) -> Any:
        yield {}[config.type]

    class Strange(concrete(Trainer)):
        async def initialize(self, run_config: FinetuneConfig) -> None:
            raise ValueError("what\nis this")

    async def run() -> None:
        with as_component_error("components", finetune):
            async with components_of(finetune, Path("w")) as components:
                await components.trainer.initialize(finetune)

    async def strange(config: Any, builder: Any) -> Any:
        yield Strange(config)

    async def cancelling(config: Any, builder: Any) -> Any:
        yield await asyncio.gather(cancelled())

    async def cancelled() -> None:
        raise asyncio.CancelledError("Cancelled by cancel scope 7f")

    for build, reported in (
        (broken, r"KeyError \(test_registry\.py line \d+, in broken\): 'my_trainer'"),
        (cancelling, "cancelled itself; catch CancelledError in it"),
        (strange, r"ValueError \(test_registry\.py line \d+, in initialize\): what\nis this"),
    ):
        registry.trainers[MyTrainerConfig] = build
        with pytest.raises(ComponentError, match=rf"^trainers.t: {reported}"):
            asyncio.run(run())


def test_a_reference_that_names_nothing_is_named_with_what_is_defined(finetune: FinetuneConfig) -> None:
    register_all([])
    finetune.trainer = "tt"
    with pytest.raises(ConfigError, match=r"finetuning.trainer: trainer 'tt' is not defined; choose one of: t"):
        asyncio.run(built(finetune))


def test_a_block_that_nothing_is_registered_for_is_named(finetune: FinetuneConfig) -> None:
    with pytest.raises(ConfigError, match=r"trainer_adapters.a: no component is registered for MyAdapterConfig"):
        asyncio.run(built(finetune))
