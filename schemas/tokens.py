"""Binary arrays as text: int32 token ids and float32 log-probabilities, little-endian, in base64."""

import base64
import binascii
import itertools
import operator
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollstream.schemas.errors import DecodeError

MAX_KEPT_BYTES = 64 * 2**20
"""Maximum size of the kept ids of one text, decoded."""
MAX_KEPT = MAX_KEPT_BYTES // 4
"""Limit of the numbers in it: the kept ids, one number for each token, and the number of tokens."""


class KeptIds(NamedTuple):
    """The token ids that top_p and top_k left to sample from, of T tokens; vLLM calls them the sampling mask."""

    lengths: Sequence[int]
    """(T,) how many each token had; 0: the whole vocabulary."""
    ids: Sequence[int]
    """(M,) of all tokens one after another, ascending for each."""

    def first(self, num_tokens: int) -> "KeptIds":
        """Those of the first tokens."""
        lengths = self.lengths[:num_tokens]
        return KeptIds(lengths, self.ids[: sum(lengths)])


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


def encode_kept(kept: KeptIds) -> str:
    """Kept ids as base64 of a zlib stream of little-endian int32: T, the T lengths, and the differences of the ids."""
    ids = array("i", kept.ids)
    values = array("i", [len(kept.lengths), *kept.lengths, *ids[:1]])
    values.extend(map(operator.sub, ids[1:], ids))
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(zlib.compress(values.tobytes(), 1)).decode("ascii")


def decode_kept(text: str, num_tokens: int) -> KeptIds:
    """Kept ids of `num_tokens` tokens. Raises DecodeError if the text holds none, too many, or those of others."""
    try:
        stream = zlib.decompressobj()
        packed = stream.decompress(base64.b64decode(text, validate=True), MAX_KEPT_BYTES + 1)
    except (ValueError, zlib.error) as error:
        raise DecodeError(f"the kept ids are not base64 of a zlib stream: {error}") from error
    if len(packed) > MAX_KEPT_BYTES or not stream.eof or len(packed) % 4:
        raise DecodeError(f"the kept ids are cut off, or more than {MAX_KEPT_BYTES} bytes")
    values = array("i", packed)
    if sys.byteorder == "big":
        values.byteswap()
    lengths = values[1 : num_tokens + 1]
    if not values or values[0] != num_tokens or len(lengths) != num_tokens:
        raise DecodeError(f"the kept ids are not those of {num_tokens} completion tokens")
    if min(lengths, default=0) < 0 or sum(lengths) != len(values) - num_tokens - 1:
        raise DecodeError("the lengths of the kept ids do not add up to their number")
    try:
        return KeptIds(lengths, array("i", itertools.accumulate(values[num_tokens + 1 :])))
    except OverflowError as error:
        raise DecodeError("a kept id does not fit into an int32") from error


def check_kept(sampled: Sequence[int], kept: KeptIds) -> None:
    """Raises DecodeError if a token is not among the ids that it was sampled from."""
    if len(sampled) != len(kept.lengths):
        raise DecodeError(f"kept ids of {len(kept.lengths)} tokens for {len(sampled)} completion tokens")
    end = 0
    for index, (token, length) in enumerate(zip(sampled, kept.lengths, strict=True)):
        begin, end = end, end + length
        at = bisect_left(kept.ids, token, begin, end)
        if length and (at == end or kept.ids[at] != token):
            raise DecodeError(f"its token {index} ({token}) is not among the {length} ids that it was sampled from")


def count(text: str) -> int:
    """Number of four-byte values in a base64 text, without decoding it."""
    return (len(text) * 3 // 4 - text.count("=", len(text) - 2)) // 4 if text else 0


def packed(values: "array[int] | array[float]") -> bytes:
    """Four-byte values as little-endian bytes; the array stays as it is."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _encode(values: "array[int] | array[float]") -> str:
    return binascii.b2a_base64(packed(values), newline=False).decode("ascii")


def _fill(values: "array[int] | array[float]", text: str) -> None:
    try:
        values.frombytes(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise DecodeError(f"token array is not base64 of four-byte values: {error}") from error
    if sys.byteorder == "big":
        values.byteswap()
