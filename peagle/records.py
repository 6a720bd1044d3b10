"""JSON files with a list of records, such as API keys and budgets."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from peagle.errors import ConfigError
from peagle.plain_json import from_json

Record = TypeVar("Record", bound=BaseModel)


def read_list(path: Path, noun: str, *, hint: str) -> list[Any]:
    """Return the unvalidated entries of a file; empty if the file does not exist.

    `noun` names the records in messages, in the plural; `hint` is for a file that is not a JSON list.
    """
    try:
        values = from_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{noun} {path}: cannot be read: {error}") from error
    if not isinstance(values, list):
        raise ConfigError(f"{noun} {path}: must be a JSON list", hint=hint)
    return values


def validate_record(kind: type[Record], values: Any, *, where: str) -> Record:
    """Validate a record. The ConfigError names the field, but not the value, which may be a secret."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first_error = error.errors()[0]
        raise ConfigError(
            f"{where}: {'.'.join(map(str, first_error['loc'])) or 'an entry'}: {first_error['msg']}"
        ) from None
