"""`peagle train`; also `python -m jobs.train` for `ray job submit`."""

import argparse
import importlib.util
import sys
from typing import Any

from jobs import flags
from jobs.output import Throttle, console, say
from peagle.drafter.config import TrainConfig
from peagle.errors import ConfigError

HELP = """\
Train a draft head for a target on the target's own responses, and save it in vLLM's format.

  peagle train --prompts prompts.jsonl --output heads/first
  peagle train --prompts stdlib --limit 4000 --output heads/code
  peagle train --prompts runs/responses --responses given --output heads/second
  RAY_AUTH_MODE=token ray job submit --working-dir . -- python -m jobs.train --config train.yaml

First the target answers the prompts, in two bulk runs in OUTPUT/responses: one greedy, one sampled. The target's hidden
states are computed once and stored in OUTPUT/features; the head is written to OUTPUT/head. You can stop at any time:
the same command resumes the bulk runs, and continues training from the last checkpoint.
"""
_GROUPS = {
    "data": [
        "model", "prompts", "output", "features", "on_the_fly", "verifier", "prompt_column", "max_document_tokens",
        "exclude", "held_out",
    ],
    "responses": [
        "responses", "limit", "sampled_share", "temperature", "top_p", "max_response_tokens", "engines", "max_num_seqs",
        "enforce_eager",
    ],
    "money": ["instance_type", "market", "provider", "region", "usd_per_hour", "prices", "tags"],
    "head": [
        "algorithm", "num_layers", "num_key_value_heads", "num_depths", "aux_layers", "draft_vocab_size",
        "mask_token_id", "init", "num_frozen_layers", "train_lm_head", "train_embeddings",
    ],
    "recipe": [
        "epochs", "batch_tokens", "micro_batch_tokens", "cod_ratio", "anchor_share", "depth_decay", "depth_weight",
        "optimizer", "learning_rate", "muon_learning_rate", "final_learning_rate", "warmup_steps",
        "weight_decay", "clip_norm", "precision", "seed",
    ],
    "run": ["device", "workers", "worker_failures", "time_budget_s", "num_speculative_tokens"],
}  # fmt: skip
COMMON = (
    "model", "prompts", "limit", "output", "algorithm", "num_layers", "init", "epochs", "time_budget_s", "workers",
    "device", "config",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_flags(parser, TrainConfig, _GROUPS)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Check the configuration, generate the target's responses, train, and print the result."""
    config = flags.load(TrainConfig, args)
    if (config.responses == "regenerate" or config.workers > 1) and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "Ray is not installed, but is required to regenerate responses and for several workers",
            hint="copy finished responses to this machine, and use --responses given and --workers 1",
        )
    if config.responses == "regenerate":
        from peagle.drafter.pipeline import check_training
        from peagle.runs.progress import RunProgress

        check_training(config, say)  # the trainer repeats this check, but only after hours of generating responses
        from pipelines.training.responses import generate_responses

        generate_responses(config, RunProgress(console(soft_wrap=True)), command=args.command_line)
    from peagle.drafter.pipeline import Listener
    from peagle.speculation import SpeculationStats

    train: Any
    if config.workers > 1:
        from pipelines.training.distributed import train_on_workers as train
    else:
        from peagle.drafter.pipeline import train_head as train
    result = train(config, Listener(say=say, on_shard=Throttle(_print_shard), on_step=Throttle(_print_step)))
    stats = SpeculationStats.from_dict(result["held_out_acceptance"])
    if stats.acceptance_length is not None:
        say(f"acceptance length {stats.acceptance_length:.2f} on held-out documents, K={config.num_speculative_tokens}")
    say(f"head: {result['head']}")
    if not result["finished"]:
        say("the time budget ran out: run the same command to continue")
    return (0 if result["finished"] else 3), result


def _print_shard(done: int, total: int) -> None:
    say(f"features: {done} of {total} shards")


def _print_step(progress: Any) -> None:
    accuracy = " ".join("-" if rate is None else f"{rate:.2f}" for rate in progress.accuracy)
    length = 1 + sum(rate or 0 for rate in progress.accepted)
    left_s = (progress.num_steps - progress.step) * progress.train_s / progress.step
    say(
        f"step {progress.step}/{progress.num_steps}  loss {progress.loss:.3f}  accuracy by depth {accuracy}"
        f"  acceptance length {length:.2f}  {progress.tokens_per_s:,.0f} tokens/s  {left_s / 60:.0f} min left"
    )


if __name__ == "__main__":
    from jobs.cli import main

    main(["train", *sys.argv[1:]])
