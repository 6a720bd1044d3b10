"""The tail of a run: how much of the engines' time is unused while the last units finish.

    python benchmarks/bulk/tail.py --folder /tmp/tail --rows 1200 --engines 4 [--rows-per-unit 19]

Rows have very different output lengths (`ignore_eos` and each row's own `max_tokens`): 80 % have 16 to 64 tokens, 15 %
have 128 to 256, and 5 % have 512, in a fixed random order. The fake engine computes nothing and only waits, so four
engines run on any machine. `--rows-per-unit` splits the corpus into equal units, as before units shrank toward the end
of a run.

The results come from the ledger and the committed rows:

    wall_s          from the moment when the first engine is ready to the last commit
    least_s         wall time of the same rows if all slots of all engines were always full
    unused          1 - least_s / wall_s: the share of slot time without a row
    idle_share      the share of the engines' paid time in which an engine has no row at all
    tail_s          from the moment when the first engine has committed its last unit to the end of the run
"""

import argparse
import dataclasses
import io
import json
import random
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Run once, and print how the engines' time was used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1200)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--token-s", type=float, default=0.01)
    parser.add_argument("--rows-per-unit", type=int)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    corpus = options.folder / "prompts.jsonl"
    _write(corpus, options.rows)
    _generate(corpus, options)
    print(json.dumps(_account(options), indent=2))  # noqa: T201


def _write(path: Path, num_rows: int) -> None:
    generator = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            kind = generator.random()
            length = 512 if kind < 0.05 else generator.randint(128, 256) if kind < 0.2 else generator.randint(16, 64)
            file.write(json.dumps({"prompt": f"say {number}", "sampling": {"max_tokens": length}}) + "\n")


def _generate(corpus: Path, options: argparse.Namespace) -> None:
    import ray
    from rich.console import Console

    from peagle import hardware
    from peagle.engine.fake import FakeTraits
    from peagle.runs.progress import RunProgress
    from pipelines.batch.config import GenerateConfig
    from pipelines.batch.request import RunRequest
    from pipelines.batch.run import generate

    # The fake engine only waits, so there can be more engines than cores. Make the driver count enough cores.
    with_enough_cpus = dataclasses.replace(hardware.detect(), num_cpus=2 * options.engines)
    hardware.detect = lambda **_: with_enough_cpus
    ray.init(address="local", num_cpus=2 * options.engines, include_dashboard=False, log_to_driver=False)
    config = GenerateConfig(
        input=str(corpus),
        output=options.folder / "run",
        engine="fake",
        engines=options.engines,
        max_num_seqs=options.max_num_seqs,
        fake=FakeTraits(token_s=options.token_s),
        rows_per_unit=options.rows_per_unit,
        ignore_eos=True,
        heartbeat_s=1,
        usd_per_hour=1,
    )
    generate(RunRequest(config=config, command=sys.argv), RunProgress(Console(file=io.StringIO())))


def _account(options: argparse.Namespace) -> dict[str, Any]:
    import pyarrow.dataset as ds

    from peagle.runs.directory import RunDirectory

    run = RunDirectory(options.folder / "run")
    sessions, usages = run.sessions(), list(run.usages())
    rows = ds.dataset(run.data, format="parquet").to_table(columns=["num_output_tokens"])
    ready_at = min(session.started_at + session.load_s + session.compile_s for session in sessions)
    end_at = max(usage.finished_at for usage in usages)
    slots = len(sessions) * options.max_num_seqs
    least_s = sum(rows.column("num_output_tokens").to_pylist()) * options.token_s / slots
    last_commits = [
        max((usage.finished_at for usage in usages if usage.session_id == session.session_id), default=ready_at)
        for session in sessions
    ]
    return {
        "rows": len(rows),
        "units": len(usages),
        "sizes": [max(u.num_rows for u in usages), min(u.num_rows for u in usages)],
        "engines": len(sessions),
        "wall_s": round(end_at - ready_at, 2),
        "least_s": round(least_s, 2),
        "unused": round(1 - least_s / (end_at - ready_at), 4),
        "idle_share": round(sum(s.idle_s for s in sessions) / sum(s.last_seen_at - s.started_at for s in sessions), 4),
        "tail_s": round(end_at - min(last_commits), 2),
    }


if __name__ == "__main__":
    main()
