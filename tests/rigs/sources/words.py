"""Words that a field's term replaces (CONTRIBUTING.md, glossary): where they are looked for, and how."""

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.rigs.sources.source_tree import ALLOWED, ROOT

FOLDERS = (*ALLOWED, "tests", "benchmarks", "examples", "requirements", "docs")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SUFFIXES = (".py", ".md", ".sql", ".yaml", ".mjs")
LISTS = {"tests/rigs/sources/words.py", "tests/test_words.py"}
"""Files that have these words because they are about them."""
STAYS = {
    ("metrics/projection/tables.sql", "anew"): "other text before its views has every projector read the log again",
    ("harness/config/yaml.py", "mark"): "PyYAML's word",
    ("producers/environments/tic_tac_toe_board.py", "mark"): "of a player on the board",
    ("producers/environments/tic_tac_toe_board.py", "place"): "a move of the game",
    ("producers/environments/tic_tac_toe_self_play.py", "_place"): "a move of the game",
    ("schemas/permissions.py", "place"): "a kind of entry of a user's --allow",
    ("schemas/settings.py", "knows_single_group"): "a field of recorded plans, which must keep decoding",
    ("schemas/settings.py", "steer"): "a key of configurations and a field of recorded plans",
    ("tests/chaos/kill_jobs.py", "environ"): "Python's own",
    ("tests/rigs/services/process_group.py", "environ"): "Python's own",
}
"""File and word that are not replaced, and why."""

NAME_PARTS = {
    "anew": "again",
    "barren": "untrainable",
    "buried": "dead_lettered",
    "bury": "dead_letter",
    "garbage": "unneeded, or gc",
    "lifeline": "die_with_parent",
    "minding": "background",
    "plateau": "early_stopping",
    "reckoned": "computed",
    "seldom": "rarely",
    "shelf": "model_cache",
    "stranger": "foreign",
    "surroundings": "run_context",
    "thrice": "three_times",
    "unfolded": "poison, fold_errors",
    "unheard": "without_answer",
}
"""Banned parts of a name (`_` and capitals divide it) in any file, with replacements."""
NAMES = {
    "aside": "temporary, or what is put there",
    "end_of_lost": "fail_truncated_run",
    "environ": "env",
    "extras": "optional_dependencies",
    "going_on": "continue_from_ids",
    "group_run": "group_execution",
    "knows_single_group": "filters_single_group",
    "let_in": "admitted",
    "look": "inspect, check",
    "mark": "offset, identity, or what it marks",
    "marks": "offsets, or what they mark",
    "model_shelf": "model_cache",
    "news": "what is new: new_tokens, new_errors, changed",
    "note": "metadata, status, _record",
    "notes": "metadata, records",
    "place": "location, path, position, address",
    "places": "locations, paths, positions, addresses",
    "room": "space, capacity, what is left of it",
    "run_end": "run_completion, outcome",
    "run_ends": "ended_runs",
    "said": "message, text, output, answer",
    "say": "report, print, notify",
    "settle": "complete, finish, resolve",
    "spoken": "text_ids, answer, rollout",
    "spread": "reward_range, to_tokens",
    "steer": "adaptive",
    "takes_others": "accepts_external_groups",
    "tell": "report, on_progress",
    "tie_to_parent": "die_with_parent",
    "told": "reported, output, message",
    "walk": "epoch_permutation, visit",
    "workplace": "project",
}
"""Whole names of functions, classes, arguments, attributes and variables, without `_` at their ends."""
CLASSES = {
    "backend": "RunHandle",
    "connected": "RunContext",
    "held": "LoadedModel",
    "opening": "RunRequest",
    "playing": "ImportContext",
    "reading": "ImportedCall",
}
"""Whole names of classes alone: functions and variables have these words in their common meaning."""
FUNCTIONS = {"until": "wait_until, retry_until"}
"""Whole names of functions alone: a parameter has the word as range and slice have stop."""
SHAPES = {
    r"(^|_)(?<!there_)(is|are|was|were)_no_(?!(longer|more|less|fewer)(_|$))": "is not a, has no, is invalid",
    r"(^|_)(tell|tells|told|say|says|said)(_|$)": "report, return, log, raise, record",
    r"^(test_)?(what|whatever|who|whoever)_(?!if(_|$))": "the subject itself: a record, a run, an error",
}
"""Patterns of names of functions, tests included, with what replaces them: a name has a subject, a verb, an outcome."""
TEXT = {
    r"anew": "again",
    r"barren": "untrainable",
    r"bur(y|ies|ied)": "dead-letter",
    r"classic": "epochwise",
    r"dealt out": "rebalanced",
    r"for\s*ever": "without end, until ...",
    r"(?<!there\s)(?<!there\s{5})(is|are|was|were) no (?!(longer|more|less|fewer)\b)\w+": "is not a, is not an",
    r"let the world know": "report",
    r"(is|are) (none of (ours|theirs)|nobody's|no one's)": "is not built in, was not issued here, has no owner",
    r"(it|this|that) is (?-i:none)(?! of)": "it is not a ..., another text, for others",
    r"(for |by |(?<=#\s))(?-i:who)": "whoever, the client that, a call that",
    r"(?<=[.\s]\s)(?-i:Who)(?=\s[^.?]*\.)": "whoever, a caller that, a query",
    r"reckon(s|ed)?": "compute",
    r"it said nothing": "no log output",
    r"seldom": "rarely",
    r"stands? (in|at|twice)(?! for)": "is in, is at",
    r"strangers?": "foreign",
    r"surroundings": "run context",
    r"that there is not": "does not exist",
    r"thrice": "three times",
    r"unfolded": "poison record",
    r"unheard": "without an answer",
    r"who tries again": "retry",
    r"would die again": "still cannot be decoded",
}
"""Patterns of banned words in messages, docstrings, comments and documents, with replacements."""
HEADLESS = {"By", "How", "Of", "What", "Where", "Which", "Who", "Whom", "Whose", "Why"}
"""First words of a docstring that is a clause without a main clause, unless it is a question."""


def patterns_of(text: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    """Patterns by how they are written: of whole words in any case, each space one or more of any kind."""
    return {one: re.compile(r"\b" + one.replace(" ", r"\s+") + r"\b", re.IGNORECASE) for one in text}


_TEXT = {pattern: TEXT[one] for one, pattern in patterns_of(TEXT).items()}
_ANY_TEXT = re.compile("|".join(pattern.pattern for pattern in _TEXT), re.IGNORECASE)
"""One pattern that finds whether any of them does: most texts have none."""


def texts(root: Path = ROOT) -> Iterator[Path]:
    """Every file whose words count."""
    yield from (root / page for page in PAGES if (root / page).exists())
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and "golden" not in path.parts and str(path.relative_to(root)) not in LISTS:
                yield path


def unneeded(excuses: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Excuses, each a file and a word, that are not in the tree or would not be found there."""
    excuses = [*excuses]
    excused = (path for path in texts() if any(path.match(name) for name, _ in excuses))
    found = {path: {word.lower() for _, word, _ in _every_word(path)} for path in excused}
    return [(name, word) for name, word in excuses if not any(word in found[one] for one in found if one.match(name))]


def banned_words(path: Path) -> list[str]:
    """Banned words of a file, each as `LINE: what is found -> what replaces it`, in order."""
    stays = {word for name, word in STAYS if path.match(name)}
    return [f"{line}: {words} -> {better}" for line, words, better in _every_word(path) if words.lower() not in stays]


def _every_word(path: Path) -> list[tuple[int, str, str]]:
    """Line, word and replacement; with the words that stay."""
    text = path.read_text(encoding="utf-8")
    python = path.suffix == ".py"
    nodes = list(ast.walk(ast.parse(text))) if python else []
    found = [*_in_names(path.stem, nodes), *_headless(nodes)] if python else []
    for line, part in _texts_of(text, nodes) if python else [(1, text)]:
        for pattern, word in _TEXT.items() if _ANY_TEXT.search(part) else ():
            for match in pattern.finditer(part):
                at = line + part.count("\n", 0, match.start())
                found.append((at, " ".join(match.group().split()), word))
    return sorted(found)


def _in_names(stem: str, nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, str]]:
    classes = _defined(nodes, ast.ClassDef)
    functions = _defined(nodes, ast.FunctionDef, ast.AsyncFunctionDef)
    for line, name in [(1, stem), *_names_of(nodes)]:
        parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
        snake = "_".join(parts).lower()
        own = CLASSES if (line, name) in classes else FUNCTIONS if (line, name) in functions else {}
        names = own | NAMES
        banned = names.get(snake) or next((NAME_PARTS[one] for one in snake.split("_") if one in NAME_PARTS), None)
        if banned is None and (line, name) in functions:
            banned = next((better for shape, better in SHAPES.items() if re.search(shape, snake)), None)
        if banned is not None:
            yield line, name, banned


def _headless(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Docstrings, of attributes too, that begin with one of HEADLESS."""
    blocks = (body for node in nodes if isinstance(body := getattr(node, "body", None), list))
    for statement in itertools.chain.from_iterable(blocks):
        value = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            sentence = re.split(r"(?<=[.?])\s", value.value.strip(), maxsplit=1)[0]
            first = sentence.partition(" ")[0]
            if first in HEADLESS and not sentence.endswith("?"):
                yield statement.lineno, first, "a noun phrase or an imperative: what is returned, done or held"


def _defined(
    nodes: Sequence[ast.AST], *kinds: type[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]
) -> set[tuple[int, str]]:
    return {(node.lineno, node.name) for node in nodes if isinstance(node, kinds)}


def _names_of(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of whatever a module defines: functions, classes, arguments, attributes, variables, imports as."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case _:
                pass


def _texts_of(text: str, nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and string; what a format string computes is left out."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
