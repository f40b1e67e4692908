"""The arrows between the folders, the size of folders, files and functions, and what may be imported where."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from tests.rigs.source_tree import (
    ALLOWED,
    ROOT,
    arrows,
    away_from_home,
    banned_words,
    imports_of,
    repeated_classes,
    repeated_files,
    small_with_one_importer,
    sources,
    uncalled_methods,
    unpublished_imports,
    without_contract,
)

FLOORS = {
    "schemas": ["schemas/events", "schemas"],
    "eventlog": ["eventlog/broker eventlog/kafka eventlog/memory", "eventlog"],
    "producers": [
        "producers/openai",
        "producers",
        "producers/evaluators producers/environments",
        "producers/rollout producers/traces",
        "producers/league",
        "producers/engines producers/protocols",
    ],
    "processors": ["processors", "processors/assemble", "processors/curate", "processors/host"],
    "learner": ["learner/shared_model_group", "learner", "learner/model", "learner/algorithms"],
    "metrics": ["metrics", "metrics/sql", "metrics/projection"],
    "replay": ["replay/what_if", "replay", "replay/archive"],
    "harness": [
        "harness/cli",
        "harness",
        "harness/nat",
        "harness/components",
        "harness/recorded harness/replays harness/upkeep",
        "harness/runs",
        "harness/config",
        "harness/services",
    ],
}
"""By top folder its folders from the top down: an arrow goes down, never up and never to a folder beside."""
ONLY_IN = {
    "faust": {"processors"},
    "mode": {"processors"},
    "duckdb": {"metrics", "replay"},
    "torch": {"learner", "producers", "harness"},
    "transformers": {"learner", "producers", "replay", "harness"},
    "peft": {"learner", "producers"},
    "vllm": {"producers"},
    "aiokafka": {"eventlog", "processors"},
    "nat": {"harness"},
}
MAX_FILES = 15
"""Of a folder, `__init__.py` apart."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


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

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := walk(other, [*way, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


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


EVERY_SOURCE = pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(ROOT)))


@EVERY_SOURCE
def test_a_file_imports_only_what_its_package_may(path: Path) -> None:
    assert forbidden_imports(path) == []


def test_no_circle_of_files_or_folders() -> None:
    found = arrows(sources())
    assert circle(found) == []
    assert circle(between_folders(found)) == []


def test_inside_a_package_arrows_go_down() -> None:
    folders = {str(path.parent.relative_to(ROOT)) for path in sources()}
    assert {name for floors in FLOORS.values() for names in floors for name in names.split()} == folders
    assert upward(arrows(sources())) == []


def too_full(paths: Iterable[Path], root: Path = ROOT) -> dict[str, int]:
    """Folders with more than MAX_FILES files, and how many they have."""
    counts = Counter(str(path.parent.relative_to(root)) for path in paths if path.name != "__init__.py")
    return {name: count for name, count in counts.items() if count > MAX_FILES}


def test_a_folder_can_be_seen_at_a_glance() -> None:
    assert too_full(sources()) == {}


def test_too_full_a_folder_is_found(tmp_path: Path) -> None:
    full = [tmp_path / "learner" / f"{number}.py" for number in range(MAX_FILES + 1)]
    most = [tmp_path / "metrics" / path.name for path in full[1:]]
    assert too_full([*full, *most, tmp_path / "metrics" / "__init__.py"], tmp_path) == {"learner": MAX_FILES + 1}


Plant = Callable[[str, str], Path]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Writes a module into a tree of its own."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_planted_arrows_are_found(tmp_path: Path, plant: Plant) -> None:
    path = plant(
        "learner/planted.py",
        "import schemas.base\n\n\ndef late():\n    import faust\n    from rollstream.processors import host\n",
    )
    assert sorted(forbidden_imports(path, tmp_path)) == [
        "learner/planted.py:1 imports the bare folder schemas.base",
        "learner/planted.py:5 imports faust",
        "learner/planted.py:6 imports rollstream.processors.host",
    ]


def test_planted_circles_are_found(tmp_path: Path, plant: Plant) -> None:
    one = plant("learner/one.py", "def late():\n    from rollstream.learner.model import two\n")
    two = plant("learner/model/two.py", "from rollstream.learner.one import late\n")
    three = plant("learner/model/three.py", "from rollstream.learner.free import x\n")
    free = plant("learner/free.py", "from rollstream.learner.model.two import late\n")
    assert circle(arrows([one, two], tmp_path)) == ["learner/model/two.py", "learner/one.py", "learner/model/two.py"]
    found = arrows([three, free], tmp_path)
    assert circle(found) == []
    assert circle(between_folders(found)) == ["learner", "learner/model", "learner"]
    assert upward(found) == ["learner/model/three.py imports learner/free.py"]


def too_long(text: str) -> list[str]:
    """Functions of a source above MAX_FUNCTION_LINES, and the source itself above MAX_FILE_LINES."""
    long = [
        f"{node.name} ({(node.end_lineno or 0) - node.lineno + 1} lines)"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    return long if text.count("\n") <= MAX_FILE_LINES else [*long, f"{text.count(chr(10))} lines"]


@EVERY_SOURCE
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "a module says what it is"
    assert too_long(text) == []


def test_what_is_too_long_is_found() -> None:
    body = "    pass\n" * MAX_FUNCTION_LINES
    assert too_long(f"def f():\n{body}") == [f"f ({MAX_FUNCTION_LINES + 1} lines)"]
    assert too_long("x = 1\n" * (MAX_FILE_LINES + 1)) == [f"{MAX_FILE_LINES + 1} lines"]


def test_a_test_file_says_what_it_is_and_stays_short() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= MAX_FILE_LINES, path
        assert ast.get_docstring(ast.parse(text)), path


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


def test_schemas_import_only_the_standard_library_and_pydantic() -> None:
    known = set(sys.stdlib_module_names) | {"pydantic", "rollstream"}
    for path in sorted((ROOT / "schemas").rglob("*.py")):
        assert {name.split(".")[0] for _, name in imports_of(path)} <= known, path


def test_no_grab_bag_modules() -> None:
    names = {path.name for path in sources()}
    assert names.isdisjoint({"utils.py", "helpers.py", "common.py", "misc.py"})


MAY_STAY_SMALL = {
    "harness/services/committed_offsets.py": "owns the format of a file in the workspace",
    "harness/services/sole_use.py": "its importer is in another folder, on a higher floor",
    "learner/letters.py": "inbox would pass the size limit",
    "learner/position.py": "owns a file format; inbox would pass the size limit",
    "metrics/sql/landlock.py": "system calls by ctypes",
    "metrics/sql/select_only.py": "parses users' SQL, tested without the query process",
    "processors/curate/refold.py": "shell would pass the size limit",
    "processors/host/client.py": "corrects aiokafka's client; consumer is near the size limit",
    "producers/openai/access.py": "pure access rules, apart from the HTTP server",
}
"""Files under 60 lines with one importer, and why they are not folded into it."""
# fmt: off
REPEATED = {
    "access", "attempts", "builtin", "candidates", "client", "components", "curriculum", "dead_letters",
    "environment", "errors", "evaluators", "export", "finetune", "ingest", "pairs", "plan", "progress", "reader",
    "recorded", "registry", "rewards", "session", "tasks", "tokens", "topics", "trainer", "training",
    "trajectories", "weights", "worker",
}
# fmt: on
"""Names of files that several folders have by now. None is added."""


def test_a_small_file_with_one_importer_is_part_of_it() -> None:
    assert small_with_one_importer(arrows(sources())) == set(MAY_STAY_SMALL), "an exception that is not needed goes"


def test_a_public_class_has_a_name_of_its_own() -> None:
    assert repeated_classes(sources()) == {}


def test_no_further_file_name_is_repeated() -> None:
    assert repeated_files(sources()) == REPEATED, "a name that is repeated no longer goes"


def by_file(check: Callable[[Path], list[str]]) -> dict[str, list[str]]:
    return {str(path.relative_to(ROOT)): found for path in sources() if (found := check(path))}


def test_a_rule_has_one_home() -> None:
    assert by_file(away_from_home) == {}


def test_harness_and_replay_import_what_a_package_publishes() -> None:
    """Else name the module in the `__all__` of its package's `__init__`, or do without it."""
    found = by_file(unpublished_imports)
    assert {name: lines for name, lines in found.items() if name.startswith(("harness/", "replay/"))} == {}


def test_no_word_is_banned() -> None:
    assert by_file(banned_words) == {}


def test_planted_files_and_classes_are_found(tmp_path: Path, plant: Plant) -> None:
    user = plant(
        "learner/user.py", "from rollstream.learner.small import x\nfrom rollstream.learner.algorithms.a import y\n"
    )
    small = plant("learner/small.py", "class Planted: ...\n")
    other = plant("metrics/small.py", "class Planted: ...\nclass _Private: ...\n")
    algorithm = plant("learner/algorithms/a.py", "class _Private: ...\n")
    paths = [user, small, other, algorithm]
    assert small_with_one_importer(arrows(paths, tmp_path), tmp_path) == {"learner/small.py"}
    assert repeated_classes(paths, tmp_path) == {"Planted": ["learner/small.py", "metrics/small.py"]}
    assert repeated_files(paths) == {"small"}


@pytest.mark.parametrize(
    "line",
    [
        'kind = headers["ce_type"]',
        "is_void = event.term < owner.term",
        "is_void = limit > owner.term",
        'run, name = spec.job_id.split("/", 1)',
        'name = f"{job_id}/e{epoch:05d}/t{index}"',
        'name = f"epoch_sealed:{job_id}/e{epoch}"',
        'is_own = record.key.split(b"/", 1)[0] == run',
        "found.is_spliced = True",
        'is_ratio = settings.algorithm.name == "grpo"',
        "is_free = algorithm in REWARD_FREE",
        'KINDS = {"dpo": "dpo"}',
    ],
)
def test_a_planted_rule_is_found(line: str, tmp_path: Path, plant: Plant) -> None:
    path = plant("learner/planted.py", f"{line}\nname.split('.')\nterm = event.term\n")
    assert away_from_home(path, tmp_path) == [line]


def test_planted_imports_past_what_is_published_are_found(tmp_path: Path, plant: Plant) -> None:
    plant("learner/__init__.py", '__all__ = ["progress"]\n')
    plant("learner/progress.py", "")
    plant("learner/inner.py", "")
    path = plant(
        "harness/a.py",
        "def f():\n    from rollstream.learner import inner, progress\n    import rollstream.learner.inner\n",
    )
    assert unpublished_imports(path, tmp_path) == [
        "harness/a.py:2 imports rollstream.learner.inner",
        "harness/a.py:3 imports rollstream.learner.inner",
    ]


def test_a_planted_word_is_found(plant: Plant) -> None:
    assert banned_words(plant("a.py", "def tie_to_parent(): ...\nshown = 1\n")) == ["def tie_to_parent(): ..."]


def test_a_protocol_has_callers_and_where_it_is_written_twice_a_contract() -> None:
    assert uncalled_methods(sources()) == []
    assert without_contract(sources(), (ROOT / "tests" / "contracts").glob("test_*.py")) == {}


def test_a_planted_protocol_without_callers_or_contract_is_found(plant: Plant) -> None:
    methods = "    def ask(self): ...\n    def tell(self): ...\n"
    protocol = plant("learner/a.py", f"class Asked(Protocol):\n{methods}class One:\n{methods}")
    derived = "class Base:\n    def ask(self): self.ask()\nclass Two(Base):\n    def tell(self): ...\n"
    other = plant("learner/b.py", derived)
    assert uncalled_methods([protocol, other]) == ["Asked.tell"]
    assert without_contract([protocol, other], [other]) == {"Asked": ["One", "Two"]}
    suite = plant("tests/contracts/test_a.py", "from rollstream.learner.a import Asked\n")
    assert without_contract([protocol, other], [suite]) == {}


def test_help_imports_neither_torch_nor_duckdb() -> None:
    program = (
        "import sys\n"
        "from rollstream.harness.cli.main import main\n"
        "sys.argv = ['rollstream', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded', sorted({'torch', 'duckdb', 'transformers', 'faust'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "loaded []"
