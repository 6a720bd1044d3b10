"""The Python API: `import peagle`, then `peagle.generate`, `peagle.serve`, `peagle.cost` and `peagle.Run`.

Options have the names of the keys in the commands' YAML, and the same defaults, environment variables and errors.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import flags
from peagle.errors import ConfigError, did_you_mean
from peagle.private import restrict_new_files
from peagle.runs.results import Run

if TYPE_CHECKING:
    from pipelines.online.background import Endpoint

__all__ = ["Run", "cost", "generate", "serve"]


def generate(
    input: str | None = None,
    *,
    output: str | None = None,
    model: str | None = None,
    drafter: str | None = None,
    config: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Run:
    """Generate text for every row of a corpus, as `peagle generate` does, and return the finished run.

    An unfinished run in `output` is continued. If this process is already connected to Ray, that connection is used.

    Args:
        input: file, folder or glob; local or `s3://`.
        output: run directory; local or `s3://`.
        model, drafter: as the command's `--model` and `--drafter`.
        config: YAML file with any of the options.
        progress: whether to print progress.
        options: other keys of `peagle generate`, such as `max_tokens=64`.

    Raises:
        PeagleError: for the same reasons as the command. `StoppedEarly` means that the run was interrupted; its hint
            has the command that continues the run.
    """
    from rich.console import Console

    from peagle.runs.progress import RunProgress
    from pipelines.batch.config import GenerateConfig
    from pipelines.batch.request import RunRequest
    from pipelines.batch.run import generate as generate_run

    loaded = _load(
        GenerateConfig, config, {"input": input, "output": output, "model": model, "drafter": drafter, **options}
    )
    restrict_new_files()
    command = ["peagle", "generate", *flags.to_arguments(loaded)]
    generate_run(RunRequest(config=loaded, command=command), RunProgress(Console(quiet=not progress)))
    return Run.open(loaded.output)


@contextlib.contextmanager
def serve(
    model: str | None = None,
    *,
    drafter: str | None = None,
    config: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> "Iterator[Endpoint]":
    """Serve a model through OpenAI's API until the block ends, as `peagle up` does. Yields the endpoint.

    Args:
        model, drafter: as the command's `--model` and `--drafter`.
        config: YAML file with any of the options.
        progress: whether to print the endpoint's output while it starts.
        options: other keys of `peagle serve`, such as `port=8001`. Without a port, a free one is used.

    Raises:
        PeagleError: invalid options, or the endpoint did not start.
    """
    from pipelines.online import background
    from pipelines.online.config import ServeConfig

    loaded = _load(ServeConfig, config, {"model": model, "drafter": drafter, **options})
    restrict_new_files()
    endpoint = background.start_and_wait(loaded, print if progress else lambda _: None)
    try:
        yield endpoint
    finally:
        background.end(endpoint)


def cost(sources: Sequence[str], *, month: str | None = None, by: str = "run") -> dict[str, Any]:
    """Return what runs and endpoints cost, in the format of `peagle cost --format json`.

    Args:
        sources: run directories, `--state` folders of endpoints, or globs of them.
        month: such as 2026-11; None means all time.
        by: comma-separated dimensions, such as `key,model,day`.

    Raises:
        PeagleError: a source is missing or damaged, or an argument is invalid.
    """
    from jobs.cost import days_of
    from peagle.economics.spending import charges
    from peagle.economics.statement import parse_dimensions, statement
    from peagle.runs.ledgers import find_ledgers

    days, found_ledgers = days_of(month, None, None), find_ledgers(sources)
    all_charges = [charge for ledger in found_ledgers.ledgers for charge in charges(ledger, days)]
    return statement(all_charges, parse_dimensions(by), days, found_ledgers.notes)


def _load(config_class: type[flags.Model], config: str | Path | None, options: dict[str, Any]) -> flags.Model:
    """Return a configuration from options, environment and YAML. None values are ignored.

    Raises:
        ConfigError: a key is unknown, or a value is invalid.
    """
    for name in options.keys() - config_class.model_fields.keys():
        raise ConfigError(f"unknown option {name!r}", hint=did_you_mean(name, config_class.model_fields))
    set_options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    set_options = {name: value for name, value in set_options.items() if value is not None}
    return flags.load(config_class, argparse.Namespace(config=None if config is None else Path(config), **set_options))
