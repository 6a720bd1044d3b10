"""Features that are computed when they are asked for, for a disk that cannot hold them.

They read like a store, and their numbers are those of a store, rounded to bf16 like them; each pass over the documents
runs the target again. Of states it holds none; of a step's documents, only those asked for.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from peagle.drafter.data import Sample
from peagle.drafter.hidden_states import BATCH_TOKENS, HiddenStateReader, states_of
from peagle.drafter.store import Document, FeatureSpec


class ComputedFeatures:
    """The features of `samples`, computed on demand.

    Args:
        samples: documents.
        load_reader: loads the target, at the first demand.
        spec: of the target and the samples.
        device: for the target.
        batch_tokens: padded tokens the target sees at once.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        load_reader: Callable[[], HiddenStateReader],
        spec: FeatureSpec,
        *,
        device: torch.device | str = "cpu",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self.spec = spec
        self._samples, self._load_reader = samples, load_reader
        self._device, self._batch_tokens = torch.device(device), batch_tokens

    def __len__(self) -> int:
        return len(self._samples)

    def num_tokens(self, index: int) -> int:
        """Length of a document."""
        return len(self._samples[index].token_ids)

    def documents(self, indices: Sequence[int]) -> list[Document]:
        """The documents with these indices, computed together."""
        samples = [self._samples[index] for index in indices]
        with torch.autocast(self._device.type, enabled=False):  # it is for the head, and would change the target
            states = states_of(samples, self._reader, device=self._device, batch_tokens=self._batch_tokens)
        return [
            Document(
                token_ids_T=torch.tensor(sample.token_ids),
                loss_mask_T=torch.tensor(sample.loss_mask),
                aux_TAH=aux,
                last_TH=last,
            )
            for sample, (aux, last) in zip(samples, states, strict=True)
        ]

    @cached_property
    def _reader(self) -> HiddenStateReader:
        return self._load_reader()
