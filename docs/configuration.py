"""Writes docs/configuration.md from the settings classes: keys, types, defaults and the docstrings of attributes.

`make docs` runs it; tests/test_reference_pages.py compares the page with the classes.
"""

import ast
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from rollstream.harness.config.components import (
    RollstreamTrainerAdapterConfig,
    RollstreamTrainerConfig,
    RollstreamTrajectoryBuilderConfig,
)
from rollstream.harness.services.serving import FROM_ENVIRONMENT
from rollstream.schemas import evaluators, policy_gradient, services
from rollstream.schemas.algorithm_settings import AlgorithmSettings, DistillationSettings, Needs, PairSettings
from rollstream.schemas.config import EvalGeneral, FinetuningSection, ForeignBlock, WorkflowSection
from rollstream.schemas.engine_settings import InstalledEngineSettings, TransformersSettings

PAGE = Path(__file__).with_suffix(".md")
RUN_FILE = {
    "workflow": WorkflowSection,
    "eval.general": EvalGeneral,
    "eval.evaluators.X": evaluators.Evaluator,
    "trajectory_builders.X": RollstreamTrajectoryBuilderConfig,
    "trainer_adapters.X": RollstreamTrainerAdapterConfig,
    "trainers.X": RollstreamTrainerConfig,
    "finetuning": FinetuningSection,
}
SERVICES = {
    "serve": services.ServiceSettings,
    "serve producers": services.ProducerSettings,
    "serve processors": services.ProcessorSettings,
    "serve learner": services.LearnerSettings,
    "serve metrics": services.MetricsSettings,
    "serve tracker": services.TrackerServiceSettings,
    "serve endpoint": services.EndpointSettings,
}
SHARED: Mapping[type[BaseModel], str] = {
    AlgorithmSettings: "all",
    policy_gradient.PolicyGradientSettings: "with advantages",
    policy_gradient.KlPenaltySettings: "with a KL penalty",
    policy_gradient.ClippedSettings: "with clipped ratios",
    PairSettings: "of pairs",
    DistillationSettings: "with a teacher",
}
"""Base classes whose keys have a table of their own, and its title: classes derived from them only refer to it."""
REFERRED = {services.ServiceSettings, services.EndpointSection, TransformersSettings}
"""Likewise, of which the table is that of another block."""
INTRODUCTIONS: Mapping[type[BaseModel], str] = {
    RollstreamTrajectoryBuilderConfig: "Rollouts: which agent plays, on which engine and broker, and in which groups.",
    RollstreamTrainerAdapterConfig: "The learner: what it trains, and how.",
    RollstreamTrainerConfig: "How a run is conducted.",
}
"""Introductions of blocks whose classes describe themselves as Python classes."""
COMPUTED = {"artifact_uri": "`artifacts` in the workspace", "workspace": "`.rollstream`", "name": "`SERVICE-1`"}
"""Defaults that `serve` has for keys of all services."""
LEFT_OUT = {ForeignBlock, InstalledEngineSettings, Needs}
"""Classes of which no block is written by hand."""
SIMPLE = {str: "text", int: "integer", float: "number", bool: "`true` or `false`", Path: "path", NoneType: "`null`"}
HEAD = """# Configuration

All keys of a run's file and of the services' settings. `make docs` writes this page: descriptions are docstrings of the
classes in `schemas/` and `harness/config/components.py`, or else in `docs/descriptions.yaml`.

A run's file is YAML. `rollstream validate --config_file run.yaml` checks it: an unknown key is an error that suggests
the nearest known one, and a key without effect is a warning. `-o PATH VALUE` overrides a key, for example `-o
trainer_adapters.learner.optimizer.learning_rate 1e-5`. `${NAME}` and `${NAME:-default}` in a text stand for an
environment variable ([security.md](security.md)), and `~` at the beginning of a path for the home folder.

X is a name of your choice, by which `finetuning` chooses one block of each kind; Y is a name of your choice too. Of
blocks with a `_type`, the keys of rollstream's own components are listed; other components have their own
([extending.md](extending.md)). The sections that only NeMo Agent Toolkit uses (`llms`, `functions`, `general` and
others) are kept as they are ([migrating-from-nat.md](migrating-from-nat.md)).

"none" and "None" in a description mean that the key is `null` or left out.
"""
SERVICES_HEAD = """## Settings of services

`rollstream serve SERVICE --settings FILE` reads a JSON object with these keys. Environment variables give what it
leaves out: {variables}; `ROLLSTREAM_KAFKA_KEY` is `kafka.key`. A managed `finetune` derives the settings of its
services from the run's file.
"""


class Table(NamedTuple):
    """One heading: a settings class, or several of which a block is one."""

    title: str
    kind: Any
    level: int


@functools.cache
def docstrings(model: type) -> dict[str, str]:
    """Docstrings of the attributes that a class itself declares, each on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            text = ast.literal_eval(after.value) if isinstance(after.value, ast.Constant) else None
            found |= {node.target.id: " ".join(text.split())} if isinstance(text, str) else {}
    return found


def description_of(model: type[BaseModel], name: str) -> str:
    """Docstring of a field, or what descriptions.yaml has; of one that a base class has with another default, that."""
    described = {base: docstrings(base) | _descriptions().get(base.__name__, {}) for base in _bases(model)}
    declaring = _declares(model, name)
    if name not in described[declaring] and any(name in base.model_fields for base in _referred(model)):
        literal = get_origin(model.model_fields[name].annotation) is Literal
        return "No other value." if literal and len(get_args(model.model_fields[name].annotation)) == 1 else "As above."
    return next((texts[name] for texts in described.values() if name in texts), "")


@functools.cache
def _descriptions() -> dict[str, dict[str, str]]:
    return yaml.safe_load(PAGE.with_name("descriptions.yaml").read_text(encoding="utf-8"))


def _bases(model: type) -> list[type]:
    return [base for base in model.__mro__ if base.__module__.startswith("rollstream.")]


def own_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields that are not in the table of a base class."""
    referred = _referred(model)
    return {
        name: field
        for name, field in model.model_fields.items()
        if field.annotation not in LEFT_OUT and _declares(model, name) not in referred
    }


def _declares(model: type, name: str) -> type:
    return next(base for base in _bases(model) if name in inspect.get_annotations(base))


def _referred(model: type[BaseModel]) -> list[type[BaseModel]]:
    """Base classes with tables of their own, the most general first."""
    return [base for base in reversed(_bases(model)[1:]) if base in SHARED or base in REFERRED]


def members_of(kind: Any) -> list[type[BaseModel]]:
    """The settings classes in a type, those in lists and maps included."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [] if kind in LEFT_OUT else [kind]
    return [] if get_origin(kind) is Literal else [one for part in get_args(kind) for one in members_of(part)]


class Pages:
    """Tables in the order in which blocks refer to them, each class once."""

    def __init__(self) -> None:
        self.tables: dict[tuple[type[BaseModel], ...], Table] = {}

    def add(self, title: str, kind: Any, level: int = 3) -> None:
        """Add a block and those in it."""
        members = members_of(kind)
        if not members or tuple(members) in self.tables:
            return
        self.tables[tuple(members)] = Table(title, kind, level)
        if len(members) > 1:
            for base in (one for one in SHARED if any(issubclass(member, one) for member in members)):
                self.add(f"{title}: {SHARED[base]}", base, 5)
            for member in members:
                self.add(f"{title}: {tag_of(member)}", member, 5)
            return
        model = members[0]
        for name, field in own_fields(model).items():
            inner = f"{title}{'.' if ' ' not in title else ': '}{field.alias or name}"
            self.add(inner if get_origin(_plain(field.annotation)) is not dict else f"{inner}.Y", field.annotation, 4)

    def link(self, kind: Any) -> str:
        """Link to a block's heading."""
        title = self.tables[tuple(members_of(kind))].title
        return f"[{title}](#{re.sub(r'[^a-z0-9_ -]', '', title.lower()).replace(' ', '-')})"


def _plain(kind: Any) -> Any:
    """A type without its annotations and without None."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        left = [one for one in get_args(kind) if one is not NoneType]
        return _plain(left[0]) if len(left) == 1 else kind
    return kind


def tag_of(model: type[BaseModel]) -> str:
    """The value by which a union chooses a class."""
    field = next(model.model_fields[name] for name in ("name", "kind", "type") if name in model.model_fields)
    return "your own" if field.is_required() else str(field.default)


def type_text(kind: Any, pages: Pages) -> str:
    """A type in the words of a reader of YAML."""
    is_block = get_origin(_plain(kind)) not in (dict, tuple) and tuple(members_of(kind)) in pages.tables
    if is_block:
        return pages.link(kind)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return type_text(parts[0], pages) + _limits(parts[1:])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(type_text(one, pages) for one in parts if one is not NoneType))
    if origin is Literal:
        return " or ".join(f"`{json.dumps(one) if isinstance(one, bool) else one}`" for one in parts)
    if origin in (tuple, list):
        has_any_length = origin is list or parts[-1] is Ellipsis
        return f"list of {'' if has_any_length else f'{len(parts)} '}{type_text(parts[0], pages)}"
    if origin is dict:
        return f"map of {type_text(parts[1], pages)}"
    return "text" if isinstance(kind, type) and issubclass(kind, SecretStr) else SIMPLE.get(kind, "any")


def _limits(metadata: Any) -> str:
    signs = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}
    found = [
        f" {sign} {int(limit) if limit == int(limit) else limit}"
        for one in metadata
        for kind, sign in signs.items()
        if isinstance(one, kind) and (limit := getattr(one, kind.__name__.lower())) is not None
    ]
    return ",".join(found)


def default_text(model: type[BaseModel], name: str) -> str:
    """A default as YAML has it; empty for a block, whose keys have their own."""
    field = model.model_fields[name]
    if field.is_required():
        return COMPUTED.get(name, "required") if issubclass(model, services.ServiceSettings) else "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value, default=str)}`"


def rows(model: type[BaseModel], pages: Pages) -> Iterator[str]:
    """The table of a class, and references to the tables of its base classes."""
    fields = own_fields(model)
    if referred := [pages.link(base) for base in _referred(model) if (base,) in pages.tables]:
        yield f"The keys of {', '.join(referred)}{', and:' if fields else '.'}\n"
    if fields:
        yield "| key | type | default | |\n| --- | --- | --- | --- |"
    for name, field in fields.items():
        kind = type_text(field.annotation, pages) + _limits(field.metadata)
        cells = (f"`{field.alias or name}`", kind, default_text(model, name), description_of(model, name))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def sections(blocks: Mapping[str, Any], pages: Pages) -> Iterator[str]:
    """The blocks' headings with their tables."""
    known = len(pages.tables)
    for title, kind in blocks.items():
        pages.add(title, kind)
    for members, table in list(pages.tables.items())[known:]:
        yield f"\n{'#' * table.level} {table.title}\n"
        model, *others = members
        if others:
            yield "One of: " + ", ".join(f"[{tag_of(one)}]{pages.link(one).partition(']')[2]}" for one in members) + "."
            continue
        yield INTRODUCTIONS.get(model) or _paragraphs(model)
        yield ""
        yield from rows(model, pages)


def _paragraphs(model: type[BaseModel]) -> str:
    text = re.sub(r"\s*Derive from this class[^.]*\.|^`[\w.]+`: ", "", inspect.getdoc(model) or "")
    text = text[:1].upper() + text[1:]
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def page() -> str:
    """The whole page."""
    pages = Pages()
    variables = ", ".join(f"`{variable}` (`{key}`)" for key, variable in FROM_ENVIRONMENT.items())
    lines = [HEAD, "## The run's file", *sections(RUN_FILE, pages), "", SERVICES_HEAD.format(variables=variables)]
    return "\n".join([*lines, *sections(SERVICES, pages)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
