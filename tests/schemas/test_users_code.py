"""Code of users by name: one form of error, with the place and the remedy, and its traceback in the log."""

import importlib
import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from rollstream.harness.config.blocks import model_of
from rollstream.learner.algorithms import table as algorithms
from rollstream.producers.protocols import table as protocols
from rollstream.producers.rollout import registry
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.permissions import Permissions
from rollstream.schemas.users_code import import_module, import_named, load_installed

DEEP = "def outer():\n    inner()\n\n\ndef inner():\n    raise KeyError('no GPU')\n\n\nouter()\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    return write


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def allowing(name: str) -> Permissions:
    return Permissions(frozenset({name}))


@pytest.mark.parametrize(
    ("location", "resolve"),
    [
        ("algorithm.name", lambda name: algorithms.algorithm(name, allowing(name))),
        ("protocol", protocols.protocol),
        ("environment", lambda name: registry.environment(name, allowing(name))),
        ("reward", lambda name: registry.reward(name, allowing(name))),
        ("trainers.t._type", lambda name: model_of({"trainers": {"t": {"_type": name}}})),
    ],
)
def test_a_module_that_raises_two_calls_deep_is_reported_alike_by_all_who_import_it(
    location: str,
    resolve: Callable[[str], object],
    module: Callable[[str, str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    module("raises_deep", DEEP)
    with caplog.at_level(logging.INFO):
        assert message_of(lambda: resolve("python:raises_deep.Thing")) == (
            f"{location}: python:raises_deep.Thing: module raises_deep cannot be imported: KeyError (raises_deep.py "
            "line 6, in inner): 'no GPU'; correct the module, the log of this process has the traceback"
        )
    for line in ("line 9, in <module>", "line 2, in outer", "line 6, in inner"):
        assert line in caplog.text


def test_the_remedy_depends_on_what_is_missing(module: Callable[[str, str], str]) -> None:
    module("imports_other", "import not_there.inner\n")
    assert message_of(lambda: import_module("imports_other", "modules")).endswith(
        "No module named 'not_there'; install not_there, or remove its import"
    )
    assert message_of(lambda: import_module("not_there.inner", "modules")).endswith(
        "; correct its name, install its package, or start the command in its folder"
    )


def test_a_name_that_is_not_a_path_or_not_in_its_module_is_reported(module: Callable[[str, str], str]) -> None:
    module("has_score", "score = 1\n")
    assert import_named("python:has_score.score", "reward") == 1
    assert message_of(lambda: import_named("python:score", "reward", "score")) == (
        "reward: 'python:score' is not a valid path; write python:module.score"
    )
    assert message_of(lambda: import_named("python:has_score.scores", "reward")) == (
        "reward: python:has_score.scores: module has_score has no 'scores'; did you mean score?"
    )
    assert message_of(lambda: import_named("python:has_score.zzz", "reward")) == (
        "reward: python:has_score.zzz: module has_score has no 'zzz'; define it there, or correct the name"
    )


def test_an_entry_point_whose_module_raises_is_reported_alike(module: Callable[[str, str], str]) -> None:
    module("raises_deep_too", DEEP)
    entry_point = EntryPoint("mine", "raises_deep_too:Mine", "rollstream.algorithms")
    assert message_of(lambda: load_installed(entry_point, "algorithm.name: mine")) == (
        "algorithm.name: mine cannot be imported: KeyError (raises_deep_too.py line 6, in inner): 'no GPU'; correct "
        "the module, the log of this process has the traceback"
    )


@pytest.mark.parametrize(
    ("package", "decorator", "needed"),
    [
        ("producers.rollout.registry", "register_reward", 'a name; write @register_reward("brevity")'),
        ("producers.rollout.registry", "register_environment", 'a name; write @register_environment("brevity")'),
        ("producers.protocols.table", "register_protocol", 'a name; write @register_protocol("brevity")'),
        (
            "harness.config.registry",
            "register_trainer_adapter",
            "a subclass of TrainerAdapterConfig, not without_parentheses_register_trainer_adapter.brevity; write "
            "@register_trainer_adapter(YOUR_CLASS)",
        ),
    ],
)
def test_a_decorator_without_parentheses_is_refused_where_it_stands(
    package: str, decorator: str, needed: str, module: Callable[[str, str], str]
) -> None:
    name = f"without_parentheses_{decorator}"
    source = f"from rollstream.{package} import {decorator}\n\n\n@{decorator}\ndef brevity(rollout):\n    return 1.0\n"
    module(name, source)
    message = message_of(lambda: import_named(f"python:{name}.brevity", "reward"))
    assert f"{name}.py line 4, in <module>: @{decorator} needs {needed}; correct the module" in message


def test_an_error_names_the_file_that_has_its_traceback(
    module: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module("raises_for_a_file", DEEP)
    to_file = logging.FileHandler(tmp_path / "finetune.log", delay=True)
    monkeypatch.setattr(logging.root, "handlers", [to_file])
    message = message_of(lambda: import_module("raises_for_a_file", "modules"))
    assert message.endswith(f"correct the module, {tmp_path}/finetune.log has the traceback")
    to_file.close()
