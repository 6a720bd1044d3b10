"""The draft vocabulary: the most frequent tokens, and their mapping to the target's vocabulary.

Tokens outside the draft vocabulary are never drafted, so its coverage limits the acceptance.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.errors import ConfigError, DrafterError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """The token ids that the head can draft."""

    token_ids: tuple[int, ...]  # token ids of the target, ascending; the draft id of a token is its index
    target_size: int
    coverage: float = 1.0  # share of the counted tokens that can be drafted; 1.0 if no tokens were counted

    def __post_init__(self) -> None:
        if not self.token_ids or list(self.token_ids) != sorted(set(self.token_ids)):
            raise ValueError("token ids must be distinct and ascending")
        if self.token_ids[-1] >= self.target_size:
            raise ValueError(f"token id {self.token_ids[-1]} is outside the target's {self.target_size}")

    @property
    def size(self) -> int:
        return len(self.token_ids)

    def d2t(self) -> "torch.Tensor":
        """Return int64 offsets, [size], in the format of EAGLE-3 checkpoints: target id = draft id + d2t[draft id].

        Example: the offsets of the tokens 1, 4, 5 are 1, 3, 3.
        """
        import torch

        return torch.tensor(self.token_ids) - torch.arange(self.size)

    def t2d(self) -> "torch.Tensor":
        """Return [target_size] bool: whether a token of the target can be drafted."""
        import torch

        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[list(self.token_ids)] = True
        return mask


def frequent_vocabulary(
    token_ids: Iterable[int], *, size: int, target_size: int, required: Iterable[int] = ()
) -> DraftVocabulary:
    """Return the `size` most frequent tokens, including the `required` ones. Among equals, smaller ids win."""
    if not 1 <= size <= target_size:
        raise ConfigError(f"draft vocabulary of {size}: must be from 1 to the target's {target_size}")
    counts = Counter(token_ids)
    required_ids = frozenset(required)
    ranked = sorted(range(target_size), key=lambda token: (token not in required_ids, -counts[token], token))
    return _with_coverage(sorted(ranked[:size]), counts, target_size)


def vocabulary_of_head(folder: Path, token_ids: Iterable[int], *, target_size: int) -> DraftVocabulary:
    """Return a saved head's draft vocabulary (by default the target's), with its coverage of `token_ids`."""
    from safetensors import safe_open

    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise DrafterError(f"{folder}: has no model.safetensors, so there is no head to continue")
    with safe_open(weights, "pt") as file:
        offsets = file.get_tensor("d2t").tolist() if "d2t" in file.keys() else [0] * target_size  # noqa: SIM118
    target_ids = [draft_id + offset for draft_id, offset in enumerate(offsets)]
    return _with_coverage(target_ids, Counter(token_ids), target_size)


def _with_coverage(token_ids: list[int], counts: Counter[int], target_size: int) -> DraftVocabulary:
    total = counts.total()
    coverage = sum(counts[token] for token in token_ids) / total if total else 1.0
    return DraftVocabulary(token_ids=tuple(token_ids), target_size=target_size, coverage=coverage)
