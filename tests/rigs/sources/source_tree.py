"""The sources as a tree: its files, what each imports, and the rules of the house that are more than arrows."""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rollstream.schemas.algorithm_settings import AlgorithmSettings
from rollstream.schemas.algorithms import BUILT_IN
from tests.rigs.sources import one_home

ROOT = Path(__file__).resolve().parents[3]
Plant = Callable[[str, str], Path]
"""Type of the fixture `plant`: path and text of a module to write."""
ALLOWED = {
    "schemas": set(),
    "eventlog": {"schemas"},
    "producers": {"schemas", "eventlog"},
    "processors": {"schemas", "eventlog"},
    "learner": {"schemas", "eventlog"},
    "metrics": {"schemas", "eventlog"},
    "replay": {"schemas", "eventlog", "producers", "processors", "learner", "metrics"},
    "harness": {"schemas", "eventlog", "producers", "processors", "learner", "metrics", "replay"},
}
SMALL_FILE_LINES = 60
REPEATED_NAMES = {"__init__", "service", "shell", "fold", "state", "base", "table", "log"}
"""Names of files that may be in several folders: the folder says whose."""
_ALGORITHMS = "|".join(map(re.escape, BUILT_IN))
_SETTINGS = "|".join(kind.__name__ for kind in BUILT_IN.values())
_BASES = "|".join(sorted({
    base.__name__
    for kind in BUILT_IN.values()
    for base in kind.__mro__
    if issubclass(base, AlgorithmSettings) and base is not AlgorithmSettings
} - {kind.__name__ for kind in BUILT_IN.values()}))  # fmt: skip
"""Classes that settings of algorithms are derived from."""
ONE_HOME = {
    re.compile(r"""["']ce_(type|id)["']"""): "eventlog/codec.py",
    re.compile(r"""f["'][^"']*\}/[a-uw-z]\{"""): "schemas/ids.py",
    re.compile(r"@v?\{[\w.]*version\}"): "schemas/ids.py",
    re.compile(r"@\{[\w.]*offset\}"): "eventlog/log.py",
    re.compile(r"""f["'][a-z]+(_[a-z]+)+:\{|startswith\(["'][a-z]+_[a-z_]+:["']|event_id_of\(\w+\)\.r?partition"""): "",
    re.compile(r"str\(error\)\)?\.split\("): "schemas/variables.py",
    re.compile(r"revision *[<>=!]=? *\d|_SINCE = \d"): "schemas/revisions.py",
    re.compile(r"FROM log\.learner_claimed"): "metrics/projection/tables.sql",
    re.compile(r"settings\.entropy_coefficient \*"): "",
    re.compile(r"removeprefix\(CODE\)|cannot be imported: \{"): "schemas/users_code.py",
    re.compile(r"""["']python:["']"""): "schemas/permissions.py",
    re.compile(r"time_ns\(\) // "): "eventlog/log.py",
    re.compile(r"(trajectory_builder|trainer_adapter|trainer)s\.\{[\w.]*\.\1\}"): "schemas/finetuning.py",
    re.compile(r"\bos\.(replace|rename|fsync)\(|\bshutil\.move\("): "eventlog/files.py",
    re.compile(r"\.is_spliced = |has_open_attempts and"): "eventlog/attempts.py",
    re.compile(
        rf"""algorithm(\.name)? *(==|!=|(not )?in\b)|name *(==|!=|(not )?in) *[\[({{]?["']({_ALGORITHMS})["']"""
        r"""|algorithm(\.name)?\.(startswith|endswith|removeprefix|removesuffix|r?split|r?partition)\("""
        r"""|\[[\w.]*algorithm\.name\]|match [\w.]*algorithm\.name"""
        rf"""|["']({_ALGORITHMS})["'] *:|case ["']({_ALGORITHMS})["']|(isinstance|issubclass)\(.*\b({_SETTINGS})\b"""
        r"""|kind *(==|!=|(not )?in) *[\[({]?["'](sft|dpo|rl)["']"""
    ): "schemas learner/algorithms",
    re.compile(rf"(isinstance|issubclass)\(.*\b({_BASES})\b"): "schemas learner/algorithms",
    re.compile(
        r"type\([\w.]*(settings|algorithm)\)\.__name__|(settings|algorithm)\.name\.(lower|upper|casefold)\("
        r"|(hasattr\([\w.]*settings|(has|get)attr\([\w.]*algorithm), *[\"']"
    ): "",
    re.compile(r"type\([\w.]*engine\)\.__name__"): "producers/engines/table.py",
    re.compile(r"engine(\.settings)?\.kind *(==|!=|(not )?in\b)|match [\w.]*engine(\.settings)?\.kind"): "",
    re.compile(r"isinstance\(.*\b(Transformers|Scripted|OpenAI|Vllm|InstalledEngine)Settings\b"): "schemas",
}
"""The only files and folders that may have a rule's code, by pattern of that code; empty: none may."""


TABLES = {
    "producers/engines/table.py": "rollstream.producers.engines",
    "producers/rollout/registry.py": "rollstream.producers.environments",
    "learner/algorithms/table.py": "rollstream.learner.algorithms.builtin",
    "harness/config/registry.py": "rollstream.harness.builtin",
}
"""Files that import implementations by name, and the package of these. An implementation imports the file's folder, to
derive from its base class or to register itself, so this arrow alone may go up: it is taken once one is asked for, as
for an installed package's.
"""


def sources() -> Iterator[Path]:
    for package in ALLOWED:
        yield from sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Sequence[tuple[int, str]]:
    """Line and dotted name of every import, those inside functions too; `from a import b` counts as `a.b`."""
    return _imports_in(path.read_text(encoding="utf-8"))


@cache
def _imports_in(text: str) -> Sequence[tuple[int, str]]:
    tree = ast.parse(text)
    return (*_statements(tree), *(imports_by_name(tree) if "import_module" in text else ()))


def _statements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_by_name(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what `import_module` is called with, as far as the file has it: a literal, one of its
    constants or tables, or the package that a format string begins with.
    """
    constants = dict(_constants(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and one_home.name_of(node.func) == "import_module":
            yield from ((node.lineno, name) for name in sorted(set(_written_names(node.args[0], constants))))


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The values of a module's constants, by name."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        yield from ((one.id, value) for one in targets if isinstance(one, ast.Name) and isinstance(value, ast.expr))


def _written_names(value: ast.expr, constants: Mapping[str, ast.expr]) -> Iterator[str]:
    """Dotted names of modules in an expression: any literal, else those that begin with `rollstream.`."""
    if isinstance(value, ast.Constant):
        yield str(value.value)
        return
    used = (constants[one.id] for one in ast.walk(value) if isinstance(one, ast.Name) and one.id in constants)
    for node in (inner for one in (value, *used) for inner in ast.walk(one)):
        if isinstance(node, ast.Constant) and str(node.value).startswith("rollstream."):
            yield str(node.value).removesuffix(".")


def file_of(name: str, root: Path = ROOT) -> Path | None:
    """The file of a dotted name of rollstream: a module, or the one that defines the name."""
    parts = name.split(".")[1:]
    while parts:
        base = root.joinpath(*parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
        parts.pop()
    return None


def arrows(paths: Iterable[Path], root: Path = ROOT) -> dict[str, set[str]]:
    """The files of the tree that a file imports, by file; without those of TABLES that are imported by name."""
    found: dict[str, set[str]] = {}
    for path in paths:
        for _, name in set(imports_of(path)) - excused(path, root):
            other = file_of(name, root) if name.startswith("rollstream.") else None
            if other is not None and other != path:
                found.setdefault(str(path.relative_to(root)), set()).add(str(other.relative_to(root)))
    return found


def excused(path: Path, root: Path = ROOT) -> set[tuple[int, str]]:
    """The imports by name that TABLES allows a file."""
    package = TABLES.get(str(path.relative_to(root)))
    by_name = imports_by_name(ast.parse(path.read_text(encoding="utf-8"))) if package else ()
    return {(line, name) for line, name in by_name if f"{name}.".startswith(f"{package}.")}


def repeated_classes(paths: Iterable[Path], root: Path = ROOT) -> dict[str, list[str]]:
    """Public classes whose name several files have."""
    homes: dict[str, list[str]] = {}
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(root)))
    return {name: found for name, found in homes.items() if len(found) > 1}


def repeated_files(paths: Iterable[Path]) -> set[str]:
    """Names of files, without those in REPEATED_NAMES, that several folders have."""
    counts = Counter(path.stem for path in paths)
    return {name for name, count in counts.items() if count > 1} - REPEATED_NAMES


def small_with_one_importer(found: Mapping[str, Iterable[str]], root: Path = ROOT) -> set[str]:
    """Files under SMALL_FILE_LINES that a single file imports; algorithms, environments and `__init__` apart."""
    importers = Counter(other for others in found.values() for other in others)
    return {
        name
        for name, count in importers.items()
        if count == 1
        and not name.endswith("__init__.py")
        and not {"algorithms", "environments"} & set(name.split("/"))
        and (root / name).read_text(encoding="utf-8").count("\n") < SMALL_FILE_LINES
    }


def away_from_home(path: Path, root: Path = ROOT) -> list[str]:
    """Lines of a file that state a rule whose home is another file. In SQL, `log.is_void` alone compares terms."""
    name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {
        number
        for number, line in enumerate(lines)
        for rule, home in ONE_HOME.items()
        if not any(name == one or name.startswith(f"{one}/") for one in home.split()) and rule.search(line)
    }
    tree = ast.parse(text)
    found.update(one_home.lines_away(tree, name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and orders_terms(node) and name != "eventlog/terms.py":
            found.add(node.lineno - 1)
        if isinstance(node, ast.Call) and renames(node) and name != "eventlog/files.py":
            found.add(node.lineno - 1)
    return [lines[number].strip() for number in sorted(found)]


def empty_homes(root: Path = ROOT) -> list[str]:
    """Files and folders of ONE_HOME that do not have the rule's code, or do not exist."""
    return [
        f"{one}: {rule.pattern}"
        for rule, home in ONE_HOME.items()
        for one in home.split()
        if not any(
            rule.search(line)
            for path in ((root / one).rglob("*.py") if (root / one).is_dir() else [root / one])
            if path.exists()
            for line in path.read_text(encoding="utf-8").splitlines()
        )
    ]


def orders_terms(node: ast.Compare) -> bool:
    """Whether a comparison asks which of two terms is higher, or whether they are equal."""
    sides = [part for side in (node.left, *node.comparators) for part in getattr(side, "elts", [side])]
    is_of_terms = any(re.search(r"(\b|_)term(_of\(.*\))?$", ast.unparse(side)) for side in sides)
    return is_of_terms and not isinstance(node.ops[0], ast.In | ast.NotIn | ast.Is | ast.IsNot)


def renames(node: ast.Call) -> bool:
    """Whether a call renames a file: `path.rename(x)`, or `path.replace(x)`, which has one argument unlike a text's."""
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method == "rename" or (method == "replace" and len(node.args) == 1 and not node.keywords)


def published(package: Path) -> set[str]:
    """Names in `__all__` of a package's `__init__`."""
    for node in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def unpublished_imports(path: Path, root: Path = ROOT) -> list[str]:
    """Imports of another package's module, or name, that its `__init__` does not name in `__all__`."""
    package, found = path.relative_to(root).parts[0], []
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "rollstream" or len(parts) < 3 or parts[1] in (package, "schemas"):
            continue
        module = file_of(name, root)
        if module is None:
            continue
        wanted = module.stem if module.name != "__init__.py" else parts[-1]
        if wanted not in published(module.parent / "__init__.py"):
            found.append(f"{path.relative_to(root)}:{line} imports {name}")
    return found


Methods = frozenset[str]


class Declared(NamedTuple):
    """A class's own declarations: public methods and the names of its bases."""

    path: Path
    methods: Methods
    bases: Methods


def classes_in(paths: Iterable[Path]) -> list[tuple[str, Declared]]:
    """Every class of the files, with its name; properties count as methods."""
    return [one for path in paths for one in _classes_of(path, path.read_text(encoding="utf-8"))]


@cache
def _classes_of(path: Path, text: str) -> Sequence[tuple[str, Declared]]:
    found: list[tuple[str, Declared]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            defined = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            methods = frozenset(one.name for one in defined if not one.name.startswith("_"))
            found.append((node.name, Declared(path, methods, frozenset(map(ast.unparse, node.bases)))))
    return found


def is_interface(one: Declared) -> bool:
    """Whether a class says what others implement: a protocol, or an abstract class without a base of its own."""
    return bool({"Protocol", "ABC"} & {base.partition("[")[0].rpartition(".")[2] for base in one.bases})


def uncalled_methods(paths: Iterable[Path]) -> list[str]:
    """Methods of protocols and abstract classes that none of the files uses."""
    paths = list(paths)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    used = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    interfaces = [(name, one) for name, one in classes_in(paths) if is_interface(one)]
    return [f"{name}.{method}" for name, one in interfaces for method in sorted(one.methods - used)]


BY_A_TABLE = {
    "Algorithm": "table.algorithm",
    "InteractionProtocol": "table.protocol",
    "Environment": "registry.environment",
}
"""The call that returns every implementation by its name, by interface: a suite over all names makes that call."""
GIVEN_BY = {
    "ExportLog": "open_export",
    "ExportReader": "open_export",
    "KafkaReader": "KafkaLog",
    "KafkaGroupReader": "KafkaLog",
    "MemoryReader": "MemoryLog",
    "MemoryGroupReader": "MemoryLog",
    "TransformersEngine": "TransformersSettings",
    "VllmEngine": "VllmSettings",
    "ScriptedTokenizer": "ScriptedEngine",
    "NoTokenizer": "OpenAIEngine",
    "ChatTokenizer": "TransformersSettings",
    "TextTokenizer": "OpenAIEngine",
}
"""The name through which a suite gets an implementation, by implementation."""


def used_by(suites: Iterable[Path]) -> set[str]:
    """Names that the code of the suites reads, their imports apart: `Name`, and `module.name` of a call."""
    nodes = [node for suite in suites for node in ast.walk(ast.parse(suite.read_text(encoding="utf-8")))]
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    return calls | {node.id for node in nodes if isinstance(node, ast.Name)}


def without_contract(paths: Iterable[Path], suites: Iterable[Path]) -> dict[str, list[str]]:
    """Interfaces with several implementations, and which of these no suite uses.

    What implements a protocol is a public class with all its methods; that it has the one method of a callback says
    nothing. What implements an abstract class is a public class below it from which no other derives.
    """
    found = classes_in(paths)
    own = {name: one for name, one in found if "Protocol" not in one.bases}
    derived_from = {base for one in own.values() for base in one.bases}

    def above(name: str) -> set[str]:
        one = own.get(name)
        return set() if one is None else {*one.bases}.union(*map(above, one.bases - {name}))

    def methods(name: str) -> Methods:
        one = own.get(name)
        return frozenset() if one is None else one.methods.union(*map(methods, one.bases - {name}))

    used = used_by(suites)
    missing: dict[str, list[str]] = {}
    for name, one in found:
        if not is_interface(one) or BY_A_TABLE.get(name) in used:
            continue
        if "Protocol" in one.bases:
            having = [other for other in own if len(one.methods) > 1 and one.methods <= methods(other)]
        else:
            having = [other for other in own if name in above(other) and other not in derived_from]
        implementations = sorted(other for other in having if other[0] != "_")
        unused = [other for other in implementations if GIVEN_BY.get(other, other) not in used]
        if len(implementations) > 1 and unused:
            missing[name] = unused
    return missing
