"""The pages that `make docs` writes have every key, option and environment variable of the code."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.rigs.sources.source_tree import ROOT, sources

_VARIABLE = re.compile(r"ROLLSTREAM_[A-Z0-9_]*[A-Z0-9]")


@pytest.fixture(scope="module")
def configuration() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "configuration.py"))


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "commands.py"))


@pytest.mark.parametrize("name", ["configuration", "commands"])
def test_a_page_is_what_make_docs_writes(name: str, request: pytest.FixtureRequest) -> None:
    generator = request.getfixturevalue(name)
    path: Path = generator["PAGE"]
    is_current = generator["page"]() == path.read_text(encoding="utf-8")
    assert is_current, f"docs/{path.name} differs from the code that it describes; run `make docs`"


def described(configuration: dict[str, Any]) -> list[type[BaseModel]]:
    pages = configuration["Pages"]()
    for title, kind in {**configuration["RUN_FILE"], **configuration["SERVICES"]}.items():
        pages.add(title, kind)
    return [members[0] for members in pages.tables if len(members) == 1]


def test_every_key_has_a_description_or_a_link(configuration: dict[str, Any]) -> None:
    missing = [
        f"{model.__name__}.{name}"
        for model in described(configuration)
        for name, field in configuration["own_fields"](model).items()
        if name not in ("type", "kind")
        and not configuration["members_of"](field.annotation)
        and not configuration["description_of"](model, name)
    ]
    assert not missing, "add docstrings to these attributes, or lines to docs/descriptions.yaml"


def test_a_description_is_of_a_key_without_a_docstring(configuration: dict[str, Any]) -> None:
    bases = {base.__name__: base for model in described(configuration) for base in configuration["_bases"](model)}
    for name, texts in configuration["_descriptions"]().items():
        keys = bases[name].model_fields.keys()
        assert texts.keys() <= keys, name
        assert not texts.keys() & configuration["docstrings"](bases[name]).keys(), name


def test_every_environment_variable_of_the_code_is_described(commands: dict[str, Any]) -> None:
    listed = {name for variables in commands["VARIABLES"].values() for name in variables}
    texts = [path.read_text(encoding="utf-8") for path in (*sources(), ROOT / "docker-compose.yml", ROOT / "Makefile")]
    found = {name for text in texts for name in _VARIABLE.findall(text) if not name.startswith("ROLLSTREAM_KAFKA")}
    assert found <= listed
    assert "ROLLSTREAM_KAFKA_..." in listed
