"""Text generation with parallel drafters, in bulk and online, priced in tokens per dollar.

`generate`, `serve`, `cost` and `Run` are in `jobs/api.py`, and are imported when they are used.
"""

import importlib

__version__ = "0.1.0"
_API = ("Run", "cost", "generate", "serve")


def __getattr__(name: str) -> object:
    if name in _API:
        return getattr(importlib.import_module("jobs.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_API]
