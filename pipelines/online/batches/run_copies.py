"""What a batch's run keeps of prompts and answers beside the files of the API, and how it is deleted with these.

    data/            each request with its answer
    failed/          requests that failed
    suspects/        notes about requests
    export/FORMAT/   answers and errors again; `openai-batch` are the API's own files

What stays of a run are its configuration, its plan, its account and its logs, in which there is no prompt. It knows
names in a run directory, no records.
"""

from peagle.storage import Place, remove

_API = "openai-batch"
_OTHERS = ("parquet", "jsonl")  # of `peagle export`, by hand
_ERRORS = "errors.jsonl"


def forget_prompts(run: Place) -> None:
    """Delete what the run has of its input; the API's files of answers and errors stay."""
    _empty(run / "data")
    _empty(run / "failed")
    _empty(run / "suspects")
    for name in _OTHERS:
        _empty(run / "export" / name)


def forget_answers(run: Place) -> None:
    """Delete what the run has of its output file."""
    _empty(run / "data")
    for name in (_API, *_OTHERS):
        _empty(run / "export" / name, but=_ERRORS)


def forget_errors(run: Place) -> None:
    """Delete what the run has of its error file."""
    _empty(run / "failed")
    for name in (_API, *_OTHERS):
        remove(run / "export" / name / _ERRORS)


def _empty(folder: Place, but: str | None = None) -> None:
    for path in list(folder.glob("*")):
        if path.name != but:
            remove(path)
