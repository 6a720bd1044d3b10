"""Evaluate drafters: a benchmark that runs all prompts once per drafter and K, and reports acceptance by category."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.bench.config import EvaluateConfig, as_benchmark
from peagle.bench.engine import MeasurementListener, StartEngine
from peagle.bench.folder import SCHEMA
from peagle.bench.loop import TokenizerOf
from peagle.bench.plan import BenchPlan, Pass, Setup, make_setup, require_capacity, target_spec
from peagle.bench.prompts import Dataset
from peagle.bench.record import PassRecord, acceptance, source_notes
from peagle.bench.report import POSITION_NOTE, acceptance_figures, conditions, positions_of, subject_of
from peagle.bench.run import Bench
from peagle.catalog.drafters import ResolvedDrafter, resolve_drafter
from peagle.catalog.targets import ResolvedModel
from peagle.charts import MAX_SERIES, Axes, line_chart, standalone
from peagle.economics.report.plots import Rates, acceptance_svg
from peagle.engine.keys import apply_drafter_options, drafter_note
from peagle.engine.spec import DRAFT_METHODS, EngineSpec, spec_precision
from peagle.engine.vllm import start_engine
from peagle.errors import ConfigError, DrafterError, EngineError
from peagle.hardware import Hardware
from peagle.requests.tokenizer import load_tokenizer
from peagle.tables import aligned, markdown


def evaluate(
    config: EvaluateConfig,
    listener: MeasurementListener,
    *,
    start: StartEngine = start_engine,
    tokenizer_of: TokenizerOf = load_tokenizer,
) -> tuple[dict[str, Any], Path]:
    return Evaluation.prepare(config, listener, start, tokenizer_of).run()


class Evaluation(Bench):
    name = "evaluation"
    parent = Path("runs/evaluate")
    pass_noun = "cells"

    @staticmethod
    def make_plan(config: EvaluateConfig, hardware: Hardware, model: ResolvedModel) -> BenchPlan:
        drafters = [_resolve_drafter(name, config, hardware, model) for name in config.drafter]
        spec = target_spec(config, model, hardware, max_num_seqs=config.concurrency)
        setups: list[Setup] = []
        for label, drafter in zip(_unique_labels(drafters), drafters, strict=True):
            setups += _make_setups(label, drafter, spec, config, hardware)
        precision = spec_precision(spec, hardware)
        require_capacity(setups, model, hardware)
        return BenchPlan(
            config=as_benchmark(config, concurrency=[config.concurrency], repeats=1, rounds=1),
            hardware=hardware,
            model=model,
            spec=spec,
            precision=precision,
            setups=setups,
            price=None,
            notes=[f"{drafter.name}: {drafter.note}{drafter_note(setups[0].drafter)}" for drafter in drafters],
            command_settings={"precision": precision.describe(), "concurrency": config.concurrency},
            category_column=config.category_column,
        )

    def num_warm_up(self, planned: Pass) -> int:
        return 1

    @classmethod
    def check_dataset(cls, plan: BenchPlan, dataset: Dataset) -> None:
        """Allow any number of prompts, since acceptance does not depend on concurrency."""

    def caveats(self) -> list[str]:
        return []  # a benchmark's caveats are about speeds

    def add_pass(self, planned: Pass, record: PassRecord) -> None:
        if not record.speculation.num_drafts:
            raise EngineError(
                "the engine produced no drafts",
                hint="responses of a single token have no drafts; increase --max-tokens",
            )
        super().add_pass(planned, record)

    def figures(self, planned: Pass, record: PassRecord) -> str:
        length = f"acceptance length {record.speculation.acceptance_length:.2f}"
        return f"{planned.setup.label}: {length}, {record.output_tokens_per_s:.1f} output tokens/s"

    def report(self, done: dict[Pass, PassRecord], failed: dict[str, str]) -> dict[str, Any]:
        fingerprint = self.plan.fingerprint(self.dataset)
        categories = {prompt.category for prompt in self.dataset.prompts} - {None}
        all_have_categories = all(record.by_category for record in done.values())
        num_remaining = len(self.plan.passes) - len(done) - len(failed)
        return {
            "schema": SCHEMA,
            "model": self.plan.model.name,
            "hardware": fingerprint["hardware"],
            "versions": fingerprint["versions"],
            "precision": fingerprint["precision"],
            "compiled": not self.plan.spec.enforce_eager,
            "concurrency": fingerprint["concurrency"],
            "sampling": fingerprint["sampling"],
            "dataset": {
                "name": self.dataset.name,
                "num_prompts": len(self.dataset.prompts),
                "rejected": self.dataset.rejected,
            },
            "fingerprint": fingerprint,
            "cells": [make_cell(planned.setup, record) for planned, record in done.items()],
            "failed": dict(failed),
            "notes": [
                *(
                    ["This vLLM counts drafts per engine, not per request, so acceptance by category is unknown."]
                    if categories and not all_have_categories
                    else []
                ),
                *source_notes((planned.setup.label, record) for planned, record in done.items()),
                *(f"Not measured: {name}, because its engine failed: {message}" for name, message in failed.items()),
                *([f"Not finished: {num_remaining} of {len(self.plan.passes)} cells remain."] if num_remaining else []),
            ],
        }

    def pages(self, report: dict[str, Any]) -> dict[str, str]:
        return {
            "report.md": markdown_report(report),
            "acceptance-length.svg": length_plot(report),
            "acceptance-by-position.svg": position_plot(report),
        }


def make_cell(setup: Setup, record: PassRecord) -> dict[str, Any]:
    stats = record.speculation
    return {
        "drafter": setup.head,
        "method": setup.method,
        "fingerprint": setup.fingerprint,
        "k": setup.k,
        "start_s": record.start_s,
        "wall_s": record.wall_s,
        "num_responses": len(record.requests),
        "num_refused": record.num_refused,
        "num_output_tokens": record.num_output_tokens,
        "measured_at": record.measured_at,
        "self_check": record.self_check,
        "drafted_tokens_per_s": stats.num_draft_tokens / record.wall_s,
        "accepted_tokens_per_s": stats.num_accepted_tokens / record.wall_s,
        "output_tokens_per_s": record.output_tokens_per_s,
        **acceptance([stats]),
        "by_category": {
            name: {
                "num_responses": category.num_responses,
                "num_output_tokens": category.num_output_tokens,
                **acceptance([category.speculation]),
            }
            for name, category in record.by_category.items()
        },
    }


def _resolve_drafter(name: str, config: EvaluateConfig, hardware: Hardware, model: ResolvedModel) -> ResolvedDrafter:
    max_k = max(config.num_speculative_tokens) if config.num_speculative_tokens else None
    drafter = resolve_drafter(name, model, config.concurrency, num_speculative_tokens=max_k, platform=hardware.platform)
    if drafter.spec is None:
        hint = f"use {', '.join(DRAFT_METHODS)}, a folder or a hub id"
        raise DrafterError(f"drafter {name} resolves to no drafter: {drafter.note}", hint=hint)
    return drafter


def _make_setups(
    label: str, drafter: ResolvedDrafter, spec: EngineSpec, config: EvaluateConfig, hardware: Hardware
) -> list[Setup]:
    assert drafter.spec is not None, "_resolve_drafter() rejects `none`"
    assert drafter.fingerprint is not None, "every head has a fingerprint"
    return [
        make_setup(
            spec,
            replace(apply_drafter_options(drafter.spec, config, hardware), num_speculative_tokens=k),
            label=f"{label} K={k}",
            head=label,
            fingerprint=drafter.fingerprint,
        )
        for k in config.num_speculative_tokens or [drafter.spec.num_speculative_tokens]
    ]


def _unique_labels(drafters: Sequence[ResolvedDrafter]) -> list[str]:
    """Return the drafters' names, with enough of their paths to make them unique."""
    fingerprints = [drafter.fingerprint for drafter in drafters]
    paths = [Path(drafter.spec.model).parts for drafter in drafters if drafter.spec]
    for i, drafter in enumerate(drafters):
        if drafter.fingerprint in fingerprints[:i]:
            raise ConfigError(
                f"drafter {drafter.name} is listed twice, possibly under different names", hint="list each head once"
            )
    names = labels = [drafter.name or "" for drafter in drafters]
    depth = 1
    while len(set(labels)) < len(labels) and depth < max(map(len, paths)):
        depth += 1
        labels = ["/".join(p[-depth:]) if names.count(n) > 1 else n for p, n in zip(paths, names, strict=True)]
    return labels


_COLUMNS = ("drafter", "K", "acceptance length", "drafts")
_SPEEDS = {
    "drafted_tokens_per_s": "drafted/s",
    "accepted_tokens_per_s": "accepted/s",
    "output_tokens_per_s": "output/s",
}


def text_report(report: Mapping[str, Any]) -> str:
    lines = [_conditions(report), "", *aligned(_cell_rows(report))]
    if category_rows := _category_rows(report):
        lines += ["", *aligned(category_rows)]
    return "\n".join([*lines, *(f"! {note}" for note in report["notes"])])


def markdown_report(report: Mapping[str, Any]) -> str:
    parts = [f"Measured: {_conditions(report)}.", "", *markdown(_cell_rows(report))]
    parts += ["", f"{POSITION_NOTE} Speeds are tokens per second."]
    if category_rows := _category_rows(report):
        parts += ["", *markdown(category_rows)]
    return "\n".join([*parts, *(f"\n{note}" for note in report["notes"])]) + "\n"


def _conditions(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return conditions(
        report,
        load=[f"concurrency {report['concurrency']}"],
        versions=[versions] if versions else [],
        hardware=report["hardware"],
        dates=[cell["measured_at"] for cell in report["cells"]],
    )


def _cell_rows(report: Mapping[str, Any]) -> list[list[str]]:
    positions = positions_of(report["cells"])
    rows = [[*_COLUMNS, *positions, *_SPEEDS.values()]]
    for cell in report["cells"]:
        speeds = [f"{cell[name]:,.1f}" for name in _SPEEDS]
        rows.append([cell["drafter"], str(cell["k"]), *acceptance_figures(cell, positions), *speeds])
    return rows


def _category_rows(report: Mapping[str, Any]) -> list[list[str]]:
    cells = [cell for cell in report["cells"] if cell["by_category"]]
    if not cells:
        return []
    positions = positions_of(cells)
    rows = [["category", *_COLUMNS, "responses", *positions]]
    for name in sorted({name for cell in cells for name in cell["by_category"]}):
        for cell in cells:
            if category := cell["by_category"].get(name):
                length, drafts, *rates = acceptance_figures(category, positions)
                responses = f"{category['num_responses']:,}"
                rows.append([name, cell["drafter"], str(cell["k"]), length, drafts, responses, *rates])
    return rows


def length_plot(report: Mapping[str, Any]) -> str:
    """Plot acceptance length over K, with a line per drafter."""
    curves = {
        label: [(cell["k"], cell["acceptance_length"]) for cell in cells]
        for label, cells in _by_drafter(report).items()
    }
    axes = Axes(
        name="Acceptance length by K",
        x_name="draft tokens per step (K)",
        y_name="tokens per verification step",
        x_prefix="K=",
        y_start=1.0,  # the length without accepted drafts
    )
    chart = line_chart(list(curves.items()), axes)
    return standalone(chart, f"Acceptance length, {subject_of(report)}", list(curves))


def position_plot(report: Mapping[str, Any]) -> str:
    """Plot acceptance by position in the draft, each drafter at its largest K."""
    largest_k_cells = {label: cells[-1] for label, cells in _by_drafter(report).items()}
    labels = [f"{label}, K={cell['k']}" for label, cell in largest_k_cells.items()]
    rates = [
        Rates(label=label, rates=cell["acceptance_rates"], series=series)
        for series, (label, cell) in enumerate(zip(labels, largest_k_cells.values(), strict=True))
    ]
    return standalone(acceptance_svg(rates), f"Acceptance by position, {subject_of(report)}", labels)


def _by_drafter(report: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Group cells by drafter, K ascending, for at most as many drafters as there are distinguishable colours."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        groups.setdefault(cell["drafter"], []).append(cell)
    shown_groups = list(groups.items())[:MAX_SERIES]
    return {label: sorted(cells, key=lambda cell: cell["k"]) for label, cells in shown_groups}
