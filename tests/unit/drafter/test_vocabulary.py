import pytest
import torch

from peagle.drafter.vocabulary import DraftVocabulary, frequent_vocabulary
from peagle.errors import ConfigError


def test_vocabulary_has_the_most_frequent_tokens_and_their_coverage():
    vocabulary = frequent_vocabulary([7, 7, 7, 3, 3, 9], size=2, target_size=10)
    assert vocabulary.token_ids == (3, 7)
    assert vocabulary.coverage == pytest.approx(5 / 6)


def test_required_tokens_are_included():
    assert 5 in frequent_vocabulary([7, 7, 3, 3], size=2, target_size=10, required=[5]).token_ids


def test_vocabulary_maps_are_inverse():
    vocabulary = DraftVocabulary(token_ids=(1, 4, 5), target_size=8)
    assert vocabulary.d2t().tolist() == [1, 3, 3]
    target_ids = torch.arange(3) + vocabulary.d2t()
    assert target_ids.tolist() == [1, 4, 5]
    assert torch.nonzero(vocabulary.t2d()).flatten().tolist() == [1, 4, 5]


@pytest.mark.parametrize("size", [0, 11])
def test_invalid_vocabulary_sizes_are_refused(size):
    with pytest.raises(ConfigError, match=f"draft vocabulary of {size}"):
        frequent_vocabulary([1], size=size, target_size=10)
