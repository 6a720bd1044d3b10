"""Give a head another draft vocabulary without training: the most frequent tokens of some documents.

    python -m benchmarks.drafter.vocabulary peagle/catalog/heads/smollm2-135m-peagle --target smollm2-135m \\
        --prompts benchmarks/drafter/responses/greedy.parquet --prompts benchmarks/drafter/responses/greedy-2.parquet \\
        --output heads/other-words

The head must come from `peagle train --no-train-lm-head`: its rows of lm_head are copies of the target's, so they can
be replaced by those of other tokens. This is needed because `peagle train --init HEAD` keeps the vocabulary of HEAD,
even for other documents.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from peagle.catalog.folders import read_config
from peagle.catalog.shipped_heads import complete_head, rows_of
from peagle.drafter.config import TrainConfig
from peagle.drafter.prompt_sources import read_corpus
from peagle.drafter.target import load_target
from peagle.drafter.vocabulary import DraftVocabulary, frequent_vocabulary, vocabulary_of_head
from peagle.errors import DrafterError

_WEIGHTS = "model.safetensors"


def main() -> None:
    """Write the head, and print the shares of the documents' tokens that the old and the new vocabulary cover."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of a trained head")
    parser.add_argument("--target", required=True, help="the target of the head")
    parser.add_argument("--prompts", action="append", required=True, help="responses to count, as for `peagle train`")
    parser.add_argument("--size", type=int, default=8192, help="tokens to choose")
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    options = parser.parse_args()
    config = TrainConfig(
        model=options.target, prompts=options.prompts, responses="given", output=options.output, held_out=0
    )
    target = load_target(config.model, None, print)
    tokens = [token for sample in read_corpus(config, target, print).samples for token in sample.token_ids]
    end = read_config(target.folder, DrafterError)["eos_token_id"]
    new_vocabulary = frequent_vocabulary(tokens, size=options.size, target_size=target.vocab_size, required=[end])
    old_vocabulary = vocabulary_of_head(options.head, tokens, target_size=target.vocab_size)
    with_vocabulary(options.head, target.folder, new_vocabulary, options.output)
    print(f"{options.output}: {new_vocabulary.coverage:.2%} of these tokens, {old_vocabulary.coverage:.2%} before")  # noqa: T201


def with_vocabulary(head: Path, target: Path, vocabulary: DraftVocabulary, output: Path) -> None:
    """Write `head` to `output`, with another draft vocabulary and the rows of lm_head that it needs.

    Raises:
        DrafterError: the head's lm_head was trained, it has no draft vocabulary, or `output` exists.
    """
    if output.exists():
        raise DrafterError(f"{output} already exists", hint="name another folder")
    whole = complete_head(head)
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
