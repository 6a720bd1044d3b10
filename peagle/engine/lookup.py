"""Prompt lookup decoding (Saxena, 2023: https://github.com/apoorvumang/prompt-lookup-decoding) after a head's draft.

The head drafts until the latest tokens, drafts included, match an earlier passage of the request. The remaining drafts
are copied from there.
"""

from collections.abc import Mapping, Sequence

# The shortest n-gram whose continuation is right more often than the head's drafts. EAGLE-3 reads its own drafts one
# after another and copies better, so only longer n-grams replace its drafts (entry 43 of benchmarks/drafter/LOG.md).
# DFlash and DSpark were not measured. Like P-EAGLE, they do not read their own drafts.
MIN_NGRAM: Mapping[str, int] = {"peagle": 2, "eagle3": 5, "dflash": 2, "dspark": 2}
_LONGEST = 8  # maximum length of a match; longer matches are not better
_CANDIDATES = 16  # earlier occurrences to compare, latest first: limits a step's time in very repetitive text


class PromptLookup:
    """An index of the n-grams in one request's tokens.

    Each n-gram leads to its latest occurrence, and each occurrence to the previous one (like the hash chains of LZ77).
    A new token costs one entry, for any length of context.

    Args:
        min_ngram: tokens that must match before a copy, 1 or more.

    >>> lookup = PromptLookup(min_ngram=2)
    >>> lookup.extend([1, 2, 3, 4, 5, 9, 1])
    >>> lookup.redraft([2, 8, 8, 8])  # 1 2 was followed by 3 4 5
    ([2, 3, 4, 5], 1)
    """

    def __init__(self, min_ngram: int) -> None:
        if min_ngram < 1:
            raise ValueError(f"min_ngram must be at least 1, got {min_ngram}")
        self._min_ngram = min_ngram
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> the position after it
        self._earlier: list[int] = []  # position -> the position after the previous occurrence, or -1

    def __len__(self) -> int:
        """The number of indexed tokens."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Index more tokens: first the prompt, then the output."""
        first, n = len(self._tokens) + 1, self._min_ngram
        self._tokens.extend(tokens)
        text, latest, earlier = self._tokens, self._latest, self._earlier
        for end in range(first, len(text) + 1):
            if end < n:
                earlier.append(-1)
                continue
            key = tuple(text[end - n : end])
            earlier.append(latest.get(key, -1))
            latest[key] = end

    def redraft(self, drafts: Sequence[int]) -> tuple[list[int], int]:
        """Return the drafts with their end replaced by a copy, and the number of the head's drafts that remain.

        Without a match the drafts are unchanged. The first draft is always the head's.
        """
        tokens, num_tokens = self._tokens, len(self._tokens)
        tokens.extend(drafts[:1])
        try:
            for num_from_head in range(1, len(drafts)):
                if (source := self._match()) is not None:
                    for position in range(source, source + len(drafts) - num_from_head):
                        tokens.append(tokens[position])  # the copy may overlap its source
                    return tokens[num_tokens:], num_from_head
                tokens.append(drafts[num_from_head])
            return list(drafts), len(drafts)
        finally:
            del tokens[num_tokens:]

    def _match(self) -> int | None:
        """Return the position after the longest (if equal, latest) earlier match of the last tokens, or None."""
        tokens = self._tokens
        end = len(tokens)
        candidate = self._latest.get(tuple(tokens[end - self._min_ngram :]), -1) if end >= self._min_ngram else -1
        best, longest = None, 0
        for _ in range(_CANDIDATES):
            if candidate < 0 or longest == _LONGEST:
                break
            length = self._min_ngram
            while length < min(_LONGEST, candidate) and tokens[candidate - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > longest:
                best, longest = candidate, length
            candidate = self._earlier[candidate - 1]
        return best
