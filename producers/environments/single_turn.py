"""One question a rollout, made of an example's inputs, and one answer, which evaluators or reward functions score."""

from collections.abc import Sequence
from string import Formatter
from typing import Any

from rollstream.producers.rollout.environment import NEEDS_DATASET, Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.reply import text_of
from rollstream.producers.rollout.session import Message, Session
from rollstream.schemas.errors import EnvironmentRunError


@register_environment("single_turn")
class SingleTurn(Environment):
    """Asks `prompt`, after the system message `system` if there is one, and ends with the answer. It gives no reward.

    `prompt` is a template as `str.format` has it: `{key}` stands for a key of the example's inputs (a text as it is,
    another value as JSON), `{{` and `}}` for braces. A demonstration is the example's `answer`.
    """

    def __init__(self, prompt: str = "{question}", system: str | None = None) -> None:
        for name, text in (("prompt", prompt), ("system", "" if system is None else system)):
            if not isinstance(text, str):
                raise ValueError(f"{name} is {text!r}; it must be text")
        self._parts = _parts_of(prompt)
        self._before: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    async def run(self, session: Session) -> None:
        """Ask once; the first agent answers."""
        question = "".join(text_of(session.inputs[part]) if is_key else part for part, is_key in self._parts)
        await session.chat([*self._before, {"role": "user", "content": question}], session.agents[0])

    def demonstrate(self, session: Session, messages: Sequence[Message], agent: str) -> str:
        """The right answer. Raises EnvironmentRunError if the example has none."""
        if "answer" not in session.inputs:
            raise EnvironmentRunError(
                "the example has no key 'answer' to demonstrate; name it in eval.general.dataset.structure.answer_key, "
                "or leave out warm_start"
            )
        return text_of(session.inputs["answer"])

    def required_inputs(self) -> tuple[str, ...]:
        """The keys in the prompt."""
        return tuple(dict.fromkeys(part for part, is_key in self._parts if is_key))

    def examples(self, num: int, seed: int) -> list[dict[str, Any]]:
        """Raises EnvironmentRunError: it has no questions of its own."""
        raise EnvironmentRunError(NEEDS_DATASET)


def _parts_of(template: str) -> list[tuple[str, bool]]:
    """The texts and keys of a template in order, each with whether it is a key. Raises ValueError.

    A key is looked up as it is written: neither attributes nor items of a value can be named.
    """
    found: list[tuple[str, bool]] = []
    try:
        for text, key, spec, conversion in Formatter().parse(template):
            found.append((text, False))
            if key is None:
                continue
            if not key or spec or conversion:
                raise ValueError("a placeholder is empty, or more than a key")
            found.append((key, True))
    except ValueError as error:
        raise ValueError(
            f"prompt: {error}; write a key of the example as {{question}}, and braces as {{{{ and }}}}"
        ) from error
    return found
