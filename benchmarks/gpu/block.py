"""What the scripts of the GPU queue share: one block of 15 minutes, in which commands have 10.

    python3 benchmarks/gpu/NAME.py [--tiny] [--output DIR] [--time-budget-s SECONDS]

Each script measures its most valuable engine first and writes report.json, report.md and plots again after every pass,
so a command that is killed loses the pass in progress. Exit code 0: complete; 3: the same command continues in DIR; 1:
an engine failed, and `logs/` there says why. `--tiny` runs the same code on a CPU, in a few minutes. Without Ray.
"""

import argparse
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapes import write_shapes

from jobs.output import listener, say
from peagle.bench.config import BenchConfig
from peagle.bench.engine import run_pass
from peagle.bench.plan import MODEL_RUNNER, Pass
from peagle.bench.record import PassRecord
from peagle.bench.run import Bench
from peagle.bench.spending import EngineSpending
from peagle.catalog.cards import PublishedTable, load_catalog
from peagle.engine.interface import Engine
from peagle.engine.vllm import start_engine
from peagle.errors import PeagleError
from peagle.files import write_atomic
from peagle.profiles.measurements import METHOD_NAMES, NONE
from peagle.requests.tokenizer import load_tokenizer
from peagle.signals import signals_as_interrupts
from peagle.tables import aligned, markdown

COMMAND_S = 600
_SPARE_S = 30  # to shut an engine down
_WARM_UP_TOKENS = 16
# gpt-oss-20b on HumanEval (vLLM blog "P-EAGLE", 2026-03-13). K=11 is not published: it goes on at the geometric rate
# through the two published lengths.
ACCEPTANCE = ["peagle=3:3.02,7:3.94,11:4.20", "eagle3=3:2.65,7:3.03,11:3.08"]
CONCURRENCY = [1, 8, 32, 128]

Keys = dict[str, Any]
"""Keys of a `BenchConfig`."""


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", "runs/gpu"), name)
    parser.add_argument("--output", type=Path, default=default, help="results (default: $OUT/NAME, or runs/gpu/NAME)")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU: small shapes, few requests")
    parser.add_argument("--time-budget-s", type=float, default=COMMAND_S - _SPARE_S, help="default: %(default)s")
    return parser


def set_environment() -> None:
    """Set vLLM's variables as all items have them. Call it before anything is planned."""
    os.environ[MODEL_RUNNER] = "0"  # P-EAGLE runs on model runner V1 only; the others shall run on the same one
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # vLLM 0.24 imports it otherwise


def shape_keys(shapes: Path, *, tiny: bool) -> Keys:
    """Return the keys of a benchmark of Qwen3-Coder-30B-A3B's shape, in FP8, without a method, K or concurrency."""
    keys: Keys = {
        "model": str(shapes / "target"),
        "dataset": str(shapes / "prompts.jsonl"),
        "load_format": "dummy",
        "drafter": [f"{method}={shapes / method}" for method in ("peagle", "eagle3")],
        "precision": "fp8",
        "synthetic_acceptance": ACCEPTANCE,
        "max_model_len": 1024,
        **pass_keys(tiny=tiny),
    }
    if tiny:  # a CPU accepts no drafts by lot, and FP8 weights need a GPU
        keys |= {"synthetic_acceptance": [], "precision": "bf16", "enforce_eager": True}
    return keys


def pass_keys(*, tiny: bool) -> Keys:
    """Return the keys that say how long a pass is: about 30 s for the four concurrencies of an engine."""
    length = {"requests_per_slot": 1, "max_tokens": 8} if tiny else {"requests_per_slot": 4, "max_tokens": 256}
    return {"repeats": 1, "rounds": 1, **length}


def shapes_folder(*, tiny: bool) -> Path:
    """Return the folder of the shapes, which are written on first use."""
    folder = Path("runs/shapes-tiny" if tiny else "runs/shapes")
    if not (folder / "prompts.jsonl").exists():
        write_shapes(folder, tiny=tiny)
    return folder


class BlockBench(Bench):
    """A benchmark that warms each engine up once, at all concurrencies, and writes its report after every pass."""

    after_pass: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._warm: set[str] = set()

    def num_warm_up(self, one: Pass) -> int:
        """Return 0: the engine has had its warm-up."""
        return 0

    def add_pass(self, one: Pass, record: PassRecord) -> None:
        """Take a finished pass and write the report."""
        super().add_pass(one, record)
        try:
            self.write_report()
            self.after_pass()
        except Exception:  # what is measured is kept in `cells`, and the rest of the block is worth more than a table
            traceback.print_exc()

    async def _measure(self, engine: Engine, one: Pass, start_s: float, spending: EngineSpending) -> PassRecord:
        if one.setup.name not in self._warm:
            self._warm.add(one.setup.name)
            sampling = {**self.config.sampling(), "max_tokens": _WARM_UP_TOKENS}
            for concurrency in self.config.concurrency:
                prompts = self.prompts(replace(one, concurrency=concurrency))[:concurrency]
                await run_pass(
                    engine,
                    prompts,
                    sampling=sampling,
                    concurrency=concurrency,
                    progress=lambda done, total: None,
                    num_warm_up=0,
                )
        return await super()._measure(engine, one, start_s, spending)


def run_block(
    args: argparse.Namespace, benches: Sequence[tuple[str, Keys]], then: Callable[[], None] = lambda: None
) -> int:
    """Run benchmarks one after another, each in its folder below the output, as far as the time budget reaches.

    Args:
        benches: each with the name of its folder ("" is the output itself); two in one folder share its passes.
        then: called after every pass.

    Returns:
        The exit code.
    """
    ends_at = time.monotonic() + args.time_budget_s
    codes = []
    with signals_as_interrupts():
        for name, keys in benches:
            left_s = ends_at - time.monotonic()
            if codes and left_s < _TYPICAL_ENGINE_S and not args.tiny:
                say(f"{name}: {left_s:.0f} s are left, too few for an engine; the same command continues")
                codes.append(3)
                continue
            config = BenchConfig(**keys, output=args.output / name, time_budget_s=max(left_s, 1.0))
            codes.append(_run(config, then))
    say(f"results: {args.output}")
    return 1 if 1 in codes else max(codes, default=0)


_TYPICAL_ENGINE_S = 160  # 130 to start, 30 to measure


def _run(config: BenchConfig, then: Callable[[], None]) -> int:
    try:
        bench = BlockBench.prepare(config, listener(), start_engine, load_tokenizer)
        bench.after_pass = then
        report, _ = bench.run()
    except PeagleError as error:
        say(f"error: {error.message}" + (f"\n  {error.hint}" if error.hint else ""))
        return 1
    then()
    return 1 if report["failed"] else 3 if report["num_passes_left"] else 0


def published_table() -> PublishedTable:
    """Return the published speeds at up to 128 requests: SPEED-Bench Code on one B200."""
    tables = load_catalog().get("qwen3-coder-30b-a3b-instruct").published
    return max(tables, key=lambda table: max(table.concurrency))


def published_k(method: str, concurrency: int) -> int:
    """Return the K with which a method is fastest at a concurrency, as published. 0 for no speculation."""
    table = published_table()
    index = table.concurrency.index(concurrency)
    own = [speeds for speeds in table.speeds if speeds.method == method]
    return max(own, key=lambda speeds: speeds.output_tokens_per_s[index]).num_speculative_tokens


def write_comparison(
    path: Path, reports: Sequence[Mapping[str, Any]], k_of: Callable[[str, int], int], *, tiny: bool
) -> None:
    """Write a table of speed-ups next to the published ones.

    Args:
        reports: `report.json` of one or several folders. A speed-up compares engines of the same report.
        k_of: the K of a method at a concurrency.
    """
    table = published_table()
    rows = [["output tokens/s over", *(f"{c} at once" for c in CONCURRENCY)]]
    for method, over in (("peagle", NONE), ("eagle3", NONE), ("peagle", "eagle3")):
        here = [_ratio_here(reports, method, over, c, k_of) for c in CONCURRENCY]
        there = [_ratio_published(table, method, over, c, k_of) for c in CONCURRENCY]
        name = f"{METHOD_NAMES[method]} over {METHOD_NAMES[over]}"
        rows += [[f"{name}, here", *here], [f"{name}, published", *there]]
    ks = "; ".join(
        f"{METHOD_NAMES[method]} K=" + "/".join(str(k_of(method, c)) for c in CONCURRENCY)
        for method in ("peagle", "eagle3")
    )
    dry_run = "DRY RUN on a CPU: the figures mean nothing. " if tiny else ""
    note = (
        f"{dry_run}{ks}. Here: DUMMY weights, SYNTHETIC acceptance (gpt-oss-20b's on HumanEval). Published: "
        f"{table.dataset}, one {table.accelerator}, real weights ({table.source})."
    )
    write_atomic(path, ("\n".join([*markdown(rows), "", note]) + "\n").encode())
    say("\n".join(aligned(rows)))


def _ratio_here(
    reports: Sequence[Mapping[str, Any]], method: str, over: str, concurrency: int, k_of: Callable[[str, int], int]
) -> str:
    """Return the speed-up of the first report that has it, or of two methods over the baselines of two reports."""

    def over_none(name: str) -> float | None:
        for report in reports:
            ours = _speed(report, name, k_of(name, concurrency), concurrency)
            base = _speed(report, NONE, 0, concurrency)
            if ours and base:
                return ours / base
        return None

    for report in reports:
        ours = _speed(report, method, k_of(method, concurrency), concurrency)
        theirs = _speed(report, over, 0 if over == NONE else k_of(over, concurrency), concurrency)
        if ours and theirs:
            return f"{ours / theirs:.2f}"
    if over != NONE and (first := over_none(method)) and (second := over_none(over)):
        return f"{first / second:.2f}"
    return "-"


def _speed(report: Mapping[str, Any], method: str, k: int, concurrency: int) -> float | None:
    wanted = (method, k, concurrency)
    return next(
        (float(c["output_tokens_per_s"]) for c in report["cells"] if (c["method"], c["k"], c["concurrency"]) == wanted),
        None,
    )


def _ratio_published(
    table: PublishedTable, method: str, over: str, concurrency: int, k_of: Callable[[str, int], int]
) -> str:
    index = table.concurrency.index(concurrency)
    speeds = {(s.method, s.num_speculative_tokens): s.output_tokens_per_s[index] for s in table.speeds}
    ours = speeds[method, k_of(method, concurrency)]  # type: ignore[index]
    theirs = speeds[over, 0 if over == NONE else k_of(over, concurrency)]  # type: ignore[index]
    return f"{ours / theirs:.2f}"


def run_script(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """Run a script of the queue and exit with its code."""
    args = parser.parse_args()
    set_environment()
    began = time.monotonic()
    code = run(args)
    say(f"exit code {code} after {time.monotonic() - began:.0f} s")
    sys.exit(code)
