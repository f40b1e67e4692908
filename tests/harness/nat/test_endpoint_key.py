"""The endpoint's API key on its way to whoever asks: by a file's path, and into NAT's own models."""

import contextlib
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from rollstream.harness.config.file import resolve
from rollstream.harness.nat.endpoint_key import give_key, warn_of_models_elsewhere
from rollstream.harness.runs.preflight import access_line, check_endpoint, token_of
from rollstream.harness.services.addresses import url_host
from rollstream.schemas.config import RunConfig
from rollstream.schemas.errors import ConfigError
from tests.rigs.runs.epochwise_rig import configuration

ELSEWHERE = "198.51.100.7"
"""An address for documentation, which no machine has."""


@pytest.fixture
def config_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunConfig]:
    """A run's configuration whose adapter has this `endpoint`."""
    written = configuration(tmp_path_factory.mktemp("files"))

    def make(**endpoint: Any) -> RunConfig:
        written["trainer_adapters"]["a"]["endpoint"] = {"port": 8765} | endpoint
        return resolve(written, {"MY_KEY": "own"}).config

    return make


@pytest.fixture
def own_names() -> list[str]:
    """Name and address of this machine in its network, as far as it has any."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ELSEWHERE, 9))  # sends nothing
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        socket.getaddrinfo(socket.gethostname(), None)
        found.append(socket.gethostname())
    return found


def nat_config(*urls_and_keys: tuple[str, str | None]) -> Any:
    llm = pytest.importorskip("nat.llm.openai_llm").OpenAIModelConfig
    llms = {
        f"llm-{number}": llm(model_name="policy", base_url=url, api_key=None if key is None else SecretStr(key))
        for number, (url, key) in enumerate(urls_and_keys)
    }
    return SimpleNamespace(run_configuration=SimpleNamespace(config_file=SimpleNamespace(llms=llms), endpoint=None))


def keys_of(nat: Any) -> list[str | None]:
    keys = [model.api_key for model in nat.run_configuration.config_file.llms.values()]
    return [None if key is None else key.get_secret_value() for key in keys]


def test_models_that_lead_to_the_endpoint_get_its_key_for_a_placeholder(tmp_path: Path, config_with: Any) -> None:
    nat = nat_config(
        ("http://127.0.0.1:8765/v1", "unused"),
        ("http://localhost:8765/v1", None),
        ("http://127.0.0.1:8765/v1", "my-own-key"),
        ("http://127.0.0.1:9999/v1", "unused"),
        ("http://example.com:8765/v1", None),
        ("http://[not-an-address", "none"),
    )
    give_key(nat, config_with(), tmp_path, {})
    token = (tmp_path / "endpoint-1.token").read_text()
    assert keys_of(nat) == [token, token, "my-own-key", "unused", None, "none"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0:0:0:0:0:0:0:0"])
def test_an_endpoint_on_all_addresses_is_known_by_the_names_of_this_machine(
    tmp_path: Path, config_with: Any, host: str, own_names: list[str]
) -> None:
    names = ("127.0.0.1", "127.0.0.2", "localhost", "[::1]", "0.0.0.0", "[::]", *own_names)
    ours = [f"http://{name}:8765/v1" for name in names]
    others = ["http://127.0.0.1:9999/v1", "http://example.invalid:8765/v1", f"http://{ELSEWHERE}:8765/v1"]
    nat = nat_config(*((url, "unused") for url in [*ours, *others]))
    give_key(nat, config_with(host=host), tmp_path, {})
    token = (tmp_path / "endpoint-1.token").read_text()
    assert keys_of(nat) == [token] * len(ours) + ["unused"] * len(others)


@pytest.mark.parametrize(
    ("host", "written"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fe80::1", "[fe80::1]"), ("10.0.0.5", "10.0.0.5"), ("gpu-1", "gpu-1")],
)
def test_a_url_names_an_address_that_can_be_asked(host: str, written: str) -> None:
    assert url_host(host) == written


def test_a_key_of_ones_own_is_given_on_and_without_a_key_nothing_is(
    tmp_path: Path, config_with: Any, monkeypatch: Any
) -> None:
    nat = nat_config(("http://127.0.0.1:8765/v1", "unused"))
    give_key(nat, config_with(token="${MY_KEY}"), tmp_path, {"MY_KEY": "own"})
    assert keys_of(nat) == ["own"]
    open_to_all = nat_config(("http://127.0.0.1:8765/v1", "unused"))
    give_key(open_to_all, config_with(requires_token=False), tmp_path, {})
    assert keys_of(open_to_all) == ["unused"]
    assert list(tmp_path.iterdir()) == []


def test_the_access_line_has_the_path_of_the_key_and_never_the_key(tmp_path: Path, config_with: Any) -> None:
    token = token_of(config_with(), tmp_path, {})
    assert token is not None
    path = tmp_path / "endpoint-1.token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    line = access_line(config_with(), tmp_path, {})
    assert line == f"endpoint 127.0.0.1:8765, API key in {path}"
    assert token not in line
    assert access_line(config_with(requires_token=False), tmp_path, {}).endswith("without an API key")
    assert access_line(config_with(token="${MY_KEY}"), tmp_path, {"MY_KEY": "x"}).endswith("API key as set")
    assert access_line(config_with().model_copy(update={"served": None}), tmp_path, {}) == ""


def test_a_token_in_plain_text_is_refused_before_anything_starts(
    config_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"^trainer_adapters\.a\.endpoint\.token: secrets are not allowed"):
        check_endpoint(config_with(token="secret", port=0))
    monkeypatch.setenv("MY_KEY", "secret")
    check_endpoint(config_with(token="${MY_KEY}", port=0))


def test_an_endpoint_beside_external_services_is_refused_by_its_path(config_with: Any) -> None:
    config = config_with()
    external = config.builder.model_copy(update={"services": "external"})
    with pytest.raises(ConfigError, match=r"^trainer_adapters\.a\.endpoint: services are external"):
        check_endpoint(config.model_copy(update={"builder": external}))


@pytest.mark.parametrize(
    ("section", "reported"),
    [
        ({"host": "0.0.0.0", "requires_token": False}, r"\.host 0\.0\.0\.0 is reachable from other machines; remove"),
        ({"token_file": Path("nowhere")}, r"\.token_file nowhere cannot be read"),
    ],
)
def test_an_endpoint_that_could_not_be_served_is_refused_for_a_new_run(
    config_with: Any, section: dict[str, Any], reported: str
) -> None:
    config = config_with(**section, port=0)
    with pytest.raises(ConfigError, match=rf"trainer_adapters\.\w+\.endpoint{reported}"):
        check_endpoint(config)
    check_endpoint(config, is_new=False)


def test_models_that_all_use_other_servers_are_a_warning_with_the_endpoints_address(
    config_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = nat_config(("http://127.0.0.1:9999/v1", "unused"), ("http://example.com/v1", None))
    warn_of_models_elsewhere(elsewhere, config_with())
    (record,) = caplog.records
    assert "set base_url to http://127.0.0.1:8765/v1 (llm-0: http://127.0.0.1:9999/v1, llm-1" in record.getMessage()
    caplog.clear()
    judge_and_policy = nat_config(("http://example.com/v1", None), ("http://localhost:8765/v1", "unused"))
    warn_of_models_elsewhere(judge_and_policy, config_with())
    elsewhere.run_configuration.endpoint = "http://workflow:8000"
    warn_of_models_elsewhere(elsewhere, config_with())
    assert caplog.records == []
