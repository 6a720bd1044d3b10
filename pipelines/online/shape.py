"""How much a JSON body holds, looked at before it is parsed: a mebibyte of brackets is slower to read than one of text.

Reading and checking hold Python's lock for as long as they take, and every stream of the endpoint waits. So a body has
a number of values that takes some hundredths of a second. Pure: bytes in, an error out.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.online.errors import ApiError

# A string, or what is left of one that does not end: then the search does not begin anew at each quote inside.
_STRING = rb'"(?:[^"\\]++|\\.)*+"?+'
_STRINGS = re.compile(_STRING, re.DOTALL)
_PIECE = re.compile(rb'(?:[^"]*+' + _STRING + rb"){1,10000}+", re.DOTALL)  # some milliseconds' worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a body may hold at most.

    Attributes:
        num_containers: objects and lists.
        num_members: of all objects together.
        num_values: of all lists and objects together.
    """

    num_containers: int
    num_members: int
    num_values: int

    def check(self, body: bytes) -> None:
        """Refuse a body that holds more.

        Raises:
            ApiError: 400, with what there is too much of.
        """
        if not self._excess(_counts(body)):
            return
        counts = [0, 0, 0]
        for piece in _outside_strings(body):
            counts = [sum(both) for both in zip(counts, _counts(piece), strict=True)]
            if excess := self._excess(counts):
                raise ApiError(400, f"the body has more than {excess}", code="too_many_values")

    def _excess(self, counts: Sequence[int]) -> str | None:
        num_containers, num_members, num_values = counts
        if num_containers > self.num_containers:
            return f"{self.num_containers:,} lists and objects"
        if num_members > self.num_members:
            return f"{self.num_members:,} members of objects"
        if num_values > self.num_values:
            return f"{self.num_values:,} values"
        return None


def _counts(text: bytes) -> tuple[int, int, int]:
    """Containers, members and values but one of each container, where the text is no string."""
    return text.count(b"[") + text.count(b"{"), text.count(b":"), text.count(b",")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    at = 0
    while match := _PIECE.match(body, at):
        yield _STRINGS.sub(b"", match[0])
        at = match.end()
    yield body[at:]


# 1 MiB of token ids has some 175,000, a conversation with tools five objects and lists a step.
REQUEST = Shape(num_containers=10_000, num_members=30_000, num_values=250_000)
ORDER = Shape(num_containers=10, num_members=50, num_values=50)
"""Of a batch: six fields, one of them with 16 members."""
