"""Where peagle keeps what it makes for this user: converted targets and the user's own catalog cards."""

import os
from pathlib import Path

from peagle.private import user_path


def peagle_home() -> Path:
    """`$PEAGLE_HOME`, `~/.peagle` by default. It need not exist yet.

    Raises:
        ConfigError: this user has no home folder, and no variable names another one.
    """
    return user_path(os.environ.get("PEAGLE_HOME") or "~/.peagle")
