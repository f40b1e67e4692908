"""The arrows between the folders, the size of folders, files and functions, and what may be imported where."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.rigs.sources.source_tree import ALLOWED, ROOT, TABLES, Plant, arrows, excused, imports_of, sources

FLOORS = {
    "schemas": ["schemas/events", "schemas"],
    "eventlog": ["eventlog/broker eventlog/http eventlog/kafka eventlog/memory", "eventlog"],
    "producers": [
        "producers",
        "producers/gateway",
        "producers/openai",
        "producers/evaluators producers/environments",
        "producers/rollout producers/traces",
        "producers/league",
        "producers/engines/vllm",
        "producers/engines producers/protocols",
    ],
    "processors": ["processors", "processors/assemble", "processors/curate", "processors/host"],
    "learner": [
        "learner/shared_model_group",
        "learner",
        "learner/checkpoints learner/scoring",
        "learner/reading",
        "learner/parallel",
        "learner/model",
        "learner/algorithms/builtin",
        "learner/algorithms",
    ],
    "metrics": ["metrics", "metrics/trackers", "metrics/sql", "metrics/projection"],
    "replay": ["replay/what_if", "replay", "replay/archive"],
    "harness": [
        "harness/cli",
        "harness",
        "harness/nat harness/datasets",
        "harness/components",
        "harness/recorded harness/replays harness/upkeep",
        "harness/runs",
        "harness/config",
        "harness/services",
    ],
}
"""Folders of each top folder from the top down: an arrow goes down, never up and never to a folder beside."""
ONLY_IN = {
    "faust": {"processors"},
    "mode": set(),
    "duckdb": {"metrics", "replay"},
    "torch": {"learner", "producers", "harness"},
    "triton": {"learner"},
    "transformers": {"learner", "producers", "replay", "harness"},
    "peft": {"learner", "producers"},
    "vllm": set(),
    "aiokafka": {"eventlog", "processors"},
    "nat": {"harness"},
}
MAX_FILES = 15
"""Maximum files of a folder, `__init__.py` apart."""
MORE_FILES = {
    # one algorithm, one file: its own is read, compared with its paper and copied without any other
    "learner/algorithms/builtin": 19,
    # a file for each section of the configuration and for each rule of all packages; users import these by their paths
    "schemas": 22,
}
"""Maximum files of the folders that may have more, and why; docs/architecture.md names them."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources_and_tests() -> list[Path]:
    return [*sources(), *sorted((ROOT / "tests").rglob("*.py"))]


def folder(path: str) -> str:
    return path.rpartition("/")[0]


def between_folders(found: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    by_folder: dict[str, set[str]] = {}
    for one, others in found.items():
        by_folder.setdefault(folder(one), set()).update({folder(other) for other in others} - {folder(one)})
    return by_folder


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """One circle of a graph, its first node again at the end; empty if there is none."""
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := visit(other, [*way, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def package_of(path: Path, root: Path = ROOT) -> str:
    return path.relative_to(root).parts[0]


def forbidden_imports(path: Path, root: Path = ROOT) -> list[str]:
    package, found = package_of(path, root), []
    for line, name in imports_of(path):
        parts = name.split(".")
        ours = parts[1] if parts[0] == "rollstream" and len(parts) > 1 else None
        is_foreign = parts[0] in ONLY_IN and package not in ONLY_IN[parts[0]]
        if is_foreign or (ours in ALLOWED and ours != package and ours not in ALLOWED[package]):
            found.append(f"{path.relative_to(root)}:{line} imports {name}")
        if parts[0] in ALLOWED:
            found.append(f"{path.relative_to(root)}:{line} imports the bare folder {name}")
    return found


def unneeded_permissions(paths: Iterable[Path], only_in: Mapping[str, set[str]], root: Path = ROOT) -> list[str]:
    """Packages of rollstream that may import a library that none of their files imports."""
    used = {(name.split(".")[0], package_of(path, root)) for path in paths for _, name in imports_of(path)}
    return [
        f"{package} may import {name}"
        for name, found in only_in.items()
        for package in sorted(found)
        if (name, package) not in used
    ]


def upward(found: Mapping[str, Iterable[str]]) -> list[str]:
    """Arrows inside a top folder that do not go down by FLOORS."""
    floor = {
        name: number for floors in FLOORS.values() for number, names in enumerate(floors) for name in names.split()
    }
    return [
        f"{one} imports {other}"
        for one, others in found.items()
        for other in sorted(others)
        if folder(one) != folder(other)
        and one.split("/")[0] == other.split("/")[0]
        and floor[folder(other)] <= floor[folder(one)]
    ]


def off_floors(paths: Iterable[Path], floors: Mapping[str, list[str]], root: Path = ROOT) -> set[str]:
    """Folders that FLOORS lacks, names twice or has without a file, or names under another top folder."""
    named = Counter((top, name) for top, names in floors.items() for one in names for name in one.split())
    there = {(name.split("/")[0], name) for name in (str(path.parent.relative_to(root)) for path in paths)}
    return {name for _, name in set(named) ^ there} | {name for (_, name), count in named.items() if count > 1}


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_package_may(path: Path) -> None:
    assert forbidden_imports(path) == []


def test_a_package_may_import_only_what_it_imports(tmp_path: Path, plant: Plant) -> None:
    assert unneeded_permissions(sources(), ONLY_IN) == []
    path = plant("learner/planted.py", "def late():\n    import torch.nn\n")
    only_in = {"torch": {"learner", "metrics"}, "duckdb": set[str]()}
    assert unneeded_permissions([path], only_in, tmp_path) == ["metrics may import torch"]


def test_no_circle_of_files_or_folders() -> None:
    found = arrows(sources())
    assert circle(found) == []
    assert circle(between_folders(found)) == []


def test_inside_a_package_arrows_go_down() -> None:
    assert off_floors(sources(), FLOORS) | {name for name in TABLES if not excused(ROOT / name)} == set()
    assert upward(arrows(sources())) == []


def too_full(paths: Iterable[Path], root: Path = ROOT) -> dict[str, int]:
    """Folders with more than MAX_FILES files, and how many they have."""
    counts = Counter(str(path.parent.relative_to(root)) for path in paths if path.name != "__init__.py")
    return {name: count for name, count in counts.items() if count > MAX_FILES}


def drawn_floors(document: str) -> dict[str, list[set[str]]]:
    """The sub-folders of each floor by top folder, as the block of "The folders" draws them."""
    drawing = document.partition("```text\n")[2].partition("```")[0].partition("\n\n")[2]
    found: dict[str, list[set[str]]] = {}
    for block in re.split(r"\n(?=\w)", drawing.rstrip()):
        package, _, floors = block.partition(" ")
        found[package] = [set(re.findall(r"[\w/]+(?=/)", floor)) for floor in re.split(r" >\s+", floors)]
    return found


def drawn_otherwise(document: str, floors: Mapping[str, list[str]]) -> set[str]:
    """Top folders that a document lacks, has alone, or draws with other floors."""
    drawn = drawn_floors(document)
    wanted = {
        package: [{one.partition("/")[2] for one in floor.split() if "/" in one} for floor in names]
        for package, names in floors.items()
    }
    return {package for package in drawn.keys() | wanted.keys() if drawn.get(package) != wanted.get(package)}


def test_the_architecture_draws_the_floors() -> None:
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert drawn_otherwise(document, FLOORS) == set()
    assert [name for name in (*MORE_FILES, *TABLES) if f"`{name}`" not in document] == [], "the document says why"


DRAWN = """# The folders

```text
learner  <- metrics

learner     service, jobs > parallel/ >
            model/  reading/
metrics     plot > sql/ > sql/parts/
```

```text
replay      verify
```
"""


def test_floors_that_a_document_draws_otherwise_are_found() -> None:
    floors = {
        "learner": ["learner", "learner/parallel", "learner/model learner/reading"],
        "metrics": ["metrics", "metrics/sql", "metrics/sql/parts"],
    }
    assert drawn_otherwise(DRAWN, floors) == set()
    for planted in (
        DRAWN.replace("parallel/ >", "parallel/"),
        DRAWN.replace("model/  reading/", "model/"),
        DRAWN.replace("model/  reading/", "model/ > reading/"),
        DRAWN.replace("jobs >", "jobs  model/ >"),
        DRAWN.replace("parallel/", "packed/"),
    ):
        assert drawn_otherwise(planted, floors) == {"learner"}
    assert drawn_otherwise(DRAWN.replace("metrics     plot > sql/ > sql/parts/\n", ""), floors) == {"metrics"}
    assert drawn_otherwise(DRAWN, {"learner": floors["learner"]}) == {"metrics"}


def test_a_folder_can_be_seen_at_a_glance() -> None:
    assert too_full(sources_and_tests()) == MORE_FILES, "a limit that is not reached is lowered"


def test_too_full_a_folder_is_found(tmp_path: Path) -> None:
    full = [tmp_path / "learner" / f"{number}.py" for number in range(MAX_FILES + 1)]
    tests = [tmp_path / "tests" / "learner" / path.name for path in full]
    most = [tmp_path / "metrics" / path.name for path in full[1:]]
    found = too_full([*full, *tests, *most, tmp_path / "metrics" / "__init__.py"], tmp_path)
    assert found == {"learner": MAX_FILES + 1, "tests/learner": MAX_FILES + 1}


def test_planted_arrows_are_found(tmp_path: Path, plant: Plant) -> None:
    path = plant(
        "learner/planted.py",
        "import schemas.base\n\n\ndef late():\n    import faust\n    from rollstream.processors import host\n"
        "    importlib.import_module(f'rollstream.metrics.sql.{name}')\n",
    )
    assert sorted(forbidden_imports(path, tmp_path)) == [
        "learner/planted.py:1 imports the bare folder schemas.base",
        "learner/planted.py:5 imports faust",
        "learner/planted.py:6 imports rollstream.processors.host",
        "learner/planted.py:7 imports rollstream.metrics.sql",
    ]


def test_planted_circles_are_found(tmp_path: Path, plant: Plant) -> None:
    one = plant("learner/one.py", "def late():\n    from rollstream.learner.model import two\n")
    two = plant("learner/model/two.py", "from rollstream.learner.one import late\n")
    three = plant("learner/model/three.py", "from rollstream.learner.free import x\n")
    free = plant("learner/free.py", "BY = {'a': 'rollstream.learner.model.two'}\nimport_module(BY[name])\n")
    assert circle(arrows([one, two], tmp_path)) == ["learner/model/two.py", "learner/one.py", "learner/model/two.py"]
    found = arrows([three, free], tmp_path)
    assert circle(found) == []
    assert circle(between_folders(found)) == ["learner", "learner/model", "learner"]
    assert upward(found) == ["learner/model/three.py imports learner/free.py"]
    beside = plant("eventlog/http/four.py", "from rollstream.eventlog.kafka import five\n")
    five = plant("eventlog/kafka/five.py", "x = 1\n")
    assert upward(arrows([beside, five], tmp_path)) == ["eventlog/http/four.py imports eventlog/kafka/five.py"]
    plant("learner/algorithms/builtin/a.py", "")
    by_name = "import_module('rollstream.learner.algorithms.builtin.a')\nimport_module('rollstream.learner.one')\n"
    table = arrows([plant("learner/algorithms/table.py", by_name)], tmp_path)
    assert upward(table) == ["learner/algorithms/table.py imports learner/one.py"], "a table may go up to its own alone"


def test_a_folder_that_the_floors_lack_or_misplace_is_found(tmp_path: Path) -> None:
    paths = [tmp_path / name / "a.py" for name in ("learner", "learner/model", "metrics", "metrics/sql")]
    floors = {"learner": ["learner", "metrics/sql", "learner/gone"], "metrics": ["metrics", "metrics"]}
    assert off_floors(paths, floors, tmp_path) == {"learner/model", "learner/gone", "metrics", "metrics/sql"}


def hard_to_read(text: str) -> list[str]:
    """Faults of a source: no docstring, more than MAX_FUNCTION_LINES or MAX_FILE_LINES."""
    tree = ast.parse(text)
    found = [
        f"{node.name} ({(node.end_lineno or 0) - node.lineno + 1} lines)"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    found += ["no docstring"] if not ast.get_docstring(tree) else []
    return found if text.count("\n") <= MAX_FILE_LINES else [*found, f"{text.count(chr(10))} lines"]


def test_every_file_can_be_read_in_one_sitting() -> None:
    assert {str(path): found for path in sources_and_tests() if (found := hard_to_read(path.read_text("utf-8")))} == {}


def test_long_files_and_functions_are_found() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert hard_to_read(f'"""A."""\ndef f():\n{body}') == [f"f ({MAX_FUNCTION_LINES + 1} lines)"]
    assert hard_to_read('"""A."""\n' + "x = 1\n" * MAX_FILE_LINES) == [f"{MAX_FILE_LINES + 1} lines"]
    assert hard_to_read("# A comment.\nx = 1\n") == ["no docstring"]


CHANGES_PATH = re.compile(r"\bsys\.path\.(insert|append|extend)\(|from \.")


def changes_path(source: str) -> list[str]:
    """Lines that find modules otherwise than by a full name, which breaks when a file moves."""
    return [line.strip() for line in source.splitlines() if CHANGES_PATH.match(line.strip())]


def test_tests_and_benchmarks_import_by_full_names() -> None:
    paths = [path for name in ("tests", "benchmarks", "examples") for path in sorted((ROOT / name).rglob("*.py"))]
    assert {path: found for path in paths if (found := changes_path(path.read_text(encoding="utf-8")))} == {}


def test_a_changed_path_is_found() -> None:
    planted = "import sys\nsys.path.insert(0, '.')\nfrom .conftest import x\nfrom tests.conftest import x\n"
    assert changes_path(planted) == ["sys.path.insert(0, '.')", "from .conftest import x"]


def imported_tests(path: Path) -> list[str]:
    """Imports of test files, by name too: what a test shares is in a conftest or a rig."""
    return [name for _, name in imports_of(path) if any(part.startswith("test_") for part in name.split("."))]


def test_tests_import_no_test_file() -> None:
    assert {path: found for path in (ROOT / "tests").rglob("*.py") if (found := imported_tests(path))} == {}


def test_a_planted_import_of_a_test_file_is_found(plant: Plant) -> None:
    late = "    from tests.harness import test_cli, conftest\n    importlib.import_module('test_nat')\n"
    path = plant("tests/test_planted.py", f"import tests.rigs.waits\nfrom tests.test_a import b\ndef c():\n{late}")
    assert imported_tests(path) == ["tests.test_a.b", "tests.harness.test_cli", "test_nat"]


KNOWN_TO_SCHEMAS = {*sys.stdlib_module_names, "pydantic", "rollstream"}
HEAVY = {"torch", "duckdb", "transformers", "faust"}


def third_party(path: Path) -> list[str]:
    """Packages that a file imports and that reading a record must not need."""
    return sorted({name.split(".")[0] for _, name in imports_of(path)} - KNOWN_TO_SCHEMAS)


def heavy_after(statement: str, heavy: frozenset[str] = frozenset(HEAVY)) -> list[str]:
    """Modules of `heavy` that a new process has imported once it has run `statement`."""
    program = f"import sys\n{statement}\nprint('loaded', *sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()[-1].split()[1:]


def test_schemas_import_only_the_standard_library_and_pydantic() -> None:
    assert {path: found for path in (ROOT / "schemas").rglob("*.py") if (found := third_party(path))} == {}


def test_a_package_that_schemas_must_not_import_is_found(plant: Plant) -> None:
    text = "import json\n\n\ndef late():\n    import orjson\n    from torch.nn import Module\n    import pydantic\n"
    assert third_party(plant("schemas/planted.py", text)) == ["orjson", "torch"]


def test_help_imports_no_heavy_package() -> None:
    program = "from rollstream.harness.cli.main import main\nsys.argv = ['rollstream', '--help']\n"
    heavy = frozenset(HEAVY) | {"rollstream.schemas.settings"}
    assert heavy_after(f"{program}try:\n    main()\nexcept SystemExit:\n    pass", heavy) == []


def test_a_query_loads_no_http_server() -> None:
    assert heavy_after("import rollstream.metrics.sql.client", frozenset({"aiohttp", "aiokafka"})) == []


def test_the_export_at_a_runs_end_loads_no_torch() -> None:
    assert heavy_after("import rollstream.learner.model.export") == []


def test_a_heavy_import_is_found() -> None:
    assert heavy_after("import json, duckdb") == ["duckdb"]
