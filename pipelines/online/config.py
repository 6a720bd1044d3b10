"""The options of the endpoint, the same in YAML and on the command line.

Model options at the top level apply to the single model, or to every entry of `models`.
"""

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from peagle.catalog.targets import name_of
from peagle.economics.price_options import PriceOptions
from peagle.economics.tags import TagOptions
from peagle.engine.arguments import MODALITIES
from peagle.engine.trials import DEFAULT_CPU_S
from peagle.engine_options import FAKE_MODEL, EngineOptions
from peagle.planning.config import parse_duration_s
from peagle.private import user_path
from peagle.requests.bounds import DEFAULT_MAX_ANSWER_MIB
from peagle.runs.scaling import EngineRange
from pipelines.batch.config import NUMBER_OR_RANGE, FakeEngineOptions, FolderOption

ENDPOINT = "endpoint"  # value of batch_engines: use the endpoint's engines


class ServedModelOptions(FakeEngineOptions, EngineOptions):
    name: str | None = Field(
        None,
        min_length=1,
        description="name for clients, without a colon; default: the value of --model, or its last path component if "
        "it is a folder; fake for the fake engine",
    )
    min_replicas: int = Field(1, ge=0, description="engines that are always up; 0 also stops the last idle engine")
    max_replicas: int = Field(1, ge=1, description="maximum number of engines under load")
    target_ongoing_requests: float | None = Field(
        None, gt=0, description="concurrent requests per engine that autoscaling aims for; default: from its slots"
    )
    upscale_delay_s: float = Field(10, ge=0, description="load above the target for this long starts an engine")
    downscale_delay_s: float = Field(300, ge=0, description="load below the target for this long stops an engine")
    max_queued_requests: int | None = Field(
        None,
        ge=0,
        description="maximum number of requests that wait for an engine (0 is treated as 1); others get 503; default: "
        "as many as all engines run concurrently",
    )
    stream_interval_ms: float = Field(
        50,
        ge=0,
        description="a stream's tokens are collected for this long and then sent together; 0: send after each step",
    )
    stream_pieces_per_s: float | None = Field(
        None,
        gt=0,
        description="maximum events a second that all streams of an engine send together; the more streams, the longer "
        "each waits; default: 20 per core on CPUs, since the same cores forward the events; 400 on accelerators",
    )
    max_grammar_s: float = Field(
        DEFAULT_CPU_S,
        gt=0,
        description="CPU time for compiling a new schema, regular expression or grammar of a request, which is refused "
        "if it takes longer",
    )
    drain_s: float = Field(60, ge=0, description="time for running requests to finish when their engine is stopped")
    limit_mm_per_prompt: dict[str, int] = Field(
        default_factory=dict,
        description='media per request by modality, as JSON: {"image": 4}; default: only text',
    )
    allowed_media_domains: list[str] = Field(
        default_factory=list,
        description="host that media may be fetched from, without redirects; default: only data: URLs",
    )

    @property
    def served_name(self) -> str:
        return self.name or (FAKE_MODEL.name if self.engine == "fake" else name_of(self.model))

    @property
    def parser_arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's API server for the configured parsers."""
        tool_arguments = {"enable_auto_tool_choice": True, "tool_call_parser": self.tool_call_parser}
        return (tool_arguments if self.tool_call_parser else {}) | (
            {"reasoning_parser": self.reasoning_parser} if self.reasoning_parser else {}
        )

    @field_validator("limit_mm_per_prompt", mode="before")
    @classmethod
    def _parse_media_limits(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _check_media_limits(cls, value: dict[str, int]) -> dict[str, int]:
        if unknown := sorted(value.keys() - set(MODALITIES)):
            raise ValueError(f"unknown modality {unknown[0]!r}; choose from {', '.join(MODALITIES)}")
        if any(limit < 0 for limit in value.values()):
            raise ValueError("each limit must be at least 0")
        return {name: limit for name, limit in value.items() if limit}

    @field_validator("allowed_media_domains", mode="before")
    @classmethod
    def _parse_domains(cls, value: Any) -> Any:
        return [name.strip().lower() for name in value.split(",")] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _require_media_for_domains(self) -> Self:
        if self.allowed_media_domains and not self.limit_mm_per_prompt:
            raise ValueError(
                "allowed_media_domains requires limit_mm_per_prompt, because without it the model only takes text"
            )
        return self

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) exceeds max_replicas ({self.max_replicas})")
        return self


class ServeConfig(ServedModelOptions, PriceOptions, TagOptions):
    """The configuration of the endpoint. Field descriptions are the help texts; unknown keys are errors."""

    is_behind_sagemaker: ClassVar[bool] = False

    models: tuple[ServedModelOptions, ...] = Field(
        (),
        description="several models: a list of mappings with the model options; model options at the top level apply"
        " to all models",
    )
    host: str = Field("127.0.0.1", description="address to listen on; any other than loopback requires --keys")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    tls_cert: Path | None = Field(None, description="PEM file with the certificate chain, for https")
    tls_key: Path | None = Field(
        None, description="the certificate's private key in PEM, not encrypted, readable only by its owner"
    )
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port of Ray's Prometheus exporter, if this command starts Ray; default: any free port",
    )
    state: Path = Field(Path("runs/serve"), description="folder of the ledger and of the engines' logs")
    log_prompts: bool = Field(
        False, description="write each accepted request, with its prompt, into prompts/ in the --state folder"
    )
    keys: Path | None = Field(None, description="file of API keys, as `peagle serve keys` writes it")
    share_prefix_cache: bool = Field(
        False,
        description="keys share the engines' prefix cache: common prompt prefixes are computed once, but the time and "
        "cached_tokens of an answer can reveal another key's prompts",
    )
    max_body_kib: int = Field(1024, ge=1, description="largest request body in KiB")
    body_timeout_s: float = Field(10, gt=0, description="time for a client to send its request")
    request_timeout_s: float = Field(600, gt=0, description="time for an answer, including the wait for an engine")
    max_output_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum output tokens of a request over all its choices, even if the request sets no limit",
    )
    max_choices: int = Field(128, ge=1, description="maximum choices of a request: n times its number of prompts")
    max_answer_mib: int = Field(
        DEFAULT_MAX_ANSWER_MIB,
        ge=1,
        description="largest answer in MiB of JSON, estimated from its choices, tokens and log-probabilities",
    )
    batches: FolderOption | None = Field(
        None, description="folder of /v1/files and /v1/batches, local or s3://BUCKET/FOLDER; default: no batches"
    )
    batches_at_once: int = Field(1, ge=1, description="batches that have engines at the same time; others wait")
    batch_engines: str = Field(
        "1",
        json_schema_extra=NUMBER_OR_RANGE,
        description="additional engines per batch: N or MIN:MAX, as --engines of a bulk run; or the word endpoint: "
        "batches use idle slots of the endpoint's engines instead",
    )
    max_file_mib: int = Field(200, ge=1, le=4096, description="largest uploaded file in MiB")
    max_stored_mib: int = Field(
        10_240, ge=1, description="MiB of files that a key may store, including outputs of its batches"
    )
    max_stored_files: int = Field(2000, ge=1, description="number of files, and of batches, that a key may store")
    max_unfinished_batches: int = Field(20, ge=1, description="batches of a key that have not ended")
    max_transfers_mib: int = Field(
        256, ge=1, description="MiB of memory for concurrent uploads and downloads; each one takes 2 MiB"
    )
    max_transfers_mib_per_key: int = Field(
        32, ge=1, description="MiB of memory for concurrent uploads and downloads of one key"
    )
    presigned_downloads: bool = Field(
        True,
        description="clients download files on S3 directly from the store, with a URL valid for five minutes; turn it "
        "off if they cannot reach the store",
    )
    heartbeat_s: float = Field(5.0, gt=0, le=300, description="seconds between an engine's entries in the ledger")
    idle_timeout: float | None = Field(
        None,
        gt=0,
        description="stop the endpoint and print its cost after this time without requests: 30m, 2h; default: never",
    )

    @model_validator(mode="before")
    @classmethod
    def _merge_common_options(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("models"), list | tuple):
            return values
        common = {key: value for key, value in values.items() if key in ServedModelOptions.model_fields}
        entries = [common | entry if isinstance(entry, dict) else entry for entry in values["models"]]
        return {**values, "models": entries}

    @field_validator("state", "keys", "tls_cert", "tls_key")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return path and user_path(path)

    @field_validator("batch_engines", mode="before")
    @classmethod
    def _parse_engine_range(cls, value: Any) -> Any:
        return value if value == ENDPOINT else str(EngineRange.parse(str(value)))

    @field_validator("idle_timeout", mode="before")
    @classmethod
    def _parse_idle_timeout(cls, value: Any) -> Any:
        return parse_duration_s(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_idle_timeout(self) -> Self:
        if self.idle_timeout is not None and self.idle_timeout < 2 * self.heartbeat_s:
            raise ValueError(f"idle_timeout must be at least twice heartbeat_s ({self.heartbeat_s:g} s)")
        return self

    @field_validator("models")
    @classmethod
    def _require_unique_names(cls, models: tuple[ServedModelOptions, ...]) -> tuple[ServedModelOptions, ...]:
        names = [model.served_name for model in models]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several models have the name {', '.join(repeated)}: give each one a different name")
        return models

    @model_validator(mode="after")
    def _require_both_tls_files(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            present, missing = ("tls_key", "tls_cert") if self.tls_cert is None else ("tls_cert", "tls_key")
            raise ValueError(f"{present} is set without {missing}, but https needs both")
        return self

    @model_validator(mode="after")
    def _refuse_colons(self) -> Self:
        if invalid_names := [model.served_name for model in self.served if ":" in model.served_name]:
            raise ValueError(
                f"the model name {invalid_names[0]} contains a colon: Ray would read the part after it as the id of "
                "a LoRA adapter; give it a name without a colon (--name, or name in models)"
            )
        return self

    @property
    def uses_idle_slots(self) -> bool:
        """Whether batches use idle slots of the endpoint's engines."""
        return self.batches is not None and self.batch_engines == ENDPOINT

    @property
    def url(self) -> str:
        return f"{'https' if self.tls_cert else 'http'}://{self.host}:{self.port}/v1"

    @property
    def served(self) -> tuple[ServedModelOptions, ...]:
        """The served models: `models`, or the single model from the top-level options."""
        if self.models:
            return self.models
        values = {name: getattr(self, name) for name in ServedModelOptions.model_fields}
        defaults = {name: field.default for name, field in ServedModelOptions.model_fields.items()}
        changed = {name for name, value in values.items() if name in self.model_fields_set or value != defaults[name]}
        return (ServedModelOptions(**{name: values[name] for name in changed}),)
