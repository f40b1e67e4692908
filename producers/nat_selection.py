"""Which steps of a workflow are to be trained on: those of the target functions and the target model. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollstream.schemas.intermediate_steps import IntermediateStep, InvocationNode

WORKFLOW = "<workflow>"
"""NAT's name of the function that a whole workflow is."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is trained on. An LLM call counts if a target function is among the functions around it."""

    target_functions: frozenset[str] = frozenset({WORKFLOW})
    target_model: str | None = None
    """Name of the model as its steps have it; none: every model."""
    candidates: str | None = None
    """Name of test-time-compute steps: their scored candidates are trained on, in place of LLM calls."""


@dataclass(slots=True)
class Functions:
    """The functions that were seen: name and caller by id."""

    nodes: dict[str, InvocationNode] = field(default_factory=dict[str, InvocationNode])

    def see(self, steps: Iterable[IntermediateStep]) -> None:
        """Note the functions that steps ran in."""
        for step in steps:
            node = step.function_ancestry
            known = self.nodes.get(node.function_id)
            if known is None or known.parent_id is None:
                self.nodes[node.function_id] = node

    def around(self, node: InvocationNode) -> frozenset[str]:
        """Names of a function and of all that called it, as far as they are known."""
        names: set[str] = set()
        seen: set[str] = set()
        at: InvocationNode | None = self.nodes.get(node.function_id, node)
        while at is not None and at.function_id not in seen:
            seen.add(at.function_id)
            names.add(at.function_name)
            if at.parent_name is not None:
                names.add(at.parent_name)
            at = self.nodes.get(at.parent_id) if at.parent_id is not None else None
        return frozenset(names)


def is_targeted(names: Iterable[str | None], around: frozenset[str], selection: Selection) -> bool:
    """Whether a call is trained on. `names`: of its model, as start and end say them, which may differ."""
    if not around & selection.target_functions:
        return False
    return selection.target_model is None or selection.target_model in set(names)


def remote_ancestry(spans: Mapping[str, "RemoteSpan"], span_id: str) -> InvocationNode:
    """Ancestry of a step of a remote workflow, which does not send it: the functions among the spans around it.

    The outermost function is called by `<workflow>`, and so is a step around which there is none.
    """
    chain: list[InvocationNode] = []
    seen: set[str] = set()
    at: str | None = span_id
    while at is not None and at in spans and at not in seen:
        seen.add(at)
        span = spans[at]
        if span.function_name is not None:
            chain.append(InvocationNode(function_id=at, function_name=span.function_name))
        at = span.parent_id
    if not chain or chain[-1].function_name != WORKFLOW:
        chain.append(InvocationNode(function_id=WORKFLOW, function_name=WORKFLOW))
    own, *callers = chain
    caller = callers[0] if callers else None
    return own.model_copy(
        update={"parent_id": caller and caller.function_id, "parent_name": caller and caller.function_name}
    )


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """A span of a remote workflow."""

    parent_id: str | None
    function_name: str | None = None
    """None if it is no function's."""
