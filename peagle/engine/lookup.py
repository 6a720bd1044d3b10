"""Prompt lookup beside a draft head: copy where a request's text continues itself.

A head drafts the first token, and those after it as long as nothing is found. As soon as the last tokens, drafts
included, have occurred earlier in the request, the remaining drafts are the tokens that followed there. This is prompt
lookup decoding (Saxena, 2023: https://github.com/apoorvumang/prompt-lookup-decoding), begun behind a head's draft.
"""

from collections.abc import Mapping, Sequence

# The shortest n-gram whose continuation is right more often than the head's own drafts, by method. EAGLE-3 reads its
# drafts one after another and copies better by itself, so it gives way to longer ones only (entry 43 of
# benchmarks/drafter/LOG.md).
MIN_NGRAM: Mapping[str, int] = {"peagle": 2, "eagle3": 5}
_LONGEST = 8
"""Tokens beyond which a longer match says no more."""
_CANDIDATES = 16
"""Earlier occurrences that are compared, the latest first: a bound on a step's time in text of one word."""


class PromptLookup:
    """The n-grams of one request's tokens, indexed as they come.

    Each n-gram leads to its latest occurrence, each occurrence to the one before (the hash chains of LZ77 coders). A
    new token costs one entry, whatever the length of the context.

    Args:
        min_ngram: tokens that must occur again for a copy, 1 or more.

    >>> lookup = PromptLookup(min_ngram=2)
    >>> lookup.extend([1, 2, 3, 4, 5, 9, 1])
    >>> lookup.redraft([2, 8, 8, 8])  # 1 2 has been followed by 3 4 5
    ([2, 3, 4, 5], 1)
    """

    def __init__(self, min_ngram: int) -> None:
        if min_ngram < 1:
            raise ValueError(f"an n-gram has at least one token, not {min_ngram}")
        self._n = min_ngram
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind it
        self._earlier: list[int] = []  # by that place: the one behind the occurrence before, -1 for none

    def __len__(self) -> int:
        """Tokens that are known."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the tokens that follow the known ones: prompt, then output."""
        first, n = len(self._tokens) + 1, self._n
        self._tokens.extend(tokens)
        known, latest, earlier = self._tokens, self._latest, self._earlier
        for behind in range(first, len(known) + 1):
            if behind < n:
                earlier.append(-1)
                continue
            key = tuple(known[behind - n : behind])
            earlier.append(latest.get(key, -1))
            latest[key] = behind

    def redraft(self, drafts: Sequence[int]) -> tuple[list[int], int]:
        """The drafts with a copy in place of their end, and how many are still the head's.

        Without a match they stay as they are. The first draft is always the head's.
        """
        tokens, num_known = self._tokens, len(self._tokens)
        tokens.extend(drafts[:1])
        try:
            for num_head in range(1, len(drafts)):
                if (source := self._match()) is not None:
                    for behind in range(source, source + len(drafts) - num_head):
                        tokens.append(tokens[behind])  # it may read what it has just written
                    return tokens[num_known:], num_head
                tokens.append(drafts[num_head])
            return list(drafts), len(drafts)
        finally:
            del tokens[num_known:]

    def _match(self) -> int | None:
        """The place behind an earlier occurrence of the last tokens; None without one.

        It is the one that agrees with the most of them, and the latest of those.
        """
        tokens = self._tokens
        end = len(tokens)
        behind = self._latest.get(tuple(tokens[end - self._n :]), -1) if end >= self._n else -1
        best, longest = None, 0
        for _ in range(_CANDIDATES):
            if behind < 0 or longest == _LONGEST:
                break
            length = self._n
            while length < min(_LONGEST, behind) and tokens[behind - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > longest:
                best, longest = behind, length
            behind = self._earlier[behind - 1]
        return best
