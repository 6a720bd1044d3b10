"""A trained head becomes a folder that vLLM takes as it is, with its model card, and the training a run.json."""

import platform
from dataclasses import asdict
from typing import Any

import torch

from peagle.catalog.targets import ResolvedModel
from peagle.drafter.config import TrainConfig
from peagle.drafter.corpus import Corpus
from peagle.drafter.head_folder import save_head
from peagle.drafter.model_card import CardFacts, render_card
from peagle.drafter.store import Features
from peagle.drafter.training import TrainingOutcome
from peagle.drafter.vocabulary import DraftVocabulary
from peagle.files import write_atomic, write_json
from peagle.speculation import SpeculationStats


def publish(
    *,
    config: TrainConfig,
    model: ResolvedModel,
    device: torch.device,
    head: Any,
    corpus: Corpus,
    store: Features,
    vocabulary: DraftVocabulary,
    outcome: TrainingOutcome,
    num_passes: float,
    estimate: SpeculationStats,
) -> dict[str, Any]:
    """Save head, model card and run.json in `config.output`; what run.json says.

    Args:
        device: that it was trained on, by a single process.
        num_passes: over the documents, as far as the training went.
    """
    verifier = config.verifier or model.upstream_id or model.name
    folder = config.output / "head"
    save_head(head, folder, verifier=verifier, num_speculative_tokens=config.num_speculative_tokens)
    facts = CardFacts(
        verifier=verifier,
        target_fingerprint=store.spec.target,
        licence=model.card.licence.name if model.card else None,
        config=config,
        aux_layers=store.spec.aux_layers,
        num_parameters=sum(p.numel() for p in head.parameters() if p.requires_grad),
        num_documents=len(corpus.trained),
        num_response_tokens=sum(corpus.samples[index].num_response_tokens for index in corpus.trained),
        num_tokens_seen=outcome.num_tokens,
        num_passes=num_passes,
        vocabulary_size=vocabulary.size,
        vocabulary_coverage=vocabulary.coverage,
        train_s=outcome.train_s,
        hardware=_hardware(config, device),
        held_out=estimate,
    )
    write_atomic(folder / "README.md", render_card(facts).encode())
    result = {
        "config": config.model_dump(mode="json"),
        "finished": outcome.finished,
        "steps": outcome.step,
        "documents": len(corpus.trained),
        "held_out_documents": len(corpus.held_out),
        "rejected": [asdict(rejected) for rejected in corpus.rejected],
        "dropped": [
            {"id": str(drop.item.get("id")), "overlap": drop.overlap, "evaluation_set": drop.evaluation_set}
            for drop in corpus.dropped
        ],
        "tokens_seen": outcome.num_tokens,
        "train_s": outcome.train_s,
        "vocabulary_coverage": vocabulary.coverage,
        "held_out_acceptance": estimate.to_dict(),
        "head": str(folder),
    }
    write_json(config.output / "run.json", result)
    return result


def _hardware(config: TrainConfig, device: torch.device) -> str:
    """What a training ran on; of workers, which may be on unlike machines, their number and kind."""
    if config.workers > 1:
        return f"{config.workers} workers with a {'GPU' if config.device == 'cuda' else 'CPU'} each"
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
