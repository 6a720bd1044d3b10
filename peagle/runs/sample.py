"""A sample of a corpus: tokens of its prompts, and how many its answers may have.

Rows are read, templated and tokenised here; nothing is written.
"""

from dataclasses import dataclass, replace

from peagle.runs.plan import Plan, WorkUnit
from peagle.runs.prepare import PrepareJob, prepare_unit
from peagle.runs.rows import PreparedUnit

_MOST_ROWS = 200
_MOST_UNITS = 20  # the file of each is opened, and a compressed one read from its beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The sampled rows, and what follows for all of them.

    Attributes:
        num_rows: rows of the corpus.
        num_sampled: rows that were prepared.
        num_failed: sampled rows that would be dead letters.
        prompt_tokens: of all rows, by the mean of the sampled ones.
        most_output_tokens: likewise, where every answer is as long as it may be.
        example: the message of a dead letter; empty where there is none.
    """

    num_rows: int
    num_sampled: int
    num_failed: int
    prompt_tokens: float
    most_output_tokens: float
    example: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every row was prepared."""
        return self.num_sampled == self.num_rows


def sample(plan: Plan, job: PrepareJob) -> Sample:
    """Prepare the first rows of some units, spread evenly over the corpus.

    Raises:
        InputError: a file of the corpus cannot be read.
    """
    units = [unit for unit in plan.units if unit.supersedes is None]
    if plan.num_rows > _MOST_ROWS:
        units = units[:: -(-len(units) // _MOST_UNITS)]
        each = -(-_MOST_ROWS // len(units))
        units = [_beginning(unit, each) for unit in units]
    prepared = [PreparedUnit(prepare_unit(unit, job)) for unit in units]
    pairs = [pair for one in prepared for pair in zip(one.prompts, one.sampling, strict=True)]
    answered = [(len(prompt), {**job.sampling.base, **own}) for prompt, own in pairs if prompt is not None]
    letters = [letter for one in prepared for letter in one.dead_letters.values()]
    factor = plan.num_rows / len(pairs)
    return Sample(
        num_rows=plan.num_rows,
        num_sampled=len(pairs),
        num_failed=len(letters),
        prompt_tokens=factor * sum(num_tokens for num_tokens, _ in answered),
        most_output_tokens=factor * sum(own["max_tokens"] * own["n"] for _, own in answered),
        example=letters[0]["message"] if letters else "",
    )


def _beginning(unit: WorkUnit, num_rows: int) -> WorkUnit:
    return replace(unit, rows=tuple(range(min(num_rows, unit.num_rows))))
