"""Binary arrays as text: int32 token ids and float32 log-probabilities, little-endian, in base64."""

import base64
import binascii
import sys
from array import array
from collections.abc import Iterable

from rollstream.schemas.errors import DecodeError


def encode_ids(ids: Iterable[int]) -> str:
    """Token ids as base64 of little-endian int32."""
    return _encode(array("i", ids))


def decode_ids(text: str) -> "array[int]":
    """Token ids of a base64 text. Raises DecodeError if it is not whole int32 values."""
    values = array("i")
    _fill(values, text)
    return values


def encode_floats(values: Iterable[float]) -> str:
    """Numbers as base64 of little-endian float32."""
    return _encode(array("f", values))


def decode_floats(text: str) -> "array[float]":
    """Numbers of a base64 text. Raises DecodeError if it is not whole float32 values."""
    values = array("f")
    _fill(values, text)
    return values


def count(text: str) -> int:
    """How many four-byte values a base64 text holds, without decoding it."""
    return (len(text) * 3 // 4 - text.count("=", len(text) - 2)) // 4 if text else 0


def _encode(values: "array[int] | array[float]") -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def _fill(values: "array[int] | array[float]", text: str) -> None:
    try:
        values.frombytes(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise DecodeError(f"token array is not base64 of four-byte values: {error}") from error
    if sys.byteorder == "big":
        values.byteswap()
