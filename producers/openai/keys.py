"""The endpoint's token: given by settings or environment, else random, in a file that only its owner can read."""

from collections.abc import Mapping
from pathlib import Path

from rollstream.eventlog.private import token_in
from rollstream.schemas.errors import ConfigError
from rollstream.schemas.services import LOOPBACK, EndpointSection, EndpointSettings
from rollstream.schemas.variables import expand

TOKEN_VARIABLE = "ROLLSTREAM_ENDPOINT_TOKEN"


def token_file(workspace: Path, name: str) -> Path:
    """The file of the random token of an endpoint whose settings have none."""
    return workspace / f"{name}.token"


def token_of(settings: EndpointSettings, env: Mapping[str, str]) -> str | None:
    """The token that requests must bear, made on first use where none is given; None: none. Raises ConfigError."""
    return section_token(settings, settings.workspace, settings.name, env)


def section_token(section: EndpointSection, workspace: Path, name: str, env: Mapping[str, str]) -> str | None:
    """The same from a section of a configuration; `name`: of the service."""
    given = check_token(section, env)
    if given or not section.requires_token:
        return given
    path = token_file(workspace, name)
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        return token_in(path)
    except OSError as error:
        raise ConfigError(f"endpoint token {path} cannot be created ({error.strerror}); set endpoint.token") from error


def check_token(section: EndpointSection, env: Mapping[str, str]) -> str | None:
    """The token that is given where one is required; none is made. Raises ConfigError for a section that cannot be
    served.
    """
    if section.requires_token:
        return given_token(section, env)
    if section.host not in LOOPBACK:
        raise ConfigError(
            f"endpoint.host {section.host} is reachable from other machines; remove endpoint.requires_token"
        )
    return None


def given_token(section: EndpointSection, env: Mapping[str, str]) -> str | None:
    """The token that settings or environment name; none if they name none. Raises ConfigError."""
    if section.token is not None:
        return str(expand(section.token, env, "endpoint.token")).strip()
    if section.token_file is None:
        return env.get(TOKEN_VARIABLE, "").strip() or None
    try:
        token = section.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            f"endpoint.token_file {section.token_file} cannot be read ({error.strerror}); correct its permissions"
        ) from error
    if not token:
        raise ConfigError(f"endpoint.token_file {section.token_file}: is empty; write the key into it")
    return token
