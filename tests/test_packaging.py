"""What is installed: every folder with an __init__.py, under `rollstream.` alone."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rollstream.schemas.events
from rollstream.schemas.topics import TOPICS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOP = ("schemas", "eventlog", "producers", "processors", "learner", "metrics", "harness")


def test_every_package_folder_is_listed() -> None:
    folders = {
        "rollstream." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in TOP
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert folders == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_top_folder_is_mapped() -> None:
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {f"rollstream.{top}": top for top in TOP}


def test_every_event_has_a_topic_of_the_table() -> None:
    for kind, event in rollstream.schemas.events.KINDS.items():
        assert event.TOPIC in TOPICS, kind


@pytest.mark.slow
@pytest.mark.parametrize("extra", PROJECT["project"]["optional-dependencies"])
def test_every_extra_can_be_installed_beside_the_core(extra: str) -> None:
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--python", sys.executable]
    done = subprocess.run(
        [*command, "--extra", extra, str(ROOT / "pyproject.toml")], capture_output=True, text=True, timeout=300
    )
    if "Failed to fetch" in done.stderr or "error sending request" in done.stderr:
        pytest.skip("the package registry is not reached")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_importing_from_the_checkout_gives_the_installed_package() -> None:
    code = "import rollstream.schemas.base as b; print(b.__name__, b.__file__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    name, file = out.stdout.split()
    assert name == "rollstream.schemas.base"
    assert Path(file) == ROOT / "schemas" / "base.py"


@pytest.mark.slow
def test_help_does_not_load_heavy_libraries() -> None:
    code = (
        "import sys, rollstream.harness.cli\n"
        "heavy = {'torch', 'vllm', 'faust', 'duckdb', 'transformers', 'aiokafka', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
