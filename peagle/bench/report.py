"""The report of a benchmark: JSON-ready data, tables in the layout of published results, and plots."""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from peagle.bench.config import BenchConfig
from peagle.bench.folder import SCHEMA
from peagle.bench.plan import MODEL_RUNNER, BenchPlan, Pass, Setup, chosen_model_runner
from peagle.bench.prompts import Dataset
from peagle.bench.record import PassRecord, acceptance, source_notes, summarise
from peagle.charts import Axes, Curve, line_chart, standalone
from peagle.economics.report.figures import UNKNOWN, format_count, format_share
from peagle.engine.spec import LOOKUP_METHODS
from peagle.engine.steps import max_num_batched_tokens
from peagle.errors import ConfigError
from peagle.profiles.measurements import METHOD_NAMES, NONE
from peagle.provenance import git_revision, versions
from peagle.tables import aligned, markdown

_MIN_REQUESTS_PER_SLOT = 3  # with fewer, much of a pass runs below the nominal concurrency


def require_prompts(config: BenchConfig, num_prompts: int) -> None:
    largest = max(config.concurrency)
    if config.requests_per_slot is None and num_prompts < largest:
        raise ConfigError(
            f"concurrency {largest} cannot be reached with {num_prompts} prompts",
            hint=f"repeat prompts with --requests-per-slot {_MIN_REQUESTS_PER_SLOT + 1}, use more prompts, or"
            " decrease --concurrency",
        )


def few_prompts_warnings(config: BenchConfig, num_prompts: int) -> list[str]:
    """Return a warning if passes have too few requests for their concurrency."""
    too_short_at = [
        c for c in config.concurrency if (config.requests_per_slot or num_prompts / c) < _MIN_REQUESTS_PER_SLOT
    ]
    if not too_short_at:
        return []
    return [
        f"Fewer than {_MIN_REQUESTS_PER_SLOT} requests per slot at concurrency {', '.join(map(str, too_short_at))}:"
        " much of a pass runs below its concurrency, so tokens/s are too low. Use more prompts or --requests-per-slot."
    ]


def model_runner_warnings(
    config: BenchConfig, device_platform: str, chosen_runner: str | None, records: Sequence[PassRecord]
) -> list[str]:
    """Return a warning if methods used, or might use, different model runners of vLLM."""
    methods: dict[str, list[str]] = {}
    for record in records:
        if record.model_runner is not None:
            methods.setdefault(record.model_runner, []).append(METHOD_NAMES[record.method])
    if len(methods) > 1:
        runners = "; ".join(f"{runner} ran {', '.join(dict.fromkeys(methods[runner]))}" for runner in sorted(methods))
        return [
            f"vLLM used different model runners: {runners}. Their difference affects the ratios. "
            f"Set {MODEL_RUNNER}=0 and another --output to run all methods on V1."
        ]
    is_known = bool(records) and all(record.model_runner is not None for record in records)
    if device_platform == "cuda" and chosen_runner is None and len(config.methods) > 1 and not is_known:
        return [
            f"{MODEL_RUNNER} is not set, and on a GPU vLLM might use another model runner for P-EAGLE than for other "
            f"methods. Set {MODEL_RUNNER}=0 to run all methods on V1."
        ]
    return []


def make_report(
    plan: BenchPlan, dataset: Dataset, done: Mapping[Pass, PassRecord], failed: Mapping[str, str]
) -> dict[str, Any]:
    """Return the report of the passes in `done`; `failed` maps labels of setups to error messages."""
    cells = []
    for setup in plan.setups:
        for concurrency in plan.config.concurrency:
            records = [r for planned, r in done.items() if (planned.setup, planned.concurrency) == (setup, concurrency)]
            if records:
                cells.append(summarise(records, usd_per_s=plan.usd_per_s))
    num_remaining = len(plan.passes) - len(done)
    warnings = [
        *caveats(plan, dataset, list(done.values())),
        *(f"Not complete: {label}, because its engine failed: {message}" for label, message in failed.items()),
        *([f"Not finished: {num_remaining} of {len(plan.passes)} passes remain."] if num_remaining else []),
    ]
    return {
        "schema": SCHEMA,
        "labels": warning_labels(plan),
        "model": plan.model.name,
        "configuration": plan.config.model_dump(mode="json"),
        "engine": plan.spec.to_dict(),
        "fingerprint": plan.fingerprint(dataset),
        "hardware": plan.hardware.to_dict() | {"description": plan.hardware.describe()},
        "versions": versions() | {"python": platform.python_version(), "git_revision": git_revision()},
        "precision": plan.precision.describe(),
        "compiled": not plan.spec.enforce_eager,
        "sampling": plan.config.sampling(),
        "dataset": {"name": dataset.name, "num_prompts": len(dataset.prompts), "rejected": dataset.rejected},
        "price": plan.price.to_dict() if plan.price else None,
        "usd_per_s": plan.usd_per_s,
        "setups": [_setup(plan, setup, done) for setup in plan.setups],
        "cells": cells,
        "ratios": speed_ratios(cells),
        "num_passes_left": num_remaining,
        "failed": dict(failed),
        "caveats": warnings,
        "notes": [
            *plan.notes,
            *source_notes((planned.setup.label, record) for planned, record in done.items()),
            *warnings,
        ],
    }


def warning_labels(plan: BenchPlan) -> list[str]:
    """Return warnings for a measurement with synthetic acceptance or dummy weights; empty for others."""
    meaningless = "and the text is meaningless; only the speeds are real"
    labels = []
    if plan.config.synthetic_acceptance:
        labels.append(f"SYNTHETIC ACCEPTANCE: drafts are accepted at random {meaningless}")
    if plan.config.load_format == "dummy":
        labels.append(f"DUMMY WEIGHTS: the weights are random {meaningless}")
    return labels


def caveats(plan: BenchPlan, dataset: Dataset, records: Sequence[PassRecord]) -> list[str]:
    runner_warnings = model_runner_warnings(plan.config, plan.hardware.platform, chosen_model_runner(), records)
    return few_prompts_warnings(plan.config, len(dataset.prompts)) + runner_warnings


def best_cell(cells: Sequence[Mapping[str, Any]], method: str, concurrency: int) -> Mapping[str, Any] | None:
    """Return the fastest cell of a method at a concurrency; None if it was not measured."""
    candidates = [cell for cell in cells if (cell["method"], cell["concurrency"]) == (method, concurrency)]
    return max(candidates, key=lambda cell: cell["output_tokens_per_s"], default=None)


def speed_ratios(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return speed ratios by concurrency, at the best K: heads over EAGLE-3, and every method over none.

    `range_by_concurrency` is the range of the ratio over the repeats, with the same K.
    """
    results = []
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    concurrencies = sorted({cell["concurrency"] for cell in cells})
    for baseline in ("eagle3", NONE):
        for method in methods:
            if method in (NONE, baseline) or baseline not in methods:
                continue
            if baseline == "eagle3" and method in LOOKUP_METHODS:
                continue
            pairs = {str(c): (best_cell(cells, method, c), best_cell(cells, baseline, c)) for c in concurrencies}
            results.append(
                {
                    "method": method,
                    "over": baseline,
                    "by_concurrency": {c: _ratio(*pair) for c, pair in pairs.items()},
                    "range_by_concurrency": {c: _ratio_range(*pair) for c, pair in pairs.items()},
                }
            )
    return results


def _ratio(cell: Mapping[str, Any] | None, baseline: Mapping[str, Any] | None) -> float | None:
    if cell is None or baseline is None or not baseline["output_tokens_per_s"]:
        return None
    return float(cell["output_tokens_per_s"] / baseline["output_tokens_per_s"])


def _ratio_range(cell: Mapping[str, Any] | None, baseline: Mapping[str, Any] | None) -> list[float] | None:
    """Return the range of the ratio over common repeats, or None if there are fewer than two."""
    if cell is None or baseline is None:
        return None
    speeds, baseline_speeds = _by_repeat(cell), _by_repeat(baseline)
    common = speeds.keys() & baseline_speeds.keys()
    values = [speeds[repeat] / baseline_speeds[repeat] for repeat in common if baseline_speeds[repeat]]
    return [min(values), max(values)] if len(values) > 1 else None


def _by_repeat(cell: Mapping[str, Any]) -> dict[int, float]:
    return dict(zip(cell["repeat_numbers"], cell["output_tokens_per_s_by_repeat"], strict=True))


def _setup(plan: BenchPlan, setup: Setup, done: Mapping[Pass, PassRecord]) -> dict[str, Any]:
    """Describe a setup, with its acceptance over all concurrencies."""
    spec = setup.spec
    records = [record for planned, record in done.items() if planned.setup == setup]
    rates = setup.drafter.synthetic_rates if setup.drafter else None
    return {
        "method": setup.method,
        "k": setup.k,
        "label": setup.label,
        "head": setup.head,
        "head_fingerprint": setup.fingerprint or None,
        "max_num_batched_tokens": spec.max_num_batched_tokens or max_num_batched_tokens(spec, plan.hardware),
        "synthetic_rates": list(rates) if rates is not None else None,
        "model_runner": next((record.model_runner for record in records if record.model_runner), None),
        **acceptance([record.speculation for record in records]),
    }


Rows = list[list[str]]
TableFormat = Callable[[Sequence[Sequence[str]]], list[str]]

POSITION_NOTE = "By position: the share of drafts whose token at that position was accepted."
_LATENCIES = ("p50", "p95", "p99")
_SPEED_NOTE = "Output tokens/s of the engine: the median of {passes}, and their range divided by the median."
_BEST_NOTE = (
    "Best: the fastest K at that concurrency; the maximum of several figures is biased upwards. In brackets: the range "
    "of the ratio over the repeats, with the same K."
)
_COST_NOTE = (
    "Per user: tokens/s of the median request. TTFT: time to first token. TPOT: time per later token. Step: one "
    "decoding step of a request, including drafting and verification. Memory: {memory}."
)
_MEMORY = {"cpu": "peak RSS of all processes", "cuda": "peak on the device, most of which vLLM reserves"}


def text_tables(report: Mapping[str, Any]) -> str:
    return "\n".join(_page(report, aligned))


def markdown_tables(report: Mapping[str, Any]) -> str:
    return "\n".join(_page(report, markdown)) + "\n"


def speed_rows(report: Mapping[str, Any]) -> Rows:
    concurrencies = report["configuration"]["concurrency"]
    cells = {(cell["method"], cell["k"], cell["concurrency"]): cell for cell in report["cells"]}
    rows = [["output tokens/s", "K", *(f"concurrency {c}" for c in concurrencies)]]
    for setup in report["setups"]:
        speeds = [_speed(cells.get((setup["method"], setup["k"], c))) for c in concurrencies]
        rows.append([*_method_and_k(setup), *speeds])
    return rows


def best_rows(report: Mapping[str, Any]) -> Rows:
    """Return the speed of each method at its best K, and the ratios, by concurrency; empty if there are no ratios."""
    if not report["ratios"]:
        return []
    methods = list(dict.fromkeys(setup["method"] for setup in report["setups"]))
    names = [f"{_best_name(ratio['method'])} / {_best_name(ratio['over'])}" for ratio in report["ratios"]]
    rows = [["concurrency", *map(_best_name, methods), *names]]
    for concurrency in report["configuration"]["concurrency"]:
        row = [str(concurrency)]
        for method in methods:
            cell = best_cell(report["cells"], method, concurrency)
            k = f" (K={cell['k']})" if cell and cell["k"] else ""
            row.append(f"{cell['output_tokens_per_s']:,.1f}{k}" if cell else UNKNOWN)
        for ratio in report["ratios"]:
            value = ratio["by_concurrency"].get(str(concurrency))
            limits = ratio["range_by_concurrency"].get(str(concurrency))
            value_range = f" ({limits[0]:.2f} to {limits[1]:.2f})" if limits else ""
            row.append(UNKNOWN if value is None else f"{value:.2f}x{value_range}")
        rows.append(row)
    return rows


def value_rows(report: Mapping[str, Any]) -> Rows:
    """Return tokens per dollar of each method at its best K, by concurrency; empty without a price."""
    if report["usd_per_s"] is None:
        return []
    concurrencies = report["configuration"]["concurrency"]
    rows = [["tokens per $, best K", *(f"concurrency {c}" for c in concurrencies)]]
    for method in _methods(report):
        cells = [best_cell(report["cells"], method, c) for c in concurrencies]
        values = [format_count(cell["tokens_per_usd"]) if cell else UNKNOWN for cell in cells]
        rows.append([METHOD_NAMES[method], *values])
    return rows


def most_tokens_per_usd(report: Mapping[str, Any]) -> str:
    """Return a sentence that names the method with the most tokens per dollar; empty if only one was measured.

    All methods use the same hardware at the same price, so this method also has the most tokens/s.
    """
    if len(_methods(report)) < 2:
        return ""
    concurrencies: dict[str, list[str]] = {}
    for concurrency in report["configuration"]["concurrency"]:
        cells = [cell for method in _methods(report) if (cell := best_cell(report["cells"], method, concurrency))]
        if cells:
            fastest = max(cells, key=lambda cell: cell["output_tokens_per_s"])
            name = METHOD_NAMES[fastest["method"]] + (f" at K={fastest['k']}" if fastest["k"] else "")
            concurrencies.setdefault(name, []).append(str(concurrency))
    fastest_methods = [f"{name} at concurrency {', '.join(numbers)}" for name, numbers in concurrencies.items()]
    return f"Most tokens per dollar: {'; '.join(fastest_methods)}."


def acceptance_rows(report: Mapping[str, Any]) -> Rows:
    """Return acceptance length and acceptance by position of every setup with drafts."""
    setups = [setup for setup in report["setups"] if setup["num_drafts"]]
    if not setups:
        return []
    positions = positions_of(setups)
    rows = [["acceptance", "K", "length", "drafts", *positions]]
    rows += [[*_method_and_k(setup), *acceptance_figures(setup, positions)] for setup in setups]
    return rows


def positions_of(stats: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(position + 1) for position in range(max(len(cell["acceptance_rates"]) for cell in stats))]


def acceptance_figures(stats: Mapping[str, Any], positions: Sequence[str]) -> list[str]:
    """Return acceptance length, drafts, and the rate at each position; blank beyond K."""
    rates = [format_share(rate) for rate in stats["acceptance_rates"]]
    blank = [""] * (len(positions) - len(rates))
    return [_decimals(stats["acceptance_length"], 2), f"{stats['num_drafts']:,}", *rates, *blank]


def cost_rows(report: Mapping[str, Any]) -> Rows:
    percentiles = [f"{name} {p}" for name in ("TTFT ms", "TPOT ms") for p in _LATENCIES]
    rows = [["latency and cost", "K", "conc.", "per user", *percentiles, "step ms", "GiB", "tokens per $"]]
    for cell in report["cells"]:
        latencies = [_ms((cell[name] or {}).get(p)) for name in ("ttft_s", "tpot_s") for p in _LATENCIES]
        tokens_per_usd = cell["tokens_per_usd"]
        rows.append(
            [
                *_method_and_k(cell),
                str(cell["concurrency"]),
                _decimals(cell["user_tokens_per_s"], 1),
                *latencies,
                _ms(cell["step_s"]),
                _decimals(cell["peak_memory_gib"], 2),
                UNKNOWN if tokens_per_usd is None else format_count(tokens_per_usd),
            ]
        )
    return rows


def conditions(
    report: Mapping[str, Any], *, versions: Sequence[str], hardware: str, dates: Sequence[str], load: Sequence[str] = ()
) -> str:
    """Describe the conditions of a measurement in one line. `load` has parts that describe the concurrency."""
    temperature, max_tokens = report["sampling"]["temperature"], report["sampling"]["max_tokens"]
    parts = [
        report["model"],
        f"{report['dataset']['num_prompts']} prompts of {report['dataset']['name']}",
        f"temperature {temperature:g}" if temperature else "greedy",
        f"{'exactly' if report.get('labels') else 'at most'} {max_tokens} tokens",
        *load,
        f"{report['precision']}, {'compiled' if report['compiled'] else 'not compiled'}",
        *versions,
        hardware,
        " to ".join(dict.fromkeys((min(dates)[:10], max(dates)[:10]))),
    ]
    return "; ".join(parts)


def _page(report: Mapping[str, Any], table: TableFormat) -> list[str]:
    lines: list[str] = []
    for label in report["labels"]:
        lines += [f"**{label}.**" if table is markdown else f"! {label}", ""]
    summary = conditions(
        report,
        versions=[f"{name} {v}" for name, v in report["versions"].items() if name.startswith(("vllm", "torch"))],
        hardware=report["hardware"]["description"],
        dates=[date for cell in report["cells"] for date in cell["measured_at"]],
    )
    repeats = sorted(cell["repeats"] for cell in report["cells"])
    passes = f"{repeats[-1]} {'pass' if repeats[-1] == 1 else 'passes'}"
    if repeats[0] < repeats[-1]:
        passes = f"{repeats[0]} to {passes}"
    lines += [f"{summary}.", "", *table(speed_rows(report)), "", _SPEED_NOTE.format(passes=passes)]
    if rows := best_rows(report):
        lines += ["", *table(rows), "", _BEST_NOTE]
    if rows := acceptance_rows(report):
        lines += ["", *table(rows), "", POSITION_NOTE]
    memory = _MEMORY[report["hardware"]["platform"]]
    lines += ["", *table(cost_rows(report)), "", _COST_NOTE.format(memory=memory)]
    if any(cell["num_refused"] for cell in report["cells"]):
        rejected = "The engine rejected some requests, which the figures do not include: see num_refused in the JSON."
        lines += ["", rejected]
    for note in report["notes"]:
        lines += ["", note]
    if rows := value_rows(report):
        lines += ["", *table(rows)]
    if sentence := most_tokens_per_usd(report):
        lines += ["", sentence]
    return lines


def _method_and_k(cell: Mapping[str, Any]) -> list[str]:
    return [METHOD_NAMES[cell["method"]], str(cell["k"] or "-")]


def _best_name(method: str) -> str:
    return METHOD_NAMES[method] if method == NONE else f"best {METHOD_NAMES[method]}"


def _speed(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return UNKNOWN
    spread = "" if cell["spread"] is None else f" ({format_share(cell['spread'])})"
    return f"{cell['output_tokens_per_s']:,.1f}{spread}"


def _ms(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1000:,.1f}"


def _decimals(value: float | None, decimals: int) -> str:
    return UNKNOWN if value is None else f"{value:,.{decimals}f}"


def speed_plot(report: Mapping[str, Any]) -> str:
    return _best_plot(report, "output_tokens_per_s", "Output tokens/s", "Output tokens per second by concurrency")


def value_plot(report: Mapping[str, Any]) -> str | None:
    """Plot tokens per dollar by concurrency; None without a price."""
    if report["usd_per_s"] is None:
        return None
    return _best_plot(report, "tokens_per_usd", "Output tokens per dollar", "Output tokens per dollar by concurrency")


def _best_plot(report: Mapping[str, Any], cell_key: str, subject: str, axes_name: str) -> str:
    axes = Axes(
        name=axes_name,
        x_name="concurrent requests",
        y_name=subject.lower(),
        x_prefix="concurrency ",
        decimals=0,
        is_evenly_spaced=True,
    )
    concurrencies = report["configuration"]["concurrency"]
    curves: list[Curve] = []
    for method in _methods(report):
        best_cells = [(c, best_cell(report["cells"], method, c)) for c in concurrencies]
        points = [(c, cell[cell_key]) for c, cell in best_cells if cell]
        name = METHOD_NAMES[method]
        curves.append((name if method == NONE else f"{name}, best K", points))
    return _plot(report, subject, curves, axes)


def step_time_plot(report: Mapping[str, Any]) -> str | None:
    """Plot the time of a whole step by K and method, at the smallest concurrency; None if step times are unknown."""
    concurrency = min(report["configuration"]["concurrency"])
    cells = [c for c in report["cells"] if c["concurrency"] == concurrency and c["step_s"] is not None]
    ks = sorted({cell["k"] for cell in cells if cell["k"]})
    if not ks:
        return None
    curves: list[Curve] = []
    for method in _methods(report):
        steps_ms = {cell["k"]: cell["step_s"] * 1000 for cell in cells if cell["method"] == method}
        points = [(k, steps_ms[0]) for k in ks] if 0 in steps_ms else sorted(steps_ms.items())
        if points:
            curves.append((METHOD_NAMES[method], points))
    axes = Axes(
        name="Time of a decoding step by K",
        x_name="draft tokens per step (K)",
        y_name="ms per step, including drafting and verification",
        x_prefix="K=",
        decimals=1,
    )
    return _plot(report, f"Time of a whole step, concurrency {concurrency}", curves, axes)


def _methods(report: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["method"] for cell in report["cells"]))


def _plot(report: Mapping[str, Any], subject: str, curves: list[Curve], axes: Axes) -> str:
    label = f"{report['labels'][0].split()[0]}, " if report["labels"] else ""
    heading = f"{label}{subject}, {subject_of(report)}"
    return standalone(line_chart(curves, axes), heading, [name for name, _ in curves])


def subject_of(report: Mapping[str, Any]) -> str:
    """Return the model and the dataset, for the headings of plots."""
    return f"{report['model']}, {report['dataset']['name']}"
