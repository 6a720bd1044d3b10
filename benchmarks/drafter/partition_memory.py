"""Peak memory of one training step on one long document, computed in 1, 2, 4 and 8 parts (peagle/drafter/training.py).

    python benchmarks/drafter/partition_memory.py --target FOLDER --output partition.json

The step is that of `peagle train` (bf16 autocast over float32 weights, features read from a store). Features are
random, since their values change neither memory nor work. Each number of parts is measured in its own process. It first
runs a step on 64 tokens to load libraries and kernels. Then it reports how far the step raised its resident memory
(Linux: the peak is reset through /proc/self/clear_refs). A process that exceeds the limit is killed, which the table
shows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 2**30
_POLL_S = 0.05
_SPARE_GIB = 2.0  # available memory that is left to other processes
_WARM_UP_TOKENS = 64


def main() -> None:
    """Measure each number of parts, write the results, and print a Markdown table."""
    options = _options()
    if options.child is not None:
        print(json.dumps(_measure(options)))  # noqa: T201 - read by the parent
        return
    limit = options.limit_gib or _available() / GIB - _SPARE_GIB
    settings = {"tokens": options.tokens, "num_layers": options.num_layers, "limit_gib": round(limit, 1)}
    results: list[dict[str, Any]] = []
    for parts in options.parts:
        results.append(_measure_in_subprocess(parts, limit))
        options.output.write_text(json.dumps({**settings, "parts": results}, indent=2) + "\n")
    print(_table(results, limit))  # noqa: T201


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target that the head is for")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--parts", type=lambda words: [int(word) for word in words.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--num-layers", type=int, default=1)
    parser.add_argument("--limit-gib", type=float, help="memory limit of a process; default: available memory minus 2")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure_in_subprocess(parts: int, limit_gib: float) -> dict[str, Any]:
    """Measure in a subprocess, and kill it if its memory exceeds the limit."""
    process = subprocess.Popen([sys.executable, *sys.argv, "--child", str(parts)], stdout=subprocess.PIPE, text=True)
    highest = 0
    while process.poll() is None:
        highest = max(highest, _status("VmRSS", process.pid))
        if highest > limit_gib * GIB:
            process.kill()
            process.wait()
            return {"parts": parts, "over_the_limit": True}
        time.sleep(_POLL_S)
    assert process.stdout is not None
    if process.returncode:
        raise SystemExit(f"{parts} parts: exit code {process.returncode}")
    return {"parts": parts, "over_the_limit": False, **json.loads(process.stdout.read())}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run a step in this process; return its seconds, and the rise of resident memory to its peak."""
    import gc

    from peagle.drafter.features import FeatureStore
    from peagle.drafter.head import HeadSpec, build_head
    from peagle.drafter.training import TrainingConfig, train

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape = HeadSpec(aux_layers=(2, 15, 29), num_layers=options.num_layers, num_depths=8)
        head = build_head(options.target, shape, _vocabulary(options.target))
        _write_features(folder / "features", options)
        store = FeatureStore(folder / "features")
        for document, name in ((0, "warm-up"), (1, "step")):
            gc.collect()
            before = _status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            tokens_per_part = -(-options.tokens // options.child)
            config = TrainingConfig(num_steps=1, num_depths=8, micro_batch_tokens=tokens_per_part)
            outcome = train(head, store, [document], config, folder / name, fingerprint={})
        peak = _status("VmHWM")
    return {
        "before_gib": round(before / GIB, 3),
        "above_gib": round((peak - before) / GIB, 3),
        "step_s": round(outcome.train_s, 1),
    }


def _vocabulary(target: Path) -> Any:
    from peagle.drafter.vocabulary import DraftVocabulary

    size = json.loads((target / "config.json").read_text())["vocab_size"]
    return DraftVocabulary(token_ids=tuple(range(8192)), target_size=size, coverage=1.0)


def _write_features(folder: Path, options: argparse.Namespace) -> None:
    """Write two documents of random states: one to warm up, and the long one, a sixteenth of which is the prompt."""
    import torch

    from peagle.drafter.features import FeatureSpec, StoreWriter

    hidden = json.loads((options.target / "config.json").read_text())["hidden_size"]
    spec = FeatureSpec(target="random", aux_layers=(2, 15, 29), hidden_size=hidden, samples="random")
    torch.manual_seed(0)
    for number, length in enumerate((_WARM_UP_TOKENS, options.tokens)):
        tensors = {
            "token_ids": torch.randint(8192, (length,), dtype=torch.int32),
            "lengths": torch.tensor([length]),
            "num_prompt_tokens": torch.tensor([length // 16]),
            "aux": torch.randn(length, 3 * hidden, dtype=torch.bfloat16),
            "last": torch.randn(length, hidden, dtype=torch.bfloat16),
        }
        StoreWriter(folder, spec, num_shards=2).add(number, tensors)


def _status(field: str, process: int | str = "self") -> int:
    """Return a field of a process's /proc status in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _table(results: list[dict[str, Any]], limit_gib: float) -> str:
    lines = ["| parts | peak above the start, GiB | of one part | seconds |", "|---:|---:|---:|---:|"]
    one_part = results[0].get("above_gib")
    for result in results:
        if result["over_the_limit"]:
            lines.append(f"| {result['parts']} | killed above {limit_gib:.1f} in all | | |")
            continue
        share = f"{result['above_gib'] / one_part:.0%}" if one_part else ""
        lines.append(f"| {result['parts']} | {result['above_gib']:.2f} | {share} | {result['step_s']:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
