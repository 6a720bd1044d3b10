"""`peagle demo`: bulk runs of the embedded model with and without speculation."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from jobs import flags
from jobs.output import console

HELP = """\
Answer HumanEval prompts one at a time with the embedded model and its P-EAGLE drafter, then the first of them again
without the drafter, and compare the costs. No accelerator, account or network is needed.
"""
MODEL = "smollm2-135m"
NUM_PROMPTS, NUM_BASELINE_PROMPTS, MAX_TOKENS, K = 10, 5, 128, 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder of the runs")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Run twice, and print both reports and their comparison."""
    from peagle.economics.report.data import compare
    from peagle.economics.report.html import render_html
    from peagle.economics.report.text import short_summary, text_comparison
    from peagle.files import write_atomic
    from peagle.humaneval import PROMPT_TEMPLATE
    from peagle.quiet import QuietStderr
    from peagle.runs.directory import RunDirectory
    from peagle.runs.export import describe_answers
    from peagle.runs.progress import RunProgress
    from pipelines.batch.config import GenerateConfig
    from pipelines.batch.request import RunRequest
    from pipelines.batch.run import generate
    from pipelines.cluster.ray import ray_cluster

    folder = args.output / time.strftime("%Y%m%dT%H%M%S")
    folder.mkdir(parents=True)
    corpus = write_humaneval(folder / "humaneval.jsonl", NUM_PROMPTS)
    common: dict[str, Any] = {
        "model": MODEL,
        "input": str(corpus),
        "prompt_template": PROMPT_TEMPLATE,
        "max_tokens": MAX_TOKENS,
        "max_num_seqs": 1,
        "enforce_eager": True,  # compiling takes longer than these few prompts
    }
    runs: list[dict[str, Any]] = [
        {"output": folder / "peagle", "drafter": "peagle", "num_speculative_tokens": K, "limit": NUM_PROMPTS},
        {"output": folder / "none", "drafter": "none", "limit": NUM_BASELINE_PROMPTS},
    ]
    progress, reports = RunProgress(console(soft_wrap=True)), []
    with QuietStderr() as quiet, ray_cluster():
        quiet.move_to(folder / "ray.log")
        for number, options in enumerate(runs, 1):
            progress.say(f"[{number}/{len(runs)}] {options['limit']} HumanEval prompts, drafter: {options['drafter']}")
            keys = {**common, **options}
            config = GenerateConfig(**keys)
            # The command that continues a stopped run; `peagle demo` would start a new one.
            request = RunRequest(config=config, command=["peagle", "generate", *flags.to_arguments(config)])
            reports.append(generate(request, progress).report)
            progress.say(short_summary(reports[-1]) + "\n")
    write_atomic(folder / "report.html", render_html(reports).encode())
    print(text_comparison(reports))
    print(
        "A drafter saves less with more concurrent requests: verifying drafts is then limited by arithmetic, not "
        f"by reading weights. `peagle models {MODEL}` shows the fastest drafter by concurrency."
    )
    print(describe_answers(RunDirectory(runs[0]["output"])))
    print(f"report: {folder / 'report.html'}")
    return 0, {"reports": reports, "comparison": compare(reports)}


def write_humaneval(path: Path, limit: int) -> Path:
    """Write the first HumanEval problems as JSON lines."""
    from peagle.humaneval import read_humaneval

    problems = read_humaneval()[:limit]
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
    return path
