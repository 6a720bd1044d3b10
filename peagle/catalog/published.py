"""Published speeds and settings on a model's card."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Method = Literal["peagle", "eagle3", "none"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Deployment(Strict):
    """A published deployment of a head.

    Attributes:
        where: the service or document.
        instance_type: in that service's terms.
        source: title, date and URL.
    """

    where: str
    instance_type: str
    num_speculative_tokens: int = Field(gt=0)
    source: str


class PublishedSpeeds(Strict):
    """Output tokens/s of one method and K.

    Attributes:
        num_speculative_tokens: K; 0 with "none".
        output_tokens_per_s: one value per concurrency of the table.
    """

    method: Method
    num_speculative_tokens: int = Field(ge=0)
    output_tokens_per_s: list[float] = Field(min_length=1)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if (self.method == "none") != (self.num_speculative_tokens == 0):
            raise ValueError("num_speculative_tokens is 0 exactly with method none")
        if min(self.output_tokens_per_s) <= 0:
            raise ValueError("output_tokens_per_s must be positive")
        return self


class PublishedTable(Strict):
    """Published output tokens/s of an engine by method, K and concurrency.

    Attributes:
        dataset: the prompts.
        accelerator: name in the price table.
        precision: of the target, a value of `--precision`.
        concurrency: the columns, ascending.
        speeds: the rows.
        source: title and date of the publication.
    """

    dataset: str
    accelerator: str
    num_accelerators: int = Field(gt=0)
    precision: Literal["bf16", "fp8"]
    concurrency: list[int] = Field(min_length=1)
    speeds: list[PublishedSpeeds] = Field(min_length=1)
    source: str
    url: str

    @model_validator(mode="after")
    def _is_a_table(self) -> Self:
        if self.concurrency != sorted(set(self.concurrency)) or self.concurrency[0] < 1:
            raise ValueError("concurrency must ascend from 1 or more")
        if any(len(row.output_tokens_per_s) != len(self.concurrency) for row in self.speeds):
            raise ValueError("output_tokens_per_s must have a value per concurrency")
        if len({(row.method, row.num_speculative_tokens) for row in self.speeds}) < len(self.speeds):
            raise ValueError("speeds must have each method and K once")
        return self

    @property
    def label(self) -> str:
        """The label of every figure: "published, one B200"."""
        count = "one" if self.num_accelerators == 1 else str(self.num_accelerators)
        return f"published, {count} {self.accelerator}"

    def best(self, method: Method) -> list[PublishedSpeeds]:
        """Return a method's fastest row at each concurrency; empty if the table does not have the method."""
        rows = [row for row in self.speeds if row.method == method]
        columns = range(len(self.concurrency) if rows else 0)
        return [max(rows, key=lambda row: row.output_tokens_per_s[column]) for column in columns]

    def gains(self, method: Method, *, over: Method) -> list[float]:
        """Return the ratio of the best speeds of two methods by concurrency; empty if one is missing."""
        pairs = zip(self.best(method), self.best(over), strict=False)  # either may be empty
        return [one.output_tokens_per_s[i] / other.output_tokens_per_s[i] for i, (one, other) in enumerate(pairs)]
