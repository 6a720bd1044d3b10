"""Generate the target's responses to the prompts of a training, in bulk runs without a drafter.

    OUTPUT/responses/greedy.jsonl    OUTPUT/responses/greedy/     prompts, and their bulk run
    OUTPUT/responses/sampled.jsonl   OUTPUT/responses/sampled/

They are ordinary runs: a killed one resumes, and another target or other prompts are refused. No seed is set, because
vLLM on CPU crashes with seeds; the responses are kept anyway.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from peagle.catalog.targets import context_tokens
from peagle.corpus.rows import Row
from peagle.drafter.config import WAYS, TrainConfig
from peagle.drafter.prompt_sources import MESSAGES, PROMPT, read_prompts
from peagle.drafter.prompts import part_by_hash
from peagle.drafter.target import Target, load_target
from peagle.economics.price_options import PRICE_OPTIONS
from peagle.errors import InputError
from peagle.files import write_atomic, writing
from peagle.plain_json import to_json
from peagle.runs.directory import RunDirectory
from peagle.runs.progress import RunProgress
from pipelines.batch.config import GenerateConfig
from pipelines.batch.request import RunRequest
from pipelines.batch.run import generate

_AS_THEY_ARE = ("engines", "max_num_seqs", "enforce_eager", "tags", *PRICE_OPTIONS)


def regenerate(
    config: TrainConfig, progress: RunProgress, *, command: Sequence[str], engine: Literal["vllm", "fake"] = "vllm"
) -> None:
    """Generate the missing responses; `config.response_sources` then has them."""
    target = load_target(config.target, config.aux_layers, progress.say)
    rows = read_prompts(config, progress.say)
    letters = []
    for way, asked in zip(WAYS, part_by_hash(rows, config.sampled_share, text=lambda row: row["id"]), strict=True):
        if asked:
            progress.say(f"responses: {len(asked):,} {way}")
            run_config = _run_config(
                config, way, _write(asked, config.answers(way)), target, MESSAGES in asked[0], engine
            )
            generate(RunRequest(config=run_config, command=command), progress)
            letters += list(RunDirectory(config.answers(way)).dead_letters())
    if letters:
        progress.say(f"{len(letters)} of {len(rows):,} prompts were not answered; the first: {letters[0]['message']}")
    if len(letters) == len(rows):
        raise InputError(
            f"{config.output / 'responses'}: not one of {len(rows):,} prompts was answered; the first:"
            f" {letters[0]['message']}",
            hint="the runs' failed/ folders name each row's reason",
        )


def _run_config(
    config: TrainConfig, way: str, corpus: Path, target: Target, chats: bool, engine: Literal["vllm", "fake"]
) -> GenerateConfig:
    values: dict[str, Any] = {
        "model": config.target,
        "drafter": "none",
        "input": str(corpus),
        "output": config.answers(way),
        "max_tokens": config.max_response_tokens,
        "max_model_len": min(config.max_document_tokens, context_tokens(target.model)),
        "engine": engine,
        **{name: getattr(config, name) for name in _AS_THEY_ARE},
    }
    values |= {"messages_column": MESSAGES} if chats else {"prompt_column": PROMPT}
    if way == "sampled":
        values |= {"temperature": config.temperature, "top_p": config.top_p}
    return GenerateConfig(**values)


def _write(rows: Sequence[Row], run: Path) -> Path:
    """Write the prompts as a corpus next to their run."""
    corpus = run.with_suffix(".jsonl")
    with writing(corpus, hint="free some space, or name another --output"):
        corpus.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(corpus, "".join(to_json(row) + "\n" for row in rows).encode())
    return corpus
