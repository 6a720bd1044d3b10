import random
import statistics
import time

import pytest

from peagle.engine.lookup import PromptLookup

MAX_MATCH = 8  # longer matches are not compared


def lookup_of(tokens, min_ngram):
    lookup = PromptLookup(min_ngram)
    lookup.extend(tokens)
    return lookup


def reference_redraft(tokens, drafts, min_ngram):
    """Redraft by the definition: compare every earlier position with the last tokens."""
    text = [*tokens, *drafts[:1]]
    for num_from_head in range(1, len(drafts)):
        end = len(text)
        lengths = {
            position: next(
                n
                for n in range(MAX_MATCH, -1, -1)
                if n <= position and text[position - n : position] == text[end - n :]
            )
            for position in range(1, len(tokens) + 1)
        }  # for each position, how many tokens before it equal the last tokens
        longest = [position for position, length in lengths.items() if length == max(lengths.values())]
        if longest and lengths[longest[-1]] >= min_ngram:
            for position in range(longest[-1], longest[-1] + len(drafts) - num_from_head):
                text.append(text[position])
            return text[len(tokens) :], num_from_head
        text.append(drafts[num_from_head])
    return list(drafts), len(drafts)


@pytest.mark.parametrize("min_ngram", [1, 2, 3])
def test_copies_from_the_latest_longest_match(min_ngram):
    rng = random.Random(0)
    num_with_copies = 0
    for _ in range(300):
        # Short sequences over a small vocabulary, so that the lookup compares all candidates.
        tokens = [rng.randrange(4) for _ in range(rng.randrange(14))]
        drafts = [rng.randrange(4) for _ in range(rng.randrange(7))]
        redrafted, num_from_head = lookup_of(tokens, min_ngram).redraft(drafts)
        assert (redrafted, num_from_head) == reference_redraft(tokens, drafts, min_ngram)
        num_with_copies += num_from_head < len(drafts)
    assert num_with_copies > 20


def test_first_draft_comes_from_the_head():
    assert lookup_of([1, 2, 3, 4, 1, 2], 2).redraft([9, 8, 7]) == ([9, 8, 7], 3)
    assert lookup_of([1, 2, 3, 4, 1, 2], 2).redraft([3, 8, 7]) == ([3, 4, 1], 1)


def test_drafts_can_complete_a_match():
    assert lookup_of([1, 2, 3, 4, 5, 9], 2).redraft([1, 2, 8, 8]) == ([1, 2, 3, 4], 2)


def test_copy_can_continue_into_copied_tokens():
    assert lookup_of([5, 6, 5, 6], 2).redraft([5, 0, 0, 0, 0]) == ([5, 6, 5, 6, 5], 1)


def test_longer_match_wins():
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2]
    assert lookup_of(tokens, 2).redraft([3, 0]) == ([3, 7], 1)


@pytest.mark.parametrize("drafts", [[], [4]])
def test_fewer_than_two_drafts_are_unchanged(drafts):
    assert lookup_of([4, 4, 4], 2).redraft(drafts) == (drafts, len(drafts))


def test_index_is_independent_of_chunks_and_drafts():
    rng = random.Random(1)
    tokens = [rng.randrange(5) for _ in range(60)]
    at_once, in_chunks = lookup_of(tokens, 3), PromptLookup(3)
    for start in range(0, 60, 7):
        in_chunks.redraft([1, 2, 3, 4])
        in_chunks.extend(tokens[start : start + 7])
    assert len(in_chunks) == 60
    for first in range(5):
        assert in_chunks.redraft([first, 9, 9, 9]) == at_once.redraft([first, 9, 9, 9])


def test_min_ngram_must_be_positive():
    with pytest.raises(ValueError, match="must be at least 1"):
        PromptLookup(0)


def test_lookup_is_fast_for_any_context():
    """The limit is 1 ms per step; text of one repeated word has the most candidates and the longest comparisons."""
    rng = random.Random(2)
    median_s = {}
    for name, tokens in (("code", [rng.randrange(300) for _ in range(16_384)]), ("one word", [7] * 16_384)):
        lookup = lookup_of(tokens, 2)
        durations_s = []
        for step in range(200):
            started_at = time.perf_counter()
            lookup.extend(tokens[step : step + 3])
            lookup.redraft(tokens[step + 3 : step + 10])
            durations_s.append(time.perf_counter() - started_at)
        median_s[name] = statistics.median(durations_s)
    assert max(median_s.values()) < 0.001, median_s
