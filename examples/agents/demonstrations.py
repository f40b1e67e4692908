"""Demonstrators for the warm start of the example agents: they answer in the model's place, with tool calls.

Some of their answers are mistakes, so that the reward of the rollouts that follow has room to rise.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from rollstream.producers import Message, Session

SUM = re.compile(r"(\d+)([+*/-])(\d+)=")
SHOP = re.compile(r"What is the (price|stock) of (?:(\d+) )?(\w+)\?")
CALCULATES, RIGHT_OPERATOR = 0.6, 0.7
"""Shares of demonstrated sums for which the calculator is called, and of calls with the sum's operator."""
ASKS, RIGHT_COLUMN, RIGHT_ITEM, MULTIPLIES = 0.75, 0.75, 0.9, 0.9
"""Shares of demonstrated questions for which the database is asked, of queries with the right column and item, and of
prices of several that are multiplied.
"""
NAMES = ("apple", "bread", "cheese", "milk", "plum")


def calculator(session: Session, messages: Sequence[Message], agent: str) -> str:
    """For `calculator.mjs`: call the calculator, and give its result."""
    rng = session.rng
    question, results = question_and_results(messages)
    a, operator, b = groups_of(SUM, question)
    if not results and rng.random() < CALCULATES:
        operator = operator if rng.random() < RIGHT_OPERATOR else rng.choice("+-*")
        return call("calculate", a=int(a), operator=operator, b=int(b))
    return results[-1] if results else str(rng.randint(0, 9))


def shop(session: Session, messages: Sequence[Message], agent: str) -> str:
    """For `shop.py`: query the database, multiply the result if the question has a number, and give the last result."""
    rng = session.rng
    question, results = question_and_results(messages)
    column, number, name = groups_of(SHOP, question)
    if not results and rng.random() < ASKS:
        column = column if rng.random() < RIGHT_COLUMN else rng.choice(("price", "stock"))
        name = name if rng.random() < RIGHT_ITEM else rng.choice(NAMES)
        return call("query", sql=f"SELECT {column} FROM items WHERE name='{name}'")
    if len(results) == 1 and number and rng.random() < MULTIPLIES:
        return call("calculate", expression=f"{number}*{results[0]}")
    return results[-1] if results else str(rng.randint(1, 99))


def call(tool: str, **arguments: Any) -> str:
    """A tool call as models of the Qwen and Hermes families write it."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def question_and_results(messages: Sequence[Message]) -> tuple[str, list[str]]:
    """The question, and the results of tools as text without brackets."""
    (question,) = (str(message["content"]) for message in messages if message["role"] == "user")
    return question, [str(message["content"]).strip("[]") for message in messages if message["role"] == "tool"]


def groups_of(pattern: re.Pattern[str], question: str) -> tuple[str, ...]:
    """The pattern's groups in a question, empty where they are missing. Raises ValueError for another question."""
    found = pattern.fullmatch(question)
    if found is None:
        raise ValueError(f"there is no demonstration for {question!r}; use the example's dataset")
    return found.groups("")
