"""The options of a bulk run, the same in YAML and on the command line.

Validation works without a corpus, model or cluster.
"""

import datetime
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    field_validator,
    model_validator,
)

from peagle.economics.price_options import PriceOptions
from peagle.economics.tags import TagOptions
from peagle.engine.fake import FakeTraits
from peagle.engine.response_parser import PARSER_KEYS
from peagle.engine_options import EngineOptions
from peagle.errors import ConfigError
from peagle.private import user_path
from peagle.requests.prompts import PromptOptions
from peagle.requests.sampling import SAMPLING_KEYS, SamplingOptions
from peagle.runs.limits import MIN_ROWS_FOR_SHARE, MaxFailedRows, parse_deadline
from peagle.runs.scaling import EngineRange
from peagle.storage import StoragePath, storage_path
from pipelines.batch.watchdog import ENGINE_TIMEOUT_S

NUMBER_OR_RANGE: dict[str, JsonValue] = {"type": ["string", "integer"]}
"""JSON schema of a number or a range; a validator converts both to text."""
PROMPT_KEYS = tuple(PromptOptions.model_fields)


def _parse_folder(value: Any) -> StoragePath:
    try:
        folder = storage_path(value)
    except ConfigError as error:
        raise ValueError("must be a local folder or s3://BUCKET/FOLDER") from error
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:  # the working directory may have a name that is not UTF-8
        raise ValueError(f"the path {os.fsencode(str(folder))!r} is not UTF-8") from error
    return folder


FolderOption = Annotated[StoragePath, PlainValidator(_parse_folder), PlainSerializer(str)]
"""A local folder or s3://BUCKET/FOLDER."""


class FakeEngineOptions(BaseModel):
    """The choice between vLLM and the fake engine, in runs and endpoints."""

    engine: Literal["vllm", "fake"] = Field(
        "vllm", description="fake is a deterministic engine without a model, for trying a pipeline"
    )
    fake: FakeTraits = Field(FakeTraits(), description='traits of the fake engine, as JSON: {"token_s": 0.03}')

    @field_validator("fake", mode="before")
    @classmethod
    def _parse_traits(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value


class GenerateConfig(FakeEngineOptions, PriceOptions, TagOptions, PromptOptions, SamplingOptions, EngineOptions):
    """One bulk run.

    Field descriptions are the help texts of the flags; unknown keys are errors.
    """

    model_config = ConfigDict(allow_inf_nan=False)  # run.json is JSON, which has no infinity or NaN

    input: str = Field(
        description="corpus: a file, a folder or a glob of Parquet, JSONL, CSV, text or OpenAI batch files, "
        "text formats also as .gz or .zst; local or s3://"
    )
    input_format: Literal["auto", "parquet", "jsonl", "csv", "text", "openai-batch"] = Field(
        "auto", description="format of the corpus; auto: by file suffix, and an OpenAI batch by its columns"
    )
    output: FolderOption = Field(
        description="run directory, local or s3://BUCKET/FOLDER; an existing unfinished run is continued"
    )
    output_format: Literal["auto", "parquet", "jsonl", "openai-batch"] = Field(
        "auto",
        description="parquet: the units in OUTPUT/data are the result; jsonl and openai-batch are also written to "
        "OUTPUT/export when the run is finished; auto is openai-batch for such a corpus, else parquet",
    )
    retry_failed: bool = Field(False, description="retry the rows that are dead letters of this run")
    limit: int | None = Field(None, ge=1, description="use only the first rows of the corpus")
    rows_per_unit: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="rows that are committed together; default: from corpus and concurrency",
    )

    sampling_column: str | None = Field(
        None,
        description="column with each row's own sampling parameters (an object or JSON text), or none for no such "
        "column; default: the column sampling, if it exists",
    )

    engines: str = Field(
        "1",
        json_schema_extra=NUMBER_OR_RANGE,
        description="engine actors: N, or MIN:MAX for as many as fit and have enough work to justify loading",
    )
    nodes_per_engine: int = Field(
        1, ge=1, description="cluster nodes among which the ranks of one engine are divided evenly"
    )
    accelerator_type: str | None = Field(
        None,
        min_length=1,
        description="Ray's name of the accelerator type for the engines (H100, RTX-PRO-6000), or any; an autoscaling "
        "cluster adds machines if it has none; default: use accelerators if the cluster has some now",
    )

    cluster_wait_s: float = Field(
        0, ge=0, description="wait this long for an autoscaled cluster to have room for the engines"
    )
    row_timeout_s: float | None = Field(
        None, gt=0, description="a row that is not finished in this time becomes a dead letter"
    )
    engine_timeout_s: float = Field(
        ENGINE_TIMEOUT_S,
        gt=0,
        description="an engine that has rows but makes no step for this long is killed and replaced",
    )
    grace_s: float = Field(20, ge=0, description="time for running units to be committed when the run is stopped")
    lease_s: float = Field(
        30, ge=1, le=3600, description="a driver without a heartbeat for this long may be replaced by another"
    )
    heartbeat_s: float = Field(5.0, gt=0, le=300, description="seconds between an engine's entries in the ledger")

    budget_usd: float | None = Field(
        None,
        gt=0,
        description="stop before the run costs more, including all attempts, loading and lost work",
    )
    draw_on: Path | None = Field(
        None,
        description="--state folder of an endpoint: the run's cost counts toward the endpoint's budgets for its tags, "
        "and the run stops before a budget is overspent",
    )
    deadline: str | None = Field(
        None,
        description="end by this time: a duration from now (2h30m), a time of day (18:30), an ISO timestamp, or none",
    )
    max_failed_rows: str | None = Field(
        None,
        description=f"N or P%: stop with an error when more rows are dead letters; P% applies once "
        f"{MIN_ROWS_FOR_SHARE} rows are done",
    )

    @model_validator(mode="after")
    def _require_fake_engine_for_traits(self) -> "GenerateConfig":
        if self.engine != "fake" and self.fake != FakeTraits():
            raise ValueError("`fake` options require `engine: fake`")
        return self

    @model_validator(mode="after")
    def _check_parsers(self) -> "GenerateConfig":
        for key in PARSER_KEYS:
            if getattr(self, key) is not None and self.engine == "fake":
                raise ValueError(f"{key} cannot be used with engine: fake, because its text has no structure to parse")
            if getattr(self, key) is not None and self.n > 1:
                raise ValueError(f"{key} cannot be used with n: {self.n}, since one response is parsed per row")
        return self

    @model_validator(mode="after")
    def _require_tags_for_draw_on(self) -> "GenerateConfig":
        if self.draw_on is not None and not self.tags:
            raise ValueError("draw_on requires tags, since the run draws on the budgets of its tags")
        return self

    @model_validator(mode="after")
    def _check_nodes_per_engine(self) -> "GenerateConfig":
        num_nodes, num_ranks = self.nodes_per_engine, self.accelerators_per_engine
        if num_ranks % num_nodes:
            raise ValueError(
                f"nodes_per_engine {num_nodes} does not divide the number of ranks of an engine,"
                f" tensor_parallel_size x pipeline_parallel_size = {num_ranks}"
            )
        if num_nodes > 1 and self.engine == "fake":
            raise ValueError("nodes_per_engine cannot be used with engine: fake, which has no ranks")
        if num_nodes > 1 and self.engine_range.fixed is None:
            raise ValueError(
                f"engines {self.engines} with nodes_per_engine {num_nodes}: use a fixed number, since an engine that is"
                " added later could take the resources of other engines' ranks"
            )
        return self

    @field_validator("engines", mode="before")
    @classmethod
    def _parse_engines(cls, value: Any) -> Any:
        return str(EngineRange.parse(str(value)))

    @field_validator("deadline", mode="before")
    @classmethod
    def _check_deadline(cls, value: Any) -> Any:
        if isinstance(value, datetime.datetime):  # YAML parses timestamps
            value = value.isoformat()
        if value is not None:
            if not isinstance(value, str):  # YAML reads 18:30 as a number in base 60
                raise ValueError("quote the deadline in YAML")
            parse_deadline(value, datetime.datetime.now())
        return value

    @field_validator("max_failed_rows", mode="before")
    @classmethod
    def _parse_max_failed_rows(cls, value: Any) -> Any:
        return None if value is None else str(MaxFailedRows.parse(str(value)))

    @field_validator("json_schema", mode="before")
    @classmethod
    def _read_schema_file(cls, value: Any) -> Any:
        """Replace the path of a file with its content, so that run.json has the content."""
        if not isinstance(value, str) or value.lstrip().startswith("{"):
            return value
        try:
            return user_path(value).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the schema cannot be read ({error})") from error

    @property
    def max_engines(self) -> int:
        """Maximum number of concurrent engines."""
        return self.engine_range.largest

    @property
    def engine_range(self) -> EngineRange:
        """The minimum and maximum number of engines."""
        return EngineRange.parse(self.engines)

    @property
    def accelerators_per_engine(self) -> int:
        """The number of accelerators of one engine, or of its ranks on CPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def sampling(self) -> dict[str, object]:
        """The sampling parameters, as in the fingerprint and the report."""
        return {key: getattr(self, key) for key in SAMPLING_KEYS}
