import json
import subprocess
import sys

import pytest

from jobs import cli
from jobs.output import say
from peagle.quiet import QuietStderr

HEAVY_MODULES = ("torch", "vllm", "ray", "transformers", "pyarrow")


@pytest.mark.parametrize(
    "code",
    [
        "import peagle; assert 'pydantic' not in sys.modules",
        "import peagle.engine, peagle.catalog, peagle.hardware, peagle.economics.account, peagle.speculation",
        "from jobs import cli; cli.format_help()",
        "from jobs import cli; cli.parser_of('generate').format_group('')",
        "from jobs import cli; cli.parser_of('evaluate').format_group('all')",
    ],
)
def test_help_and_imports_load_no_heavy_modules(code):
    check = f"import sys; {code}; print([m for m in {HEAVY_MODULES!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_short_help_is_short_and_full_help_is_complete(command, capsys):
    with pytest.raises(SystemExit) as error:
        cli.run([*command.split(), "--help"])
    assert error.value.code == 0
    short_help = capsys.readouterr().out
    assert len(short_help.splitlines()) <= 40
    assert "exit codes" in short_help
    with pytest.raises(SystemExit):
        cli.run([*command.split(), "--help=all"])
    full_help = capsys.readouterr().out
    for option in ["--json", *cli.parser_of(command).options()]:
        assert f"{option} " in full_help or f"{option}\n" in full_help or f"{option}," in full_help


def test_help_can_be_limited_to_an_option_group(capsys):
    with pytest.raises(SystemExit):
        cli.run(["generate", "--help=sampling"])
    text = capsys.readouterr().out
    assert "--top-k" in text
    assert "--budget-usd" not in text
    with pytest.raises(SystemExit) as error:
        cli.run(["generate", "--help=samplign"])
    assert error.value.code == 2
    assert "--help=samplign: unknown group; choose from all," in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in cli.COMMANDS)


@pytest.mark.parametrize("command", ["audit", "bench", "evaluate", "generate", "serve", "train", "tune"])
def test_command_modules_can_be_run(command):
    """This is needed by `ray job submit -- python -m jobs.bench`. Without a main, a module would exit with 0."""
    result = subprocess.run(
        [sys.executable, "-m", f"jobs.{command}", "--nosuch"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, "--nosuch" in result.stderr or "required" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["generat"], "did you mean generate?"),
        (["serve-keys", "list"], "did you mean serve keys?"),
        (["deploy", "runs"], "choose deploy sagemaker or deploy kuberay or deploy cluster"),
        (["qqqqqqqq"], "see peagle --help"),
        ([], "usage: peagle COMMAND"),
        (["--nosuch"], "usage: peagle COMMAND"),
    ],
)
def test_unknown_command_has_a_hint(argv, hint, capsys):
    assert cli.run(argv) == 2
    assert hint in capsys.readouterr().err


def test_unknown_flag_has_a_suggestion(capsys):
    with pytest.raises(SystemExit) as error:
        cli.run(["serve", "keys", "list", "--requests-per-mn", "1"])
    assert error.value.code == 2
    assert (
        "peagle serve keys: error: unknown argument --requests-per-mn: did you mean --requests-per-min?"
        in capsys.readouterr().err
    )


def test_error_is_on_stderr_and_in_json(tmp_path, capsys):
    result = tmp_path / "sub" / "result.json"
    assert (
        cli.run(["generate", "--input", "nothing.jsonl", "--output", str(tmp_path / "r"), "--json", str(result)]) == 2
    )
    assert "nothing.jsonl" in capsys.readouterr().err
    assert json.loads(result.read_text())["error"] == "InputError"
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("model", [[], ["no-such-model"]], ids=["command succeeds", "command fails"])
def test_unwritable_json_file_is_an_error(tmp_path, capsys, model):
    (tmp_path / "file").write_text("")
    argv = ["models", *model, "--json", str(tmp_path / "file" / "result.json")]
    assert cli.run(argv) == 1
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("peagle models: ")
    assert "result.json" in last_line or "file" in last_line


def test_os_error_is_printed_without_traceback(monkeypatch, capsys):
    def run(_):
        raise PermissionError(13, "Permission denied", "runs/a/report.html")

    monkeypatch.setattr("jobs.models.run", run)
    assert cli.run(["models"]) == 1
    assert capsys.readouterr().err == "peagle models: [Errno 13] Permission denied: 'runs/a/report.html'\n"


def test_json_on_standard_output_moves_text_to_standard_error(monkeypatch, capfd, tmp_path):
    def run(_):
        with QuietStderr() as quiet:
            quiet.move_to(tmp_path / "engine.log")
            say("2 of 4 responses")
        say("the table")
        return 0, {"cells": 4}

    monkeypatch.setattr("jobs.models.run", run)
    assert cli.run(["models", "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {"cells": 4}
    assert printed.err == "2 of 4 responses\nthe table\n"
    assert cli.run(["models", "--json", str(tmp_path / "result.json")]) == 0
    assert capfd.readouterr().out == "2 of 4 responses\nthe table\n"
