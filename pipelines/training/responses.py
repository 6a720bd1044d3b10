"""Generate the target's responses to training prompts, in bulk runs without a drafter.

    OUTPUT/responses/greedy.jsonl    OUTPUT/responses/greedy/     prompts, and their bulk run
    OUTPUT/responses/sampled.jsonl   OUTPUT/responses/sampled/

No seed is set, because vLLM on CPU crashes with seeds; the stored responses do not have to be reproducible.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from peagle.catalog.targets import context_tokens
from peagle.corpus.rows import Row
from peagle.drafter.config import DECODING_MODES, TrainConfig
from peagle.drafter.prompt_sources import MESSAGES, PROMPT, read_prompts
from peagle.drafter.prompts import split_by_hash
from peagle.drafter.target import Target, load_target
from peagle.economics.price_options import PRICE_OPTIONS
from peagle.errors import InputError
from peagle.files import converted_write_errors, write_atomic
from peagle.plain_json import to_json
from peagle.runs.directory import RunDirectory
from peagle.runs.progress import RunProgress
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import RunRequest
from pipelines.batch.run import generate

_COPIED_OPTIONS = ("engines", "max_num_seqs", "tags", *PRICE_OPTIONS)


def generate_responses(
    config: TrainConfig, progress: RunProgress, *, command: Sequence[str], engine: Literal["vllm", "fake"] = "vllm"
) -> None:
    """Generate the missing responses with a bulk run for each decoding mode, in `config.responses_folder`."""
    target = load_target(config.model, config.aux_layers, progress.say)
    rows = read_prompts(config, progress.say)
    dead_letters = []
    for mode, prompts in zip(
        DECODING_MODES, split_by_hash(rows, config.sampled_share, text=lambda row: row["id"]), strict=True
    ):
        if prompts:
            progress.say(f"responses: {len(prompts):,} {mode}")
            corpus = _write_corpus(prompts, config.responses_folder(mode))
            run_config = _run_config(config, mode, corpus, target, MESSAGES in prompts[0], engine)
            generate(RunRequest(config=run_config, command=command), progress)
            dead_letters += list(RunDirectory(config.responses_folder(mode)).dead_letters())
    if dead_letters:
        first_error = dead_letters[0]["message"]
        progress.say(f"{len(dead_letters)} of {len(rows):,} prompts have no response; first error: {first_error}")
    if len(dead_letters) == len(rows):
        raise InputError(
            f"{config.output / 'responses'}: none of {len(rows):,} prompts has a response; first error:"
            f" {dead_letters[0]['message']}",
            hint="the failed/ folders of the runs contain the reason for each row",
        )


def _run_config(
    config: TrainConfig, mode: str, corpus: Path, target: Target, has_messages: bool, engine: Literal["vllm", "fake"]
) -> GenerateConfig:
    values: dict[str, Any] = {
        "model": config.model,
        "drafter": "none",
        "input": str(corpus),
        "output": config.responses_folder(mode),
        "max_tokens": config.max_response_tokens,
        "max_model_len": min(config.max_document_tokens, context_tokens(target.model)),
        "engine": engine,
        **{name: getattr(config, name) for name in _COPIED_OPTIONS},
    }
    if "enforce_eager" in config.model_fields_set:  # else, the run compiles if that saves time
        values["enforce_eager"] = config.enforce_eager
    values |= {"messages_column": MESSAGES} if has_messages else {"prompt_column": PROMPT}
    if mode == "sampled":
        values |= {"temperature": config.temperature, "top_p": config.top_p}
    return GenerateConfig(**values)


def _write_corpus(rows: Sequence[Row], run: Path) -> Path:
    corpus = run.with_suffix(".jsonl")
    with converted_write_errors(corpus, hint="free some space, or use another --output"):
        corpus.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(corpus, "".join(to_json(row) + "\n" for row in rows).encode())
    return corpus
