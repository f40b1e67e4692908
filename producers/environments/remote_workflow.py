"""A workflow that runs elsewhere, behind NAT's HTTP server: a question is posted, steps are recorded as they come.

What it trains are the calls whose tokens its steps tell: of a model that our own endpoint serves, say.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import aiohttp

from rollstream.producers.rollout.environment import NEEDS_DATASET, Environment
from rollstream.producers.rollout.registry import register_environment
from rollstream.producers.rollout.session import Session
from rollstream.producers.traces.spans import WORKFLOW, Selection, Spans, json_value, scores
from rollstream.producers.traces.stream import Lines, RemoteStream, read_up_to
from rollstream.schemas.errors import EnvironmentRunError
from rollstream.schemas.events.intermediate_steps import IntermediateStep, IntermediateStepType
from rollstream.schemas.events.recorded import RecordedStep
from rollstream.schemas.variables import one_line

MAX_ERROR_BYTES = 4096
"""Read of the body of an error."""
PATHS = ("/v1/workflow/full", "/generate/full")
"""Asked in this order; the next one where there is none of the first."""
_WORKFLOW_END = IntermediateStepType.WORKFLOW_END.value
_ROUTES = re.compile(r"(/v1/workflow|/generate)(/full|/stream)?$")
"""Route that may end an endpoint's URL."""
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[['\"]([^'\"]+)['\"]\]")


@register_environment("remote_workflow")
class RemoteWorkflow(Environment):
    """Posts an example's `question` to `endpoint`; its LLM calls are the rollout's, its answer ends it.

    `target_functions` and `target_model` choose the calls that are trained on; a call around which the stream shows no
    function counts as one of `<workflow>`. `result_json_path` is the path of the result in the answer;
    null there is the result null, and nothing there fails the attempt.
    """

    URLS: ClassVar[tuple[str, ...]] = ("endpoint",)

    def __init__(
        self,
        endpoint: str,
        endpoint_timeout: float = 300.0,
        question_key: str = "question",
        target_functions: Sequence[str] = (WORKFLOW,),
        target_model: str | None = None,
        ttc_step_name: str | None = None,
        result_json_path: str = "$",
        retokenise: bool = False,
        assumed_version: int | None = None,
    ) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint is {endpoint!r}; it must be a URL like http://host:8000")
        if endpoint_timeout <= 0:
            raise ValueError(f"endpoint_timeout is {endpoint_timeout}; it must be more than 0 s")
        self._endpoint = base_url(endpoint)
        self._timeout_s = endpoint_timeout
        self._question_key = question_key
        self._selection = Selection(frozenset(target_functions), target_model, ttc_step_name)
        self._path = _path(result_json_path)
        self._path_text = result_json_path
        self._retokenise = retokenise
        self._assumed_version = assumed_version

    async def run(self, session: Session) -> None:
        """Ask, record, end. Raises EnvironmentRunError naming the endpoint for all that goes wrong there."""
        if self._question_key not in session.inputs:
            known = ", ".join(sorted(session.inputs)) or "none"
            raise EnvironmentRunError(
                f"the example has no key {self._question_key!r}; its inputs are: {known}; "
                "set question_key to one of them"
            )
        try:
            await self._ask(session, session.inputs[self._question_key])
        except TimeoutError as error:
            raise EnvironmentRunError(
                f"endpoint {self._endpoint} timed out after {self._timeout_s:g} s (endpoint_timeout); "
                "raise it or see the workflow server's log"
            ) from error
        except aiohttp.ClientError as error:
            raise EnvironmentRunError(
                f"endpoint {self._endpoint}: {type(error).__name__}: {error}; check the address and "
                "that its server runs"
            ) from error

    def examples(self, num: int, seed: int) -> list[dict[str, Any]]:
        """Raises EnvironmentRunError: a workflow has no questions of its own."""
        raise EnvironmentRunError(NEEDS_DATASET)

    async def _ask(self, session: Session, question: Any) -> None:
        recorder = _Recorder(session, self._selection, self._retokenise, self._assumed_version)
        async with asyncio.timeout(self._timeout_s), _posted(self._endpoint, {"input_message": question}) as response:
            stream, lines = RemoteStream(), Lines()
            try:
                async for chunk in response.content.iter_any():
                    for line in lines.feed(chunk):
                        await recorder.take(stream.read(line))
                await recorder.take(stream.read(lines.rest))
                result = _at(stream.answer, self._path, self._path_text)
            except EnvironmentRunError as error:
                raise EnvironmentRunError(f"endpoint {self._endpoint}: {error}") from error
        await recorder.end(question, result)


class _Recorder:
    """The steps of one remote rollout on their way into the session."""

    def __init__(self, session: Session, selection: Selection, retokenise: bool, assumed_version: int | None) -> None:
        self._session = session
        self._selection = selection
        self._spans = Spans(selection)
        self._options: dict[str, Any] = {"retokenise": retokenise, "assumed_version": assumed_version}
        self._end: RecordedStep | None = None

    async def take(self, step: IntermediateStep | None) -> None:
        """Record what a step of the stream completes."""
        recorded = self._spans.read(step) if step is not None else None
        if recorded is not None and recorded.event_type == _WORKFLOW_END and recorded.parent_id == "root":
            recorded, self._end = self._end, recorded
        if recorded is not None:
            await self._record(recorded)

    async def end(self, question: Any, result: Any) -> None:
        """Record what never ended, then the workflow's end with its result: NAT gives it the first 50 pieces alone."""
        for step in self._spans.rest():
            await self._record(step)
        end = self._end or RecordedStep(event_type=_WORKFLOW_END, name=WORKFLOW)
        data = json_value({"input": question} | (end.data or {}) | {"output": result})
        await self._record(end.model_copy(update={"data": data}))

    async def _record(self, step: RecordedStep) -> None:
        step_index = await self._session.record(step, **self._options)
        for score in scores([step], self._selection):
            await self._session.reward(score.value, score.name, step_index, is_score=True)


@asynccontextmanager
async def _posted(endpoint: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response of the first path that the endpoint has. Raises EnvironmentRunError for an HTTP error."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        for path in PATHS:
            async with client.post(endpoint + path, json=body, allow_redirects=False) as response:
                if response.status == 404 and path != PATHS[-1]:
                    continue
                if 300 <= response.status < 400:
                    raise EnvironmentRunError(
                        f"endpoint {endpoint}{path}: HTTP {response.status}: redirects are not followed; give the "
                        f"final address"
                    )
                if response.status >= 400:
                    error_body = (await read_up_to(response, MAX_ERROR_BYTES)).decode(errors="replace")
                    raise EnvironmentRunError(
                        f"endpoint {endpoint}{path}: HTTP {response.status}: {one_line(error_body, 200)}; "
                        "check the address and the workflow server's log"
                    )
                yield response
                return


def base_url(endpoint: str) -> str:
    """The server's address: `http://host/generate` and its other routes are taken for it, as NAT's help writes them."""
    return _ROUTES.sub("", endpoint.rstrip("/"))


def _path(text: str) -> tuple[str | int, ...]:
    """Keys and indices of a JSON path like `$.answer.items[0]`. Raises ValueError."""
    steps = list(_PATH_STEP.finditer(text, 1))
    if not text.startswith("$") or "".join(step.group() for step in steps) != text[1:]:
        raise ValueError(f"result_json_path is {text!r}; it must be like $ or $.answer.items[0]")
    return tuple(int(step[2]) if step[2] else step[1] or step[3] for step in steps)


def _at(answer: str, path: tuple[str | int, ...], path_text: str) -> Any:
    if not path:
        return answer
    try:
        found = json.loads(answer)
        for key in path:
            found = found[key]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EnvironmentRunError(
            f"its answer has nothing at result_json_path {path_text}; correct that path, or have the workflow return "
            f"JSON with it; it answered {one_line(answer, 100)!r}"
        ) from error
    return found
