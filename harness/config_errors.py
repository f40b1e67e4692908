"""The wording of configuration errors: full dotted path, what is there, what is expected, the nearest known key.

A value that came from `${ENV}` is shown as it was written, never expanded.
"""

import difflib
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAliasType, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollstream.schemas.config import COMPONENT_SECTIONS

_TAGS = ("ours", "foreign")
