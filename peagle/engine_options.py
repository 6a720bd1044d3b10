"""Resolve a user's engine options into an EngineSpec: model, drafter, K, precision, slots and memory.

Bulk runs and the endpoint share this module, so that equal options mean equal engines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from peagle.catalog.cards import StepTable
from peagle.catalog.drafters import ResolvedDrafter, resolve_drafter
from peagle.catalog.targets import NO_COMMITS, ResolvedModel, precision_for, resolve_model, target_fields
from peagle.economics.baseline import Baseline
from peagle.engine.accelerators import require_usable
from peagle.engine.attention import check_backends
from peagle.engine.keys import (
    TARGET_ENGINE_OPTIONS,
    TargetOptions,
    apply_drafter_options,
    drafter_note,
    spec_fields,
    widest_head_dim,
)
from peagle.engine.memory import Footprint, check_capacity, checkpoint_bytes, footprint_from_config
from peagle.engine.precision import Precision
from peagle.engine.spec import DrafterSpec, EngineSpec, Verify
from peagle.engine.steps import check_slots, max_num_batched_tokens
from peagle.errors import ConfigError
from peagle.hardware import Hardware
from peagle.profiles.baselines import baseline_of_cells, baseline_of_table, break_evens
from peagle.profiles.measurements import NONE
from peagle.profiles.profile import MeasuredCell, Profile, read_profile, with_profile
from peagle.profiles.watch import DrafterWatch
from peagle.provenance import versions

DEFAULT_MAX_NUM_SEQS = {"cpu": 8, "cuda": 256}
MODEL_KEYS = ("profile", "model", "drafter", "num_speculative_tokens", "precision", "kv_cache_precision")
SIZE_KEYS = ("max_num_seqs", *TARGET_ENGINE_OPTIONS, "pipeline_parallel_size", "max_num_batched_tokens")

# Rows, usage and reports of the fake engine must not name a real model.
FAKE_MODEL = ResolvedModel(
    name="fake", path="fake", card=None, fingerprint="fake", config={"max_position_embeddings": 8192, "vocab_size": 256}
)


class EngineOptions(TargetOptions):
    """The engine options of commands that run engines."""

    profile: Path | None = Field(
        None, description="YAML of `peagle tune` with engine options; flags, environment and --config take precedence"
    )
    drafter: str = Field(
        "auto",
        description="auto (the catalog's advice for this concurrency), none, a head of the catalog, a folder "
        "(also s3://) or a Hugging Face id",
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=64,
        description="draft tokens per step (K), a maximum with --verify auto; default: the catalog's value",
    )
    max_num_seqs: int | None = Field(
        None, ge=1, description="concurrent requests of an engine; default: 8 on CPU, 256 on GPU"
    )
    verify: Verify = Field(
        "auto",
        description="auto: verify the drafts that are worth their time at the current load, possibly none (only on"
        " CPUs, and with DSpark if the option is given); all: verify every draft",
    )
    pipeline_parallel_size: int = Field(1, ge=1, description="accelerators that share one engine's layers")
    max_num_batched_tokens: int | None = Field(
        None, ge=1, description="token slots per step; default: from K and max_num_seqs"
    )

    tool_call_parser: str | None = Field(
        None,
        min_length=1,
        description="vLLM's parser for the model's tool calls (hermes, qwen3_coder, ...); "
        "default: requests with tools are refused",
    )
    reasoning_parser: str | None = Field(
        None,
        min_length=1,
        description="vLLM's parser for the model's reasoning; default: reasoning is part of the text",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_profile(cls, values: Any) -> Any:
        return with_profile(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check_drafter_options(self) -> Self:
        if self.drafter != "none":
            return self
        if self.num_speculative_tokens is not None:
            raise ValueError("num_speculative_tokens cannot be used with drafter: none")
        if self.draft_kv_cache_precision != "auto" or self.draft_attention_backend:
            raise ValueError("draft_kv_cache_precision and draft_attention_backend cannot be used with drafter: none")
        if self.draft_lookup == "on":
            raise ValueError("draft_lookup requires a head, so it cannot be used with drafter: none")
        return self


@dataclass(frozen=True, kw_only=True)
class ResolvedEngine:
    """A resolved engine.

    Attributes:
        spec: names models so that any node can resolve them; its precision is never `auto`.
        precision: the number formats on this hardware.
        profile: the profile of `peagle tune` that is used, or None.
    """

    spec: EngineSpec
    precision: Precision
    model: ResolvedModel
    drafter: ResolvedDrafter
    profile: Profile | None = None

    @property
    def follows_profile(self) -> bool:
        """Whether the drafter is the profile's; otherwise the profile's measurements do not apply."""
        drafter = self.spec.drafter
        method_and_k = (drafter.method, drafter.num_speculative_tokens) if drafter else (NONE, 0)
        return self.profile is not None and method_and_k == (self.profile.chosen.method, self.profile.chosen.k)

    def break_even(self, hardware: Hardware) -> dict[int, float]:
        """Return the break-even acceptance lengths by concurrency; empty if unknown.

        They come from the profile that the engine follows, or else from the model card if the drafter is the card's
        head. The result is empty with `verify: auto`, which only verifies drafts that are worth their time.
        """
        if self.spec.drafter is not None and self.spec.drafter.verify == "auto":
            return {}
        if self.follows_profile and (profile := self.profile) is not None:
            return break_evens(profile.chosen, _cells_in_chosen_precision(profile))
        drafter, table = self.spec.drafter, self._step_table(hardware)
        if drafter is None or table is None:
            return {}
        return table.break_even(drafter.method, drafter.num_speculative_tokens)

    def baseline(self, hardware: Hardware) -> Baseline | None:
        """Return step times measured on the same hardware, from the same source as `break_even`, or None."""
        if self.follows_profile and (profile := self.profile) is not None:
            if profile.hardware != hardware.describe():
                return None
            chosen, source = profile.chosen, f"peagle tune, {profile.made_at}"
            cells = _cells_in_chosen_precision(profile)
            return baseline_of_cells(cells, chosen.method, chosen.k, source)
        drafter, table = self.spec.drafter, self._step_table(hardware)
        if table is None or table.hardware != hardware.describe():
            return None
        return baseline_of_table(table, *((drafter.method, drafter.num_speculative_tokens) if drafter else (NONE, 0)))

    def _step_table(self, hardware: Hardware) -> StepTable | None:
        """Return the card's step times, or None if this engine is not compiled or has a head that is not the card's."""
        drafter, card = self.spec.drafter, self.model.card
        if card is None or self.spec.enforce_eager:
            return None
        heads = {str(method): head.id for method, head in card.heads.items()}
        if drafter is not None and self.drafter.name != heads.get(drafter.method):
            return None
        conditions = (hardware.platform, self.precision.describe())
        return next((table for table in card.steps if (table.platform, table.precision) == conditions), None)

    def drafter_watch(self, hardware: Hardware, concurrency: float | None = None) -> DrafterWatch | None:
        """Return the watch that warns if the drafter costs more than it saves; None without a drafter."""
        if self.spec.drafter is None:
            return None
        return DrafterWatch(self.break_even(hardware), concurrency)

    def profile_notes(self, hardware: Hardware) -> list[str]:
        """Return the profile's decision, and how this engine differs from it; empty without a profile."""
        profile = self.profile
        if profile is None:
            return []
        notes = [f"profile: {profile.decision}"]
        if not self.follows_profile:
            notes.append("the drafter differs from the profile's, so the profile's measurements do not apply")
        head = profile.chosen.head_fingerprint if self.follows_profile else None
        measured_and_current = {
            "hardware": (profile.hardware, hardware.describe()),
            "weights": (profile.target.revision, self.model.fingerprint),
            **({"head": (head, self.drafter.fingerprint)} if head else {}),
        } | {name: (profile.versions.get(name), v) for name, v in versions().items() if name.startswith("vllm")}
        differences = [
            f"{name} {measured}, now {current}"
            for name, (measured, current) in measured_and_current.items()
            if measured != current
        ]
        if differences:
            notes.append(
                f"the profile was made with another setup ({'; '.join(differences)}): its speeds might not apply here"
            )
        return notes


def _cells_in_chosen_precision(profile: Profile) -> list[MeasuredCell]:
    """Return the measurements in the precision that the profile chose."""
    return [cell for cell in profile.measurements if cell.precision == profile.chosen.precision]


def resolve_engine(
    options: EngineOptions,
    hardware: Hardware,
    *,
    num_engines_on_node: int,
    num_nodes: int = 1,
    commits: Mapping[str, str] = NO_COMMITS,
    announce: Callable[[str], None],
) -> ResolvedEngine:
    """Resolve an engine, and check that the hardware can hold it.

    Args:
        num_nodes: number of nodes among which the engine's ranks are divided.
        commits: pinned commits by hub id, for a resumed run or an engine that must equal another one.
        announce: called with a message before something slow, such as converting a model.
    """
    require_usable(hardware)
    model = resolve_model(options.model, commits=commits, announce=announce)
    drafter = resolve_drafter(
        options.drafter,
        model,
        options.max_num_seqs or DEFAULT_MAX_NUM_SEQS[hardware.platform],
        num_speculative_tokens=options.num_speculative_tokens,
        platform=hardware.platform,
        commits=commits,
    )
    engine = compose_engine(options, hardware, model, drafter)
    spec = replace(engine.spec, num_nodes=num_nodes)
    check_capacity(spec, hardware, num_engines_on_node=num_engines_on_node, known=footprint_of(model))
    # A model in a Python package keeps its catalog name, because each node converts its own copy.
    is_packaged = model.card is not None and model.card.source.kind == "package"
    return replace(engine, spec=replace(spec, model=options.model if is_packaged else model.path))


def compose_fake_engine(options: EngineOptions, hardware: Hardware) -> ResolvedEngine:
    """Return the fake engine, which has no model. It simulates a drafter if K is set."""
    if options.drafter not in ("auto", "none"):
        raise ConfigError("engine: fake loads no drafter", hint="leave drafter out; set only num_speculative_tokens")
    k = options.num_speculative_tokens
    spec = DrafterSpec(method="peagle", model=FAKE_MODEL.name, num_speculative_tokens=k) if k else None
    name = FAKE_MODEL.name if k else None
    note = "engine: fake; the text is not from a model, and the speed is not a measurement"
    drafter = ResolvedDrafter(spec=spec, name=name, note=note, fingerprint=name)
    return compose_engine(options, hardware, FAKE_MODEL, drafter)


def compose_engine(
    options: EngineOptions, hardware: Hardware, model: ResolvedModel, drafter: ResolvedDrafter
) -> ResolvedEngine:
    """Return the engine of a resolved model and drafter; raises PrecisionError if the hardware cannot run it."""
    if drafter.spec is not None and options.pipeline_parallel_size > 1:
        # A drafter reads hidden states of several layers, but vLLM 0.29 does not pass them from stage to stage.
        raise ConfigError(
            f"drafter {drafter.name} needs hidden states of layers in several stages, but with"
            f" {options.pipeline_parallel_size} pipeline stages vLLM keeps only those of the last stage",
            hint="use --tensor-parallel-size instead, or --drafter none",
        )
    if hardware.platform == "cpu" and options.enforce_eager and options.pipeline_parallel_size > 1:
        # vLLM 0.29 creates the buffers between stages when it compiles; later stages fail without them.
        raise ConfigError(
            f"vLLM cannot run {options.pipeline_parallel_size} pipeline stages on a CPU without compiling",
            hint="leave --enforce-eager out, or use --tensor-parallel-size instead",
        )
    precision = precision_for(options, model, hardware)
    spec = EngineSpec(
        **target_fields(options, model, hardware, precision),
        drafter=apply_drafter_options(drafter.spec, options, hardware) if drafter.spec else None,
        max_num_seqs=options.max_num_seqs or DEFAULT_MAX_NUM_SEQS[hardware.platform],
        pipeline_parallel_size=options.pipeline_parallel_size,
        max_num_batched_tokens=options.max_num_batched_tokens,
        **spec_fields(options),
    )
    check_slots(spec)
    check_backends(spec, hardware, head_dim=widest_head_dim(model.config))
    profile = read_profile(options.profile) if options.profile else None
    drafter = replace(drafter, note=drafter.note + drafter_note(spec.drafter))
    return ResolvedEngine(spec=spec, precision=precision, model=model, drafter=drafter, profile=profile)


ResolvedDefaults = dict[str, tuple[Any, str]]  # option -> (value, source of the value)


def resolve_defaults(
    options: EngineOptions, engine: ResolvedEngine, hardware: Hardware, *, is_for_this_machine: bool
) -> ResolvedDefaults:
    """Return the values of options that the user did not set, from the catalog, the model and the machine.

    `is_for_this_machine` says whether `hardware` was detected here; otherwise it comes from the price table.
    """
    spec, drafter = engine.spec, engine.drafter
    machine = f"{'detected' if is_for_this_machine else 'price table'}: {hardware.describe()}"
    k = spec.drafter.num_speculative_tokens if spec.drafter else None
    values: ResolvedDefaults = {
        "drafter": (drafter.name or NONE, f"catalog: {drafter.note}"),
        "num_speculative_tokens": (k, "the drafter's" if k else "no drafter"),
        "precision": (spec.precision, machine),
        "kv_cache_precision": (engine.precision.kv_cache, machine),
        "max_num_seqs": (spec.max_num_seqs, f"default on {hardware.platform}"),
        "max_model_len": (spec.max_model_len, "the model's own"),
        "max_num_batched_tokens": (max_num_batched_tokens(spec, hardware), "from max_num_seqs and K"),
    }
    return {name: value for name, value in values.items() if getattr(options, name) in (None, "auto")}


def footprint_of(model: ResolvedModel) -> Footprint | None:
    """Return a model's memory footprint. Until it is downloaded, sizes come from S3 or the model card."""
    num_parameters = model.card.architecture.num_parameters if model.card else None
    num_bytes = model.weights_bytes or checkpoint_bytes(num_parameters, model.native_quantization)
    return footprint_from_config(dict(model.config), num_bytes)
