"""Engines by kind: what an installed package brings plays rollouts; what cannot be one is refused before any call."""

import asyncio
import logging
import sys
import uuid

import pytest

from rollstream.producers.engines.scripted import ScriptedEngine
from rollstream.producers.engines.table import MEMBERS, new_engine, settings_of
from rollstream.schemas.engine_settings import ENGINES, InstalledEngineSettings, ScriptedSettings
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.events import RolloutEnded
from rollstream.schemas.services import ProducerSettings
from tests.producers.conftest import GROUP, published, task_of
from tests.rigs.installed_engine import PARROT, install

HEAD = "from rollstream.producers import EngineKind\nfrom rollstream.schemas.services import EngineSettings\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(source, kind="NAME")`: a package with these entry points; gives its module's name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(source, **kinds):
        name = f"engine_{uuid.uuid4().hex}"
        install(tmp_path, name, source, **kinds)
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


def engine_block(**engine):
    """Settings of the engine as a producers process reads them."""
    settings = {"bootstrap_servers": "b:1", "artifact_uri": "a", "workspace": "w", "name": "p", "engine": engine}
    return ProducerSettings.model_validate_json(ProducerSettings.model_validate(settings).model_dump_json()).engine


def refused(env=None, **engine):
    with pytest.raises(ConfigError) as caught:
        new_engine(engine_block(**engine), env or {}, "builder.engine")
    return str(caught.value)


def test_an_engine_in_one_file_that_an_entry_point_names_plays_rollouts(installed, play, tmp_path):
    installed(PARROT, parrot="PARROT")
    engine = new_engine(engine_block(kind="parrot", num_tokens="${COUNT}"), {"COUNT": "3"})

    async def start():
        await engine.start()
        await engine.load(published(4), tmp_path)

    asyncio.run(start())
    played = play(task_of("guess_number", max_turns=2, sampling={"max_new_tokens": 8}), engine=engine)
    played.assert_complete()
    assert isinstance(played.last, RolloutEnded)
    calls = [step.llm for step in played.steps if step.llm]
    assert len(calls) == 2
    assert {(span.model_group, span.version, span.length) for call in calls for span in call.spans} == {(GROUP, 4, 3)}


def test_built_in_kinds_are_built_without_a_package():
    assert isinstance(new_engine(ScriptedSettings(), {}), ScriptedEngine)


def test_every_kind_of_the_table_has_settings_of_its_name_and_an_engine():
    needed: dict[str, dict[str, object]] = {"openai": {"base_url": "http://127.0.0.1:9/v1"}}
    for kind, settings in ENGINES.items():
        assert settings.model_fields["kind"].default == kind
        block = engine_block(kind=kind, **needed.get(kind, {}))
        assert type(block) is settings
        built = new_engine(block, {})
        assert f"{type(built).__module__}.".startswith(f"rollstream.producers.engines.{kind}.")
        asyncio.run(built.close())


def test_settings_are_those_of_the_kind_with_variables_expanded(installed):
    installed(PARROT, parrot="PARROT")
    block = engine_block(kind="parrot", api_key="${PARROT_KEY}")
    assert isinstance(block, InstalledEngineSettings)
    assert block.model_dump() == {"kind": "parrot", "api_key": "${PARROT_KEY}"}
    found = settings_of(block, {"PARROT_KEY": "sesame"})
    assert found.model_dump() == {"kind": "parrot", "num_tokens": 1, "api_key": "sesame"}
    assert "PARROT_KEY is not set" in refused(kind="parrot", api_key="${PARROT_KEY}")


def test_settings_that_do_not_fit_the_kind_are_named_without_secrets(installed):
    installed(PARROT, parrot="PARROT")
    assert refused(kind="parrot", num_token=2) == ("builder.engine.num_token: unknown key; did you mean num_tokens?")
    wrong = refused({"KEY": "sesame"}, kind="parrot", num_tokens="${KEY}")
    assert wrong.startswith("builder.engine.num_tokens: ")
    assert "sesame" not in wrong


def test_an_unknown_kind_is_refused_with_the_known_ones(installed):
    installed(PARROT, parrot="PARROT")
    assert refused(kind="parot") == (
        "builder.engine.kind: 'parot' is unknown; did you mean parrot? "
        "known kinds: openai, parrot, scripted, transformers, vllm"
    )


def test_a_package_that_cannot_be_imported_is_logged_with_its_traceback(installed, caplog):
    source = "def deep():\n    raise KeyError('no GPU')\n\n\ndeep()\n"
    module = installed(source, broken="KIND")
    with caplog.at_level(logging.INFO):
        message = refused(kind="broken")
    assert f"builder.engine.kind: 'broken' ({module}:KIND of {module}) cannot be imported: KeyError" in message
    assert f"{module}.py line 2, in deep" in message
    assert "in deep" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("source", "reported"),
    [
        (f"{PARROT}\nKIND = Parrot", "is a type; an EngineKind is expected"),
        (HEAD + "KIND = EngineKind(dict, print)", "a subclass of EngineSettings is expected"),
        (HEAD + "KIND = EngineKind(EngineSettings, 'x')", "build is 'x'; a plain function or a class is expected"),
        (HEAD + "async def make(s): ...\nKIND = EngineKind(EngineSettings, make)", "a plain function or a class"),
        (HEAD + "KIND = EngineKind(EngineSettings, lambda s: 1)", f"built a int, which lacks {', '.join(MEMBERS)}"),
        (
            HEAD + "def make(s):\n    raise OSError('no server')\nKIND = EngineKind(EngineSettings, make)",
            "cannot be built: OSError",
        ),
    ],
)
def test_an_invalid_engine_is_refused_before_any_call(installed, source, reported):
    installed(source, odd="KIND")
    assert reported in refused(kind="odd")


def test_a_method_that_is_not_async_is_refused_before_it_is_called(installed):
    source = PARROT.replace("async def generate", "def generate") + "\nKIND = EngineKind(ParrotSettings, Parrot)"
    installed(source, parrot="KIND")
    assert "built a Parrot, whose generate must be written with async def" in refused(kind="parrot")


def test_two_packages_of_one_kind_and_one_that_takes_a_built_in_name_are_refused(installed):
    first, second = installed(PARROT, parrot="PARROT"), installed(PARROT, parrot="PARROT", scripted="PARROT")
    reported = refused(kind="parrot")
    assert "'parrot' is brought by " in reported
    assert first in reported
    assert second in reported
    assert f"'scripted' is brought by rollstream and by {second}:PARROT of {second}" in refused(kind="scripted")


def test_a_kind_that_the_settings_do_not_name_is_not_imported(installed):
    module = installed("raise SystemExit(3)", other="KIND")
    new_engine(ScriptedSettings(), {})
    assert "known kinds: openai, other, scripted" in refused(kind="nonsense")
    assert module not in sys.modules
