"""What writers that were killed leave in a run directory. It finds; who deletes is `rundir.py`."""

import re
from collections.abc import Iterable, Mapping

from peagle.files import TEMPORARY_SUFFIX
from peagle.storage import Place, is_remote

_LETTERS = re.compile(r"unit-(\d{8,})\.\w+\.jsonl")


def is_temporary(name: str) -> bool:
    """Whether a file is one that its writer has not finished."""
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def temporaries(folders: Iterable[Place]) -> list[Place]:
    """Unfinished files of these folders; in a store there are none, for an object is there as a whole or not at all."""
    local = (folder for folder in folders if not is_remote(folder))
    return [path for folder in local for path in folder.glob(f".*{TEMPORARY_SUFFIX}")]


def orphans(letters: Iterable[Place], named: Mapping[int, str]) -> list[Place]:
    """Files of dead letters that their unit, which is committed, does not name: it never will.

    Those of a unit that is not committed may be named in a moment, by the attempt that wrote them.

    Args:
        named: the file that each committed unit names; empty where it has no dead letters.
    """
    found = ((path, _LETTERS.fullmatch(path.name)) for path in letters)
    return [path for path, match in found if match and named.get(int(match[1]), path.name) != path.name]
