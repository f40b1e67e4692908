"""`engine:` of a run's file: each kind's own settings, checked before the run begins; a record imports no engine."""

import asyncio
import contextlib
import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import Qwen3MoeConfig

from rollstream.eventlog.artifacts import ArtifactStore
from rollstream.eventlog.memory.log import MemoryLog
from rollstream.harness.config import checks
from rollstream.harness.config import file as config_file
from rollstream.harness.config.jobs import RunLocation, services_of
from rollstream.harness.replays.what_if import what_if
from rollstream.harness.runs.plan import open_run
from rollstream.harness.runs.sampling_checks import check_engines, check_models
from rollstream.replay.source import read_run
from rollstream.schemas.engine_settings import ScriptedSettings, TransformersSettings
from rollstream.schemas.errors import ArtifactError, ConfigError
from rollstream.schemas.kafka import KafkaSettings
from rollstream.schemas.services import EndpointSettings, ProducerSettings
from tests.rigs.installed_engine import PARROT, install

LEAGUE = Path(__file__).parents[3] / "examples" / "tic_tac_toe_league.yaml"


def with_engine(written: dict[str, Any], engine: Any) -> dict[str, Any]:
    changed = copy.deepcopy(written)
    changed["trajectory_builders"]["b"]["engine"] = engine
    return changed


def test_an_engine_is_configured_by_its_kind(written: dict[str, Any]) -> None:
    def engine(**block: Any) -> Any:
        return config_file.resolve(
            with_engine(written, block), {"THREADS": "2", "PARROT_KEY": "x"}
        ).config.builder.engine

    assert engine() == TransformersSettings()
    assert engine(threads="${THREADS}") == TransformersSettings(threads=2)
    assert engine(kind="scripted", max_batch=3) == ScriptedSettings(max_batch=3)
    installed = engine(kind="parrot", api_key="${PARROT_KEY}", num_tokens="${THREADS}")
    assert installed.model_dump() == {"kind": "parrot", "api_key": "${PARROT_KEY}", "num_tokens": "${THREADS}"}


@pytest.mark.parametrize(
    ("engine", "reported"),
    [
        ({"treads": 1}, "trajectory_builders.b.engine.treads: unknown key; did you mean threads?"),
        ({"threads": 0}, "trajectory_builders.b.engine.threads: is 0; input should be greater than or equal to 1"),
        ({"kind": 3}, "trajectory_builders.b.engine.kind: is 3; input should be a valid string"),
        (
            "scripted",
            "trajectory_builders.b.engine: is 'scripted'; expected a mapping; write `engine: {kind: ",
        ),
        ({"kind": "parrot", "api_key": "sesame"}, "trajectory_builders.b.engine.api_key: secrets are not allowed"),
    ],
)
def test_a_wrong_key_of_an_engine_is_named(written: dict[str, Any], engine: Any, reported: str) -> None:
    wrong = with_engine(written, engine)

    def read() -> None:
        checks.check_values(wrong)
        config_file.resolve(wrong)

    with pytest.raises(ConfigError) as refused:
        read()
    assert str(refused.value).startswith(reported)


def test_keys_that_an_engine_does_not_use_are_reported(written: dict[str, Any], caplog: Any) -> None:
    checks.forget()
    config_file.resolve(with_engine(written, {"kind": "scripted", "max_batch": 3}))
    assert "trajectory_builders.b.engine: max_batch: accepted, but ignored here" in caplog.text


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed package with an engine; gives its module's name."""
    name = "harness_parrot"
    install(tmp_path, name, PARROT, parrot="PARROT")
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(name, None)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.usefixtures("parrot")
def test_engines_are_looked_up_before_a_run_begins(written: dict[str, Any]) -> None:
    def check(engine: dict[str, Any], **builder: Any) -> None:
        config = config_file.resolve(with_engine(written, engine)).config
        check_engines(config.model_copy(update={"builder": config.builder.model_copy(update=builder)}))

    check({})
    check({"kind": "parrot", "num_tokens": 2})
    with pytest.raises(
        ConfigError, match=r"^trajectory_builders\.b\.engine: openai cannot load the weights of the run"
    ):
        check({"kind": "openai", "base_url": "http://h/v1"})
    with pytest.raises(ConfigError, match=r"^trajectory_builders\.b\.engine\.num_tokens: "):
        check({"kind": "parrot", "num_tokens": "two"})
    with pytest.raises(
        ConfigError,
        match=r"^trajectory_builders\.b\.engine\.kind: 'parot' is unknown; did you mean parrot\? "
        r"known kinds: openai, parrot, scripted, transformers, vllm$",
    ):
        check({"kind": "parot"})
    check({"kind": "parot"}, services="external")
    written["trainer_adapters"]["a"]["endpoint"] = {"engine": {"kind": "openai", "base_url": "http://h/v1"}}
    with pytest.raises(
        ConfigError, match=r"^trainer_adapters\.a\.endpoint\.engine: openai cannot load the weights of th"
    ):
        check({})


UNUSED = """
    def unused(self, *, has_adapters=True, has_full_weights=True):
        why = f"{has_adapters=}, {has_full_weights=} and says {self.api_key}; remove it"
        return {why: ("num_tokens",)} if "num_tokens" in self.model_fields_set else {}

"""


@pytest.fixture
def picky_parrot(parrot: str, tmp_path: Path) -> None:
    """The package, whose settings class names the unused ones of its keys."""
    key = '    api_key: str = ""\n'
    (tmp_path / f"{parrot}.py").write_text(PARROT.replace(key, f"{key}{UNUSED}"))


@pytest.mark.usefixtures("picky_parrot")
def test_an_installed_engine_is_asked_for_unused_keys_before_a_run_begins(
    written: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARROT_KEY", "sesame")
    engine = {"kind": "parrot", "api_key": "${PARROT_KEY}"}
    written["trainer_adapters"]["a"]["endpoint"] = {"engine": engine | {"num_tokens": 2}}
    checks.forget()
    check_engines(config_file.resolve(with_engine(written, engine)).config)
    check_engines(config_file.resolve(with_engine(written, engine | {"num_tokens": 1})).config)
    ignored = "accepted, but ignored here (has_adapters=False, has_full_weights=True and says ${PARROT_KEY}; remove"
    assert [one.getMessage().split(" it)")[0] for one in caplog.records if "ignored here" in one.getMessage()] == [
        f"trainer_adapters.a.endpoint.engine: num_tokens: {ignored}",
        f"trajectory_builders.b.engine: num_tokens: {ignored}",
    ]


@pytest.mark.usefixtures("picky_parrot")
def test_an_installed_engine_whose_unused_keys_cannot_be_asked_for_is_named(
    written: dict[str, Any], parrot: str, tmp_path: Path
) -> None:
    source = (tmp_path / f"{parrot}.py").read_text()
    (tmp_path / f"{parrot}.py").write_text(source.replace("*, has_adapters=True, has_full_weights=True", ""))
    message = (
        r"^trajectory_builders\.b\.engine: kind 'parrot' cannot report its unused keys: TypeError .*; correct the pac"
    )
    with pytest.raises(ConfigError, match=message):
        check_engines(config_file.resolve(with_engine(written, {"kind": "parrot"})).config)


@pytest.mark.usefixtures("parrot")
def test_an_installed_engine_that_loads_no_weights_is_refused(
    written: dict[str, Any], parrot: str, tmp_path: Path
) -> None:
    key = '    api_key: str = ""\n'
    (tmp_path / f"{parrot}.py").write_text(PARROT.replace(key, f"{key}    LOADS_WEIGHTS = False\n"))
    with pytest.raises(
        ConfigError, match=r"^trajectory_builders\.b\.engine: parrot cannot load the weights of the run"
    ):
        check_engines(config_file.resolve(with_engine(written, {"kind": "parrot"})).config)


@pytest.mark.usefixtures("parrot")
def test_the_device_of_an_installed_engine_is_its_own(written: dict[str, Any]) -> None:
    check_models(config_file.resolve(with_engine(written, {"kind": "parrot", "device": ["xpu", 1]})).config)
    with pytest.raises(ConfigError, match=r"^trajectory_builders\.b\.engine\.device is cuda:77 and "):
        check_models(config_file.resolve(with_engine(written, {"kind": "transformers", "device": "cuda:77"})).config)


def test_a_renderer_that_no_package_has_is_refused(written: dict[str, Any]) -> None:
    written["trajectory_builders"]["b"]["renderer"] = "qwen33"
    with pytest.raises(ConfigError, match=r"^trajectory_builders\.b\.renderer qwen33: .*qwen3"):
        check_engines(config_file.resolve(written).config)


LORA = {"rank": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("adapter", "builder", "message"),
    [
        (
            {"max_staleness": 3},
            {},
            r"engine\.max_loras: 4 is too few for .*: max_staleness 3 \+ 2 for .* make 5; raise it$",
        ),
        (
            {},
            {"max_lora_rank": 8, "rank": 16},
            r"^trainer_adapters\.a\.model\.lora\.rank: 16 is above .* 8; raise that$",
        ),
        ({"lora": {"use_dora": True}}, {}, r"use_dora: vLLM takes DoRA for LoRA; leave it out"),
        ({"lora": {"target_modules": ["q_proj", "lm_head"]}}, {}, r"target_modules: lm_head: vLLM drops adapters of"),
        ({}, {"arguments": ["--data-parallel-size=2"]}, r"--data-parallel-size=2 is not for a server that is started"),
        ({}, {"arguments": ["-asc", "2"]}, r"-asc is not for a server that is started here; .* one API server"),
        ({}, {"executable": "/not/there"}, r"engine\.executable: '/not/there' is not found; give the command vllm"),
        ({}, {"temperature": 0.005}, r"^trajectory_builders\.b\.sampling\.temperature 0\.005: vLLM samples at 0\.01"),
        ({}, {"top_p": 0.9}, r"^trajectory_builders\.b\.sampling: with top_p, .*; set top_k, such as 50, or "),
    ],
)
def test_settings_that_vllm_refuses_or_ignores_are_refused_before_the_run(
    written: dict[str, Any], adapter: dict[str, Any], builder: dict[str, Any], message: str
) -> None:
    """Refused in one line, before anything is started; without the odd key all is well."""

    def check(adapter: dict[str, Any], engine: dict[str, Any]) -> None:
        lora = LORA | adapter.pop("lora", {}) | {key: engine.pop(key) for key in ("rank",) if key in engine}
        sampling = {key: engine.pop(key) for key in ("top_p", "temperature") if key in engine}
        config = with_engine(written, {"kind": "vllm", "executable": sys.executable, **engine})
        config["trajectory_builders"]["b"].setdefault("sampling", {}).update(sampling)
        block = config["trainer_adapters"]["a"]
        block.update(adapter)
        block["model"] = {**block["model"], "lora": lora}
        check_engines(config_file.resolve(config).config)

    check({}, {})
    with pytest.raises(ConfigError, match=message) as refused:
        check(copy.deepcopy(adapter), dict(builder))
    assert "\n" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match any targeted module")
@pytest.mark.parametrize(
    ("modules", "is_refused"),
    [
        (["q_proj", "o_proj"], False),
        (["q_proj", "down_proj"], True),
        (["q_proj", "gate_proj", "up_proj", "down_proj"], True),
    ],
)
def test_adapters_on_experts_in_one_tensor_are_refused_for_vllm_before_the_run(
    written: dict[str, Any], modules: list[str], is_refused: bool
) -> None:
    sizes: dict[str, Any] = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    model = written["trainer_adapters"]["a"]["model"]
    Qwen3MoeConfig(vocab_size=102, hidden_size=32, **sizes, **experts).save_pretrained(model["path"])
    model["lora"] = {"target_modules": modules}
    config = config_file.resolve(with_engine(written, {"kind": "vllm", "executable": sys.executable})).config
    named = (
        rf"^trainer_adapters\.a\.model\.lora\.target_modules: {', '.join(modules)}: of model .* include experts, and "
    )
    expected = pytest.raises(ConfigError, match=named + ".* name some of k_proj, o_proj, q_proj, v_proj, or use anoth")
    with expected if is_refused else contextlib.nullcontext():
        check_engines(config)


@pytest.mark.parametrize("text", ["[]", '{"model_type": "qwen2", "_attn_implementation": "flash_attention_2"}'])
def test_a_model_whose_layers_cannot_be_read_here_is_left_to_the_services(written: dict[str, Any], text: str) -> None:
    model = written["trainer_adapters"]["a"]["model"]
    (Path(model["path"]) / "config.json").write_text(text)
    model["lora"] = {"target_modules": ["q_proj"]}
    check_engines(config_file.resolve(with_engine(written, {"kind": "vllm", "executable": sys.executable})).config)


@pytest.mark.parametrize(
    ("league", "lora", "is_refused"),
    [
        ({}, None, True),
        ({"frozen": [0], "pool": 0}, None, True),
        ({"seats": ["O"]}, None, True),
        ({"pool": 0}, None, False),
        ({"latest_ratio": 1}, None, False),
        ({}, LORA, False),
    ],
)
def test_a_league_whose_versions_would_need_a_vllm_server_each_is_refused_before_the_run(
    league: dict[str, Any], lora: dict[str, Any] | None, is_refused: bool
) -> None:
    config = yaml.safe_load(LEAGUE.read_text())
    (builder,), (adapter,) = config["trajectory_builders"].values(), config["trainer_adapters"].values()
    builder["engine"] = {"kind": "vllm", "executable": sys.executable, "max_loras": 9}
    builder["league"] = {"scripted": ["random"], **league}
    if lora is not None:
        adapter["model"]["lora"] = lora
    expected = pytest.raises(ConfigError, match=r"\.league: past versions of policy would need a vLLM server each")
    with expected if is_refused else contextlib.nullcontext():
        check_engines(config_file.resolve(config).config)


@pytest.mark.usefixtures("parrot")
def test_the_engine_of_an_endpoint_is_looked_up_too(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["endpoint"] = {"engine": {"kind": "parrot", "num_token": 1}}
    with pytest.raises(ConfigError, match=r"^trainer_adapters\.a\.endpoint\.engine\.num_token: unknown key; did you"):
        check_engines(config_file.resolve(written).config)


@pytest.mark.parametrize(
    ("lora", "engine", "expected"),
    [
        (None, {"executable": "/nowhere/vllm"}, r"\.executable: '/nowhere/vllm' is not found"),
        ({"rank": 128}, {"executable": "sh"}, r": trainer_adapters\.a\.model\.lora\.rank: 128 is above"),
        ({"use_dora": True}, {"executable": "sh"}, r": trainer_adapters\.a\.model\.lora\.use_dora: vLLM takes DoRA"),
    ],
)
def test_the_engine_of_an_endpoint_is_checked_as_that_of_a_builder(
    written: dict[str, Any], lora: dict[str, Any] | None, engine: dict[str, Any], expected: str
) -> None:
    adapter = written["trainer_adapters"]["a"]
    adapter["endpoint"] = {"engine": {"kind": "vllm", **engine}}
    adapter["model"]["lora"] = lora
    with pytest.raises(ConfigError, match=rf"^trainer_adapters\.a\.endpoint\.engine{expected}"):
        check_engines(config_file.resolve(written).config)


def test_the_gpu_of_an_endpoint_is_on_this_machine(written: dict[str, Any]) -> None:
    written["trainer_adapters"]["a"]["endpoint"] = {"engine": {"kind": "transformers", "device": "cuda:77"}}
    with pytest.raises(ConfigError, match=r"^trainer_adapters\.a\.endpoint\.engine\.device is cuda:77"):
        check_models(config_file.resolve(written).config)


@pytest.mark.usefixtures("parrot")
def test_services_get_the_settings_of_an_engine_as_written(written: dict[str, Any], tmp_path: Path) -> None:
    engine = {"kind": "parrot", "api_key": "${PARROT_KEY}"}
    written["trainer_adapters"]["a"]["endpoint"] = {"engine": engine}
    config = config_file.resolve(with_engine(written, engine), {"PARROT_KEY": "sesame"}).config
    location = RunLocation(KafkaSettings(bootstrap_servers="b:1"), str(tmp_path), tmp_path)
    services = services_of(config, location, "run-1")
    for name, kind in (("producers-1", ProducerSettings), ("endpoint-1", EndpointSettings)):
        sent = services[name].model_dump_json()
        assert "sesame" not in sent
        assert kind.model_validate_json(sent).engine.model_dump() == engine


def test_a_stored_configuration_imports_no_engine(
    written: dict[str, Any], tmp_path: Path, script: SimpleNamespace, parrot: str
) -> None:
    stored = with_engine(written, {"kind": "parrot"})
    log = MemoryLog(num_partitions=2)
    asyncio.run(log.send(script.run_started().model_copy(update={"config": stored})))
    (tmp_path / "what_if.yaml").write_text("{}")

    async def ask() -> None:
        events = await read_run(log, "run-1")
        artifacts = ArtifactStore(str(tmp_path / "artifacts"))
        await what_if(
            log, events, artifacts, tmp_path / "what_if.yaml", checkpoints=tmp_path, on_progress=lambda _: None
        )

    with contextlib.suppress(ConfigError):
        asyncio.run(ask())
    with contextlib.suppress(ConfigError, ArtifactError):
        asyncio.run(open_run(log, ArtifactStore(str(tmp_path)), config_file.resolve(written), "run-1"))
    assert parrot not in sys.modules
