"""`peagle completion`: shell completion for commands and options."""

import argparse
from typing import Any

HELP = """\
Print the completion of commands and options for your shell.

  source <(peagle completion bash)                 in ~/.bashrc
  source <(peagle completion zsh)                  in ~/.zshrc
"""
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
_peagle() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} name=${{COMP_WORDS[1]}} both="${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" words=""
    case "$both" in
{two_words}
    esac
    if [ -z "$words" ]; then case "$name" in
{one_word}
    esac; fi
    if [ "$COMP_CWORD" -eq 1 ]; then words="{first_words}"; fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _peagle peagle
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    from jobs.cli import COMMANDS, parser_of

    completions = {command: parser_of(command).options() for command in COMMANDS}
    for command in COMMANDS:  # `serve` is also completed with the second word of `serve keys`
        first, _, second = command.partition(" ")
        if second:
            completions.setdefault(first, []).append(second)
    cases = {command: f'        "{command}") words="{" ".join(words)}" ;;' for command, words in completions.items()}
    script = _SCRIPT.format(
        two_words="\n".join(case for command, case in cases.items() if " " in command),
        one_word="\n".join(case for command, case in cases.items() if " " not in command),
        first_words=" ".join(dict.fromkeys(command.split()[0] for command in COMMANDS)),
    )
    print((_ZSH if args.shell == "zsh" else "") + script, end="")
    return 0, {"script": script}
