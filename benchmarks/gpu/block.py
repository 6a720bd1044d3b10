"""Code shared by the scripts of the GPU queue. A block is 15 minutes of GPU time; one command may use 10 of them.

    python3 benchmarks/gpu/NAME.py [--tiny] [--output DIR] [--time-budget-s SECONDS]

Each script measures its most valuable engine first. It rewrites report.json, report.md and plots after every pass, so a
killed command only loses the pass in progress. Exit codes: 0 if everything is measured; 3 if running the same command
again continues; 1 if an engine failed (see DIR/logs). `--tiny` runs the same code on a CPU, in a few minutes. The
scripts do not use Ray.
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
# Acceptance lengths by K of gpt-oss-20b on HumanEval (vLLM blog "P-EAGLE", 2026-03-13). Those for K=11 are not
# published; they are extrapolated geometrically from the two published lengths.
ACCEPTANCE = ["peagle=3:3.02,7:3.94,11:4.20", "eagle3=3:2.65,7:3.03,11:3.08"]
CONCURRENCY = [1, 8, 32, 128]

Keys = dict[str, Any]
"""Keys of a `BenchConfig`."""


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", "runs/gpu"), name)
    parser.add_argument("--output", type=Path, default=default, help="results (default: $OUT/NAME, or runs/gpu/NAME)")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a CPU: small shapes, few requests")
    parser.add_argument("--time-budget-s", type=float, default=COMMAND_S - _SPARE_S, help="default: %(default)s")
    return parser


def set_environment() -> None:
    """Set the environment variables of vLLM for all items. Call it before planning anything."""
    os.environ[MODEL_RUNNER] = "0"  # P-EAGLE only runs on model runner V1; other methods use it for a fair comparison
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # otherwise vLLM 0.24 imports flashinfer


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
    if tiny:  # synthetic acceptance and FP8 weights need a GPU
        keys |= {"synthetic_acceptance": [], "precision": "bf16", "enforce_eager": True}
    return keys


def pass_keys(*, tiny: bool) -> Keys:
    """Return the keys that set the length of a pass: about 30 s for the four concurrencies of an engine."""
    length = {"requests_per_slot": 1, "max_tokens": 8} if tiny else {"requests_per_slot": 4, "max_tokens": 256}
    return {"repeats": 1, "rounds": 1, **length}


def shapes_folder(*, tiny: bool) -> Path:
    """Return the folder of the shapes. The first call writes them."""
    folder = Path("runs/shapes-tiny" if tiny else "runs/shapes")
    if not (folder / "prompts.jsonl").exists():
        write_shapes(folder, tiny=tiny)
    return folder


class BlockBench(Bench):
    """A benchmark that warms up each engine once, at all concurrencies, and writes its report after every pass."""

    after_pass: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._warm_setups: set[str] = set()

    def num_warm_up(self, planned: Pass) -> int:
        """Return 0: the engine is already warm."""
        return 0

    def add_pass(self, planned: Pass, record: PassRecord) -> None:
        """Add a finished pass and write the report."""
        super().add_pass(planned, record)
        try:
            self.write_report()
            self.after_pass()
        except Exception:  # the measurement is in `cells/`, and a failing table must not end the block
            traceback.print_exc()

    async def _measure(self, engine: Engine, planned: Pass, start_s: float, spending: EngineSpending) -> PassRecord:
        if planned.setup.name not in self._warm_setups:
            self._warm_setups.add(planned.setup.name)
            sampling = {**self.config.sampling(), "max_tokens": _WARM_UP_TOKENS}
            for concurrency in self.config.concurrency:
                prompts = self.prompts(replace(planned, concurrency=concurrency))[:concurrency]
                await run_pass(
                    engine,
                    prompts,
                    sampling=sampling,
                    concurrency=concurrency,
                    progress=lambda done, total: None,
                    num_warm_up=0,
                )
        return await super()._measure(engine, planned, start_s, spending)


def run_block(
    args: argparse.Namespace, benches: Sequence[tuple[str, Keys]], after_pass: Callable[[], None] = lambda: None
) -> int:
    """Run benchmarks one after another, each in its folder below the output, until the time budget is spent.

    Args:
        benches: each with the name of its folder ("" is the output itself); benchmarks in one folder share its passes.
        after_pass: called after every pass.

    Returns:
        The exit code.
    """
    ends_at = time.monotonic() + args.time_budget_s
    codes = []
    with signals_as_interrupts():
        for name, keys in benches:
            remaining_s = ends_at - time.monotonic()
            if codes and remaining_s < _TYPICAL_ENGINE_S and not args.tiny:
                say(
                    f"{name}: {remaining_s:.0f} s remain, too few for an engine; run the same command again to continue"
                )
                codes.append(3)
                continue
            config = BenchConfig(**keys, output=args.output / name, time_budget_s=max(remaining_s, 1.0))
            codes.append(_run(config, after_pass))
    say(f"results: {args.output}")
    return 1 if 1 in codes else max(codes, default=0)


_TYPICAL_ENGINE_S = 160  # 130 to start, 30 to measure


def _run(config: BenchConfig, after_pass: Callable[[], None]) -> int:
    try:
        bench = BlockBench.prepare(config, listener(), start_engine, load_tokenizer)
        bench.after_pass = after_pass
        report, _ = bench.run()
    except PeagleError as error:
        say(f"error: {error.message}" + (f"\n  {error.hint}" if error.hint else ""))
        return 1
    after_pass()
    return 1 if report["failed"] else 3 if report["num_passes_left"] else 0


def published_table() -> PublishedTable:
    """Return the published speeds at up to 128 requests: SPEED-Bench Code on one B200."""
    tables = load_catalog().get("qwen3-coder-30b-a3b-instruct").published
    return max(tables, key=lambda table: max(table.concurrency))


def published_k(method: str, concurrency: int) -> int:
    """Return the K at which a method is fastest in the published table, at a concurrency. 0 for no speculation."""
    table = published_table()
    index = table.concurrency.index(concurrency)
    of_method = [speeds for speeds in table.speeds if speeds.method == method]
    return max(of_method, key=lambda speeds: speeds.output_tokens_per_s[index]).num_speculative_tokens


def write_comparison(
    path: Path, reports: Sequence[Mapping[str, Any]], k_of: Callable[[str, int], int], *, tiny: bool
) -> None:
    """Write a table of speed-ups next to the published ones.

    Args:
        reports: `report.json` of one or several folders. A speed-up compares engines of the same report.
        k_of: returns the K to use for a method at a concurrency.
    """
    table = published_table()
    rows = [["speed-up in output tokens/s", *(f"{c} concurrent" for c in CONCURRENCY)]]
    for method, baseline in (("peagle", NONE), ("eagle3", NONE), ("peagle", "eagle3")):
        measured = [_measured_ratio(reports, method, baseline, c, k_of) for c in CONCURRENCY]
        published = [_published_ratio(table, method, baseline, c, k_of) for c in CONCURRENCY]
        name = f"{METHOD_NAMES[method]} over {METHOD_NAMES[baseline]}"
        rows += [[f"{name}, measured", *measured], [f"{name}, published", *published]]
    ks = "; ".join(
        f"{METHOD_NAMES[method]} K=" + "/".join(str(k_of(method, c)) for c in CONCURRENCY)
        for method in ("peagle", "eagle3")
    )
    dry_run = "DRY RUN on a CPU: the figures mean nothing. " if tiny else ""
    note = (
        f"{dry_run}{ks}. Measured: DUMMY weights, SYNTHETIC acceptance (gpt-oss-20b's on HumanEval). Published: "
        f"{table.dataset}, one {table.accelerator}, real weights ({table.source})."
    )
    write_atomic(path, ("\n".join([*markdown(rows), "", note]) + "\n").encode())
    say("\n".join(aligned(rows)))


def _measured_ratio(
    reports: Sequence[Mapping[str, Any]], method: str, baseline: str, concurrency: int, k_of: Callable[[str, int], int]
) -> str:
    """Return the speed-up from the first report with both methods.

    If no report has both, divide their speed-ups over no speculation, which may be from two reports.
    """

    def over_none(name: str) -> float | None:
        for report in reports:
            speed = _speed(report, name, k_of(name, concurrency), concurrency)
            speed_without = _speed(report, NONE, 0, concurrency)
            if speed and speed_without:
                return speed / speed_without
        return None

    for report in reports:
        speed = _speed(report, method, k_of(method, concurrency), concurrency)
        baseline_speed = _speed(report, baseline, 0 if baseline == NONE else k_of(baseline, concurrency), concurrency)
        if speed and baseline_speed:
            return f"{speed / baseline_speed:.2f}"
    if baseline != NONE and (first := over_none(method)) and (second := over_none(baseline)):
        return f"{first / second:.2f}"
    return "-"


def _speed(report: Mapping[str, Any], method: str, k: int, concurrency: int) -> float | None:
    wanted = (method, k, concurrency)
    return next(
        (float(c["output_tokens_per_s"]) for c in report["cells"] if (c["method"], c["k"], c["concurrency"]) == wanted),
        None,
    )


def _published_ratio(
    table: PublishedTable, method: str, baseline: str, concurrency: int, k_of: Callable[[str, int], int]
) -> str:
    index = table.concurrency.index(concurrency)
    speeds = {(s.method, s.num_speculative_tokens): s.output_tokens_per_s[index] for s in table.speeds}
    speed = speeds[method, k_of(method, concurrency)]  # type: ignore[index]
    baseline_speed = speeds[baseline, 0 if baseline == NONE else k_of(baseline, concurrency)]  # type: ignore[index]
    return f"{speed / baseline_speed:.2f}"


def run_script(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """Run a script of the queue and exit with its code."""
    args = parser.parse_args()
    set_environment()
    start = time.monotonic()
    code = run(args)
    say(f"exit code {code} after {time.monotonic() - start:.0f} s")
    sys.exit(code)
