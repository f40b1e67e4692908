"""An agent with OpenAI's client and two tools, a calculator and an SQL database, trained by the rollouts that it plays.

    pip install openai  # the client is not installed with rollstream
    python examples/agents/shop.py --workspace .rollstream --players 8

It claims the rollouts of `examples/agents/shop.yaml`, which may begin later, and ends once the gateway was gone for
`--patience` seconds.
"""

import argparse
import ast
import asyncio
import contextlib
import json
import operator
import re
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, BadRequestError, OpenAIError

from rollstream.producers import GatewayClient, RemoteRollout
from rollstream.producers.gateway.rollout_client import Retries
from rollstream.schemas.errors import GatewayError

ITEMS = [("apple", 3, 120), ("bread", 4, 35), ("cheese", 9, 18), ("milk", 2, 60), ("plum", 5, 80)]
SYSTEM = "Answer with a number alone. Table items(name, price, stock)."
MAX_CHARS = 200
"""Maximum characters of an expression and of a tool's result."""
MAX_STEPS = 100_000
"""Maximum steps of SQLite's virtual machine for a query."""
NUMBER = re.compile(r"-?\d+(\.\d+)?")
OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}


def tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    """A tool with one text parameter, in OpenAI's words."""
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[Any] = [
    tool("calculate", "Value of an expression of numbers, + - * / and parentheses.", "expression"),
    tool("query", "Rows of a SELECT on the shop's database.", "sql"),
]


def calculate(expression: str) -> str:
    """Value of an expression; raises ValueError for what is none."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / and parentheses")

    if len(expression) > MAX_CHARS:
        raise ValueError(f"more than {MAX_CHARS} characters")
    return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"


def query(sql: str, items: Sequence[Sequence[Any]] = ITEMS) -> str:
    """Rows of a SELECT on a fresh database in memory; raises sqlite3.Error for anything else."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE items (name TEXT, price INTEGER, stock INTEGER)")
        database.executemany("INSERT INTO items VALUES (?, ?, ?)", items)
        database.set_authorizer(
            lambda action, _table, name, *_: (
                sqlite3.SQLITE_OK
                if action in ALLOWED or (action == sqlite3.SQLITE_FUNCTION and name in ("sum", "min", "max", "count"))
                else sqlite3.SQLITE_DENY
            )
        )
        database.set_progress_handler(lambda: 1, MAX_STEPS)
        rows = database.execute(sql).fetchmany(10)
    return json.dumps(rows)[:MAX_CHARS]


def use(name: str, arguments: str, items: Sequence[Sequence[Any]] = ITEMS) -> str:
    """Answer of a tool; an error is an answer too, from which the model may learn."""
    tools: dict[str, Any] = {"calculate": calculate, "query": lambda sql: query(sql, items)}
    try:
        return tools[name](**json.loads(arguments))
    except (ArithmeticError, LookupError, RecursionError, SyntaxError, TypeError, ValueError, sqlite3.Error) as error:
        return f"error: {type(error).__name__}: {error}"[:MAX_CHARS]


def reward_of(answer: str, wanted: float) -> float:
    """1 for the right number, 0.1 for another one, 0 for anything else."""
    if NUMBER.fullmatch(answer.strip()) is None:
        return 0.0
    return 1.0 if float(answer) == wanted else 0.1


async def play(rollout: RemoteRollout, client: AsyncOpenAI) -> float:
    """Answer the question with as many tool calls as there are turns; the reward.

    A conversation that leaves the model no room for an answer ends without one.
    """
    task, model = rollout.task, client.with_options(base_url=rollout.openai_base_url, api_key=rollout.key)
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": str(task.inputs["question"])},
    ]
    items, final_text = task.inputs.get("items", ITEMS), ""
    for turn in range(task.max_turns):
        try:
            answer = await model.chat.completions.create(
                model=task.agents[0], messages=messages, tools=TOOLS, extra_headers={"Idempotency-Key": f"turn {turn}"}
            )
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            break
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        final_text = message.content or ""
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            content = use(call.function.name, call.function.arguments, items)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    reward = reward_of(final_text, float(task.inputs["answer"]))
    await rollout.reward(reward)
    return reward


async def player(gateway: GatewayClient, client: AsyncOpenAI) -> None:
    """Play one rollout after the other. A rollout that the gateway refuses has failed; the next one may not."""
    while True:
        rollout = await gateway.claim()
        if rollout is None:
            continue
        try:
            async with rollout:
                await play(rollout, client)
        except (GatewayError, OpenAIError) as error:
            print(f"{rollout.task.rollout_id}: {error}", file=sys.stderr)


async def main() -> None:
    """So many rollouts at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, default=Path(".rollstream"))
    parser.add_argument("--players", type=int, default=8)
    parser.add_argument("--patience", type=float, default=600.0)
    given = parser.parse_args()
    retries = Retries(for_s=given.patience)
    async with (
        AsyncOpenAI(api_key="of each rollout", max_retries=10) as client,
        GatewayClient.of_workspace(given.workspace, retries=retries) as gateway,
        asyncio.TaskGroup() as players,
    ):
        for _ in range(given.players):
            players.create_task(player(gateway, client))


if __name__ == "__main__":
    asyncio.run(main())
