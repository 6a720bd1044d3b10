"""Run commands and draw what they print as an SVG of a terminal.

    python -m benchmarks.record docs/images/first-run.svg 'peagle generate --input prompts.csv ...' 'peagle show ...'

Each command runs in a shell, in the current folder. The picture needs no font or script from another host.
"""

import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

_WIDTH = 110
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def record(commands: list[str]) -> str:
    """Return the SVG. Raises CalledProcessError if a command fails."""
    console = Console(record=True, width=_WIDTH, force_terminal=True, highlight=False)
    for command in commands:
        console.print(Text(f"$ {command}", style="bold green"))
        completed = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=True)
        console.print(Text(completed.stdout.rstrip()))
    return _FONT_FACE.sub("", console.export_svg(title="peagle"))


def main() -> None:
    path, *commands = sys.argv[1:]
    Path(path).write_text(record(commands), encoding="utf-8")


if __name__ == "__main__":
    main()
