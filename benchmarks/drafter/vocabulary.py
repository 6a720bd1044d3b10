"""Gives a head another draft vocabulary, the most frequent tokens of documents, without training it.

    python -m benchmarks.drafter.vocabulary peagle/catalog/heads/smollm2-135m-peagle --target smollm2-135m \\
        --prompts benchmarks/drafter/responses/greedy.parquet --prompts benchmarks/drafter/responses/greedy-2.parquet \\
        --output heads/other-words

The head is one of `peagle train --no-train-lm-head`: its rows of lm_head are the target's, so those of other tokens can
take their place. One that goes on from another head keeps the other's vocabulary, whatever documents it learns from.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from peagle.catalog.folders import read_config
from peagle.catalog.shipped_heads import rows_of, whole_head
from peagle.drafter.config import TrainConfig
from peagle.drafter.prompt_sources import read_corpus
from peagle.drafter.target import load_target
from peagle.drafter.vocabulary import DraftVocabulary, frequent_vocabulary, vocabulary_of_head
from peagle.errors import DrafterError

_WEIGHTS = "model.safetensors"


def main() -> None:
    """Write the head, and say how much of the documents its old and its new vocabulary have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of a trained head")
    parser.add_argument("--target", required=True, help="the target that it is for")
    parser.add_argument("--prompts", action="append", required=True, help="responses to count, as for `peagle train`")
    parser.add_argument("--size", type=int, default=8192, help="tokens to choose")
    parser.add_argument("--output", type=Path, required=True, help="folder that is not there yet")
    options = parser.parse_args()
    config = TrainConfig(
        model=options.target, prompts=options.prompts, responses="given", output=options.output, held_out=0
    )
    target = load_target(config.model, None, print)
    tokens = [token for sample in read_corpus(config, target, print).samples for token in sample.token_ids]
    end = read_config(target.folder, DrafterError)["eos_token_id"]
    chosen = frequent_vocabulary(tokens, size=options.size, target_size=target.vocab_size, required=[end])
    before = vocabulary_of_head(options.head, tokens, target_size=target.vocab_size)
    with_vocabulary(options.head, target.folder, chosen, options.output)
    print(f"{options.output}: {chosen.coverage:.2%} of these tokens, {before.coverage:.2%} before")  # noqa: T201


def with_vocabulary(head: Path, target: Path, vocabulary: DraftVocabulary, output: Path) -> None:
    """Write `head` to `output`, with another draft vocabulary and the rows of lm_head that it needs.

    Raises:
        DrafterError: its lm_head was trained, it has no draft vocabulary, or the output is there.
    """
    if output.exists():
        raise DrafterError(f"{output} is there already", hint="name another folder")
    whole = whole_head(head)
    tensors = load_file(whole / _WEIGHTS)
    if "d2t" not in tensors:
        raise DrafterError(f"{head}: has no draft vocabulary: it drafts every token")
    if not torch.equal(tensors["lm_head.weight"], rows_of(target, tensors["d2t"])):
        raise DrafterError(f"{head}: its lm_head was trained, so there are no rows for other tokens")
    tensors["d2t"] = vocabulary.d2t()
    tensors["lm_head.weight"] = rows_of(target, tensors["d2t"])
    output.mkdir(parents=True)
    save_file(tensors, output / _WEIGHTS, metadata={"format": "pt"})
    config = {**read_config(whole, DrafterError), "draft_vocab_size": vocabulary.size}
    (output / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    shutil.copyfile(whole / "README.md", output / "README.md")


if __name__ == "__main__":
    main()
