"""A profile: the result of `peagle tune` as a YAML file, for `peagle generate` and `peagle serve` with `--profile`.

    engine          options of both commands; flags, environment and --config take precedence
    tuned           concurrency and acceptance length
    measurements    the measured cells, best first
    decision, objective, target, hardware, versions, made_at

Users may edit the file, so it is validated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from peagle.catalog.cards import absolute_model_name
from peagle.engine.keys import TARGET_ENGINE_OPTIONS
from peagle.errors import ConfigError, did_you_mean
from peagle.files import converted_write_errors, write_atomic
from peagle.private import user_path
from peagle.profiles.measurements import Cell, describe_invalid

ENGINE_KEYS = (
    *("model", "drafter", "num_speculative_tokens", "precision", "kv_cache_precision"),
    *("max_num_seqs", "max_num_batched_tokens"),
    *TARGET_ENGINE_OPTIONS,
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MeasuredCell(Cell):
    """A cell with more of its configuration. Older profiles have no `head_fingerprint`."""

    precision: str = "auto"
    max_num_batched_tokens: int | None = None
    drafter: str = "none"
    head_fingerprint: str | None = None


class Tuned(BaseModel):
    """The concurrency that was chosen. Ranges in profiles of earlier versions are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    concurrency: int
    acceptance_length: float | None


class TunedTarget(_Strict):
    name: str
    revision: str


class Profile(_Strict):
    peagle_profile: Literal[1]
    decision: str
    objective: dict[str, Any]
    engine: dict[str, Any]
    tuned: Tuned
    target: TunedTarget
    hardware: str
    versions: dict[str, str]
    dataset: dict[str, Any]
    price: dict[str, Any] | None
    made_at: str
    engine_minutes: float
    notes: list[str] = []
    measurements: list[MeasuredCell] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for key in self.engine:
            if key not in ENGINE_KEYS:
                raise ValueError(f"engine has the unknown key {key!r} ({did_you_mean(key, ENGINE_KEYS)})")
        if missing := [key for key in ("model", "drafter", "max_num_seqs") if key not in self.engine]:
            raise ValueError(f"engine must have {', '.join(missing)}")
        if not any(self._is_chosen(cell) for cell in self.measurements):
            raise ValueError("there is no measurement of the chosen engine")
        return self

    @property
    def chosen(self) -> MeasuredCell:
        return next(cell for cell in self.measurements if self._is_chosen(cell))

    def _is_chosen(self, cell: MeasuredCell) -> bool:
        engine = self.engine
        k, precision = engine.get("num_speculative_tokens") or 0, engine.get("precision", "auto")
        chosen = (engine["drafter"], k, precision, self.tuned.concurrency, engine.get("max_num_batched_tokens"))
        return chosen == (cell.drafter, cell.k, cell.precision, cell.concurrency, cell.max_num_batched_tokens)


def read_profile(path: Path) -> Profile:
    hint = "`peagle tune` writes profiles"
    try:
        data = yaml.safe_load(user_path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}", hint=hint) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {path}: not valid YAML: {error}", hint=hint) from error
    if not isinstance(data, Mapping) or "peagle_profile" not in data:
        raise ConfigError(
            f"profile {path}: not a profile: peagle_profile is missing",
            hint=f"{hint}; use --config for a file of your own options",
        )
    try:
        return Profile(**data)
    except ValidationError as error:
        raise ConfigError(f"profile {path}: {describe_invalid(error)}", hint=hint) from None


def write_profile(path: Path, profile: Profile) -> None:
    header = f"# {profile.decision}\n# peagle generate --profile {path.name} ..., peagle serve --profile {path.name}\n"
    text = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    path = user_path(path)
    with converted_write_errors(path, hint="set --profile-output to another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (header + text).encode())


def with_profile(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command, completed from its profile.

    If the user sets the drafter or K, neither comes from the profile. The same applies to `max_num_seqs` and
    `max_num_batched_tokens`.
    """
    path = values.get("profile")
    if path is None:
        return dict(values)
    profile = read_profile(Path(path))
    model = values.get("model", profile.engine["model"])
    if absolute_model_name(str(model)) != absolute_model_name(profile.engine["model"]):
        raise ConfigError(
            f"profile {path} is for {profile.engine['model']}, but the model is {model}",
            hint=f"run peagle tune --model {model}, or leave --model out",
        )
    user_values = {key: value for key, value in values.items() if value is not None}
    completed = {key: value for key, value in profile.engine.items() if value is not None}
    for pair in ({"drafter", "num_speculative_tokens"}, {"max_num_seqs", "max_num_batched_tokens"}):
        if pair & user_values.keys():
            completed = {key: value for key, value in completed.items() if key not in pair}
    return completed | user_values
