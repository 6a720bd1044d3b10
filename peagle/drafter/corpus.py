"""The documents of a training: read, decontaminated, tokenised, and cut into those to train on and those held out."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from peagle.corpus.rows import Row
from peagle.drafter.config import TrainConfig
from peagle.drafter.data import Rejected, Sample, build_samples, read_responses, row_text
from peagle.drafter.decontamination import Dropped, decontaminate, tell_dropped
from peagle.drafter.evaluation_sets import index_of
from peagle.drafter.prompt_sources import PROMPT
from peagle.drafter.target import Target
from peagle.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The documents of a training, and what was left out.

    Attributes:
        held_out: indices of the documents that are not trained on.
    """

    samples: list[Sample]
    rejected: list[Rejected]
    dropped: list[Dropped[Row]]
    held_out: frozenset[int]

    @property
    def trained(self) -> list[int]:
        """Indices of the documents that are trained on."""
        return [index for index in range(len(self.samples)) if index not in self.held_out]


def read_corpus(config: TrainConfig, target: Target, say: Callable[[str], None]) -> Corpus:
    """Read, check and tokenise the responses; a share of them, chosen by a hash of their ids, is held out.

    Raises:
        InputError: a source is unreadable, or no row gives a document.
        ConfigError: the tokenizer gives tokens that the target does not have.
    """
    column = config.prompt_column if config.responses == "given" else PROMPT
    rows = [row for source in config.response_sources for row in read_responses(source)]
    checked = decontaminate(rows, index_of(config.exclude), text=lambda row: row_text(row, column))
    samples, rejected = build_samples(
        checked.kept, target.tokenizer, prompt_column=column, max_tokens=config.max_document_tokens
    )
    if not samples:
        reason = rejected[0].reason if rejected else f"every row overlaps {', '.join(config.exclude)}"
        sources = ", ".join(map(str, config.response_sources))
        raise InputError(f"{sources}: no row gives a document; the first: {reason}")
    target.require_tokens(samples)
    say(f"{len(samples):,} documents, {len(rejected)} rejected, {len(checked.dropped)} dropped for overlap")
    tell_dropped(checked.dropped, say)
    num_held_out = round(len(samples) * config.held_out)
    by_hash = sorted(range(len(samples)), key=lambda i: hashlib.sha256(samples[i].id.encode()).digest())
    return Corpus(
        samples=samples,
        rejected=rejected,
        dropped=checked.dropped,
        held_out=frozenset(by_hash[:num_held_out]),
    )
