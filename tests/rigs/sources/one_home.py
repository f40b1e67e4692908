"""Rules that a file states in whatever spelling: its syntax tree tells where a line's pattern does not.

Ids are taken apart in schemas/ids alone, terms are compared in eventlog/terms alone.
"""

import ast
import re
from collections.abc import Iterator

PARTS_OF_AN_ID = {"split", "rsplit", "partition", "rpartition", "index", "rindex", "find", "rfind"}
BEGINS = {"startswith", "endswith", "removeprefix", "removesuffix"}
_PATHS = re.compile(r"(?i)(path|folder|file|uri|url|route|where|text|line|address|host|module|model|base|name)s?$")
"""Names of values that have slashes without being ids."""
_IDS = re.compile(r"(^|_)(id|key|group|job|run|rollout|task|trajectory|batch|player|owner|submission)$")
_TERM = re.compile(r"(^|_)term$")
ORDERS = {"max", "min", "sorted", "sort", "nlargest", "nsmallest"}
SQL = re.compile(r"\b(regexp_\w+|split_part|string_split\w*|str_split\w*)\((?!.*\{(?:PLAYER|INDEXED)\})")


def name_of(node: ast.AST) -> str:
    """The last name of an expression: of `a.b` it is b, of a call or of an item that of its function or value."""
    if isinstance(node, ast.Call):
        return name_of(node.func)
    if isinstance(node, ast.Subscript):
        is_key = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        return str(node.slice.value) if is_key and isinstance(node.slice, ast.Constant) else name_of(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def has_slash(node: ast.AST | None) -> bool:
    """Whether an expression writes what is between the parts of an id."""
    texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant)) if node is not None else ()
    return any("/" in text and "//" not in text if isinstance(text, str) else text == b"/" for text in texts)


def takes_ids_apart(node: ast.Call) -> bool:
    """Whether a call looks for slashes outside of paths, for the beginning that an id gives, or matches an id."""
    if not isinstance(node.func, ast.Attribute):
        return False
    method, of, asked = node.func.attr, name_of(node.func.value), node.args[0] if node.args else None
    if of == "re":
        return has_slash(asked) and any(_IDS.search(name_of(one)) for one in node.args[1:])
    if method in PARTS_OF_AN_ID:
        is_cut = _IDS.search(of) and isinstance(asked, ast.Constant) and asked.value != "."
        return bool(is_cut) or (has_slash(asked) and not _PATHS.search(of))
    if method in BEGINS and isinstance(asked, ast.JoinedStr) and has_slash(asked):
        return any(isinstance(part, ast.FormattedValue) and _IDS.search(name_of(part.value)) for part in asked.values)
    return False


def is_term(node: ast.AST) -> bool:
    """Whether an expression is a term, or a tuple with one."""
    return any(map(is_term, node.elts)) if isinstance(node, ast.Tuple) else bool(_TERM.search(name_of(node)))


def chooses_by_term(node: ast.Call) -> bool:
    """Whether a call orders by terms, as `max(claims, key=lambda claim: claim.term)` does."""
    if name_of(node) not in ORDERS:
        return False
    inner = [one for part in (*node.args, *node.keywords) for one in ast.walk(part)]
    return any(
        (isinstance(one, ast.Attribute | ast.Name) and is_term(one))
        or (isinstance(one, ast.Constant) and isinstance(one.value, str) and bool(_TERM.search(one.value)))
        for one in inner
    )


def subtracts_terms(node: ast.BinOp) -> bool:
    """Whether an expression says by how much a term is higher than another."""
    return isinstance(node.op, ast.Sub) and is_term(node.left) and is_term(node.right)


def lines_away(tree: ast.AST, name: str) -> Iterator[int]:
    """Numbers of the lines, from 0 on, of a file that takes an id apart or compares terms and is not their home."""
    for node in ast.walk(tree):
        is_apart = isinstance(node, ast.Call) and takes_ids_apart(node) and name != "schemas/ids.py"
        is_ordered = (isinstance(node, ast.Call) and chooses_by_term(node)) or (
            isinstance(node, ast.BinOp) and subtracts_terms(node)
        )
        if isinstance(node, ast.expr) and (is_apart or (is_ordered and name != "eventlog/terms.py")):
            yield node.lineno - 1


def in_sql(text: str) -> list[str]:
    """Lines of SQL that take an id apart by a pattern of their own, where `{PLAYER}` stands for that of schemas/ids."""
    return [line.strip() for line in text.splitlines() if SQL.search(line)]
