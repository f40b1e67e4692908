"""What the command line changes in a configuration as written: `--override a.b.c value` and the run's own options."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from rollstream.harness.config.yaml_reading import parse
from rollstream.schemas.config import COMPONENT_SECTIONS, NAMED_SECTIONS
from rollstream.schemas.errors import ConfigError


def apply(written: dict[str, Any], overrides: Sequence[tuple[str, str]]) -> None:
    """Set every key by its dotted path. Raises ConfigError naming the option and the part of the path that is wrong.

    A section that is missing is made, a named block (`trainers.X`) is not: nothing would use it. Values are read as
    YAML; what is a list in the file may also be given by commas, what is text there stays text.
    """
    for key, value in overrides:
        _apply_one(written, key, value)


def with_run_options(written: dict[str, Any], options: Mapping[str, JsonValue]) -> None:
    """Put the options that were given into `finetuning.run_configuration`, over what the file says there."""
    given = {key: value for key, value in options.items() if value is not None}
    finetuning = written.get("finetuning")
    if given and isinstance(finetuning, dict):
        before = finetuning.get("run_configuration")
        finetuning["run_configuration"] = {**(before if isinstance(before, dict) else {}), **given}


def _apply_one(written: dict[str, Any], key: str, value: str) -> None:
    parts = key.split(".")
    if not all(parts):
        raise ConfigError(f"--override {key}: a dotted path such as finetuning.num_epochs is needed")
    block: Any = written
    for depth, part in enumerate(parts[:-1], 1):
        if depth == 2:
            _check_named(block, parts, key)
        block = block.setdefault(part, {})
        if not isinstance(block, dict):
            raise ConfigError(f"--override {key}: {'.'.join(parts[:depth])} is a value, not a section")
    block[parts[-1]] = _value(block.get(parts[-1]), value, key)


def _check_named(section: Mapping[str, Any], parts: Sequence[str], key: str) -> None:
    name = parts[1]
    if parts[0] not in (*COMPONENT_SECTIONS, *NAMED_SECTIONS) or name in section:
        return
    near = difflib.get_close_matches(name, section, n=1, cutoff=0.5)
    known = ", ".join(sorted(section)) or "none"
    hint = f"did you mean {parts[0]}.{near[0]}?" if near else f"defined are: {known}"
    raise ConfigError(f"--override {key}: the file has no {parts[0]}.{name}; {hint}")


def _value(before: Any, text: str, key: str) -> Any:
    value = parse(text, f"--override {key}")
    if isinstance(before, list) and isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    if isinstance(before, str) and isinstance(value, (bool, int, float)):
        return text
    return value
