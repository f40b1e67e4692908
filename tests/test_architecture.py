"""The arrows between the packages, the size of files and functions, and what may be imported where."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "schemas": set(),
    "eventlog": {"schemas"},
    "producers": {"schemas", "eventlog"},
    "processors": {"schemas", "eventlog"},
    "learner": {"schemas", "eventlog"},
    "metrics": {"schemas", "eventlog"},
    "harness": {"schemas", "eventlog", "producers", "processors", "learner", "metrics"},
}
ONLY_IN = {
    "faust": {"processors"},
    "mode": {"processors"},
    "duckdb": {"metrics"},
    "torch": {"learner", "producers", "harness"},
    "transformers": {"learner", "producers", "harness"},
    "peft": {"learner", "producers"},
    "vllm": {"producers"},
    "aiokafka": {"eventlog", "processors"},
    "nat": {"harness"},
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources() -> Iterator[Path]:
    for package in ALLOWED:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def forbidden_imports(path: Path) -> list[str]:
    package, found = package_of(path), []
    for line, name in imports_of(path):
        parts = name.split(".")
        ours = parts[1] if parts[0] == "rollstream" and len(parts) > 1 else None
        if ours and ours != package and ours not in ALLOWED[package]:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        if parts[0] in ONLY_IN and package not in ONLY_IN[parts[0]]:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        if parts[0] in ALLOWED:
            found.append(f"{path.relative_to(ROOT)}:{line} imports the bare folder {name}")
    return found


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_package_may(path: Path) -> None:
    assert forbidden_imports(path) == []


def test_a_planted_arrow_is_found(tmp_path: Path) -> None:
    planted = ROOT / "learner" / "__init__.py"
    tree = "from rollstream.processors import app\nimport faust\nimport schemas.base\n"
    copy = tmp_path / "planted.py"
    copy.write_text(tree)
    found = [name for _, name in imports_of(copy)]
    assert found == ["rollstream.processors", "faust", "schemas.base"]
    assert package_of(planted) == "learner"
    assert "processors" not in ALLOWED["learner"]


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is"
    long = [
        f"{node.name} ({(node.end_lineno or 0) - node.lineno + 1} lines)"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_a_test_file_says_what_it_is_and_stays_short() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= MAX_FILE_LINES, path
        assert ast.get_docstring(ast.parse(text)), path


def test_schemas_import_only_the_standard_library_and_pydantic() -> None:
    import sys

    known = set(sys.stdlib_module_names) | {"pydantic", "rollstream"}
    for path in sorted((ROOT / "schemas").rglob("*.py")):
        assert {name.split(".")[0] for _, name in imports_of(path)} <= known, path


def test_no_grab_bag_modules() -> None:
    names = {path.name for path in sources()}
    assert names.isdisjoint({"utils.py", "helpers.py", "common.py", "misc.py"})
