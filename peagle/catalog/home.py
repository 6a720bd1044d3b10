"""Where peagle keeps what it makes for this user: converted targets and the user's own catalog cards."""

import os
from pathlib import Path


def peagle_home() -> Path:
    """`$PEAGLE_HOME`, `~/.peagle` by default. It need not exist yet."""
    return Path(os.environ.get("PEAGLE_HOME") or "~/.peagle").expanduser()
