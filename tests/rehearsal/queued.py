"""Rehearse the commands of benchmarks/GPU_QUEUE.md: the engines and training runs that the commands start.

The page's code blocks run in bash, with `python3` replaced by a function that records its arguments. The scripts that
they would start then list their benchmarks, training runs and commands. Their engines are rehearsed like those of
`tests/rehearsal/cell.py`, and training runs are checked as far as possible without the card.
"""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import shapes as qwen
from peagle.hardware import Hardware
from tests.rehearsal.shapes import write_json, write_tokenizer

_ROOT = Path(__file__).parents[2]
QUEUE = _ROOT / "benchmarks" / "GPU_QUEUE.md"
SCRIPTS = _ROOT / "benchmarks" / "gpu"
_RECORD_PYTHON = """
set -e
python3() { printf '%q ' "$@" >> "$CALLS"; echo >> "$CALLS"; }
"""


def queued_commands(folder: Path) -> list[list[str]]:
    """Return the arguments after `python3` of every command of the queue, in the page's order.

    Raises:
        CalledProcessError: bash cannot parse a block.
    """
    calls_file = folder / "calls"
    calls_file.touch()
    blocks = re.findall(r"^```\n(.*?)^```", QUEUE.read_text(), re.MULTILINE | re.DOTALL)
    script = _RECORD_PYTHON + "\n".join(blocks)
    environment = os.environ | {"CALLS": str(calls_file)}
    subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return [shlex.split(line) for line in calls_file.read_text().splitlines()]


def rehearse_queue(hardware: Hardware, folder: Path) -> list[dict[str, Any]]:
    """Rehearse every engine of the queue's commands on a card; return the cells with their outcomes."""
    one_card = replace(hardware, num_accelerators=1)
    commands = queued_commands(folder)  # before writing folders, because a block may skip existing results
    _write_folders(folder)
    os.chdir(folder)
    return [cell for command in commands for cell in _rehearse(command, one_card)]


def _write_folders(folder: Path) -> None:
    """Write the files that the commands need: links to the repository, and models without weights."""
    for name in ("peagle", "benchmarks"):
        (folder / name).symlink_to(_ROOT / name)
    shapes, target = folder / "runs" / "shapes", qwen.target_config(tiny=False)
    write_json(shapes / "target", target)
    write_tokenizer(shapes / "target")
    # The scripts write this file last; if it exists, they assume that the other files do.
    (shapes / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    for method in ("peagle", "eagle3"):
        write_json(shapes / method, qwen.head_config(method, target, tiny=False))
    write_json(shapes / "peagle-fp8", qwen.head_config("peagle", target, tiny=False))


def _rehearse(command: list[str], hardware: Hardware) -> Iterator[dict[str, Any]]:
    command_text = shlex.join(command)
    try:
        for name, spec, run in _engines(command, hardware):
            result = _accept(spec, run, hardware)
            yield {"command": command_text, "engine": name, "outcome": "accepted", **result}
    except Exception as error:
        yield {
            "command": command_text,
            "engine": "",
            "outcome": "failed",
            "message": f"{type(error).__name__}: {error}"[:2000],
        }


def _accept(spec: Any, model: Any, hardware: Hardware) -> dict[str, Any]:
    from tests.rehearsal.cell import configure_vllm

    return asdict(configure_vllm(spec, model, hardware, []))


def _engines(command: list[str], hardware: Hardware) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, spec and model of each engine that a script of the queue starts."""
    sys.path[:0] = [str(SCRIPTS)] * (str(SCRIPTS) not in sys.path)
    module = importlib.import_module(Path(command[0]).stem)
    shapes = Path("runs/shapes")
    if hasattr(module, "benches"):
        yield from (
            engine for _, keys in module.benches(shapes, tiny=False) for engine in _bench_engines(keys, hardware)
        )
    elif hasattr(module, "keys_of"):
        yield from _bench_engines(module.keys_of(None if "--embedded" in command else shapes, tiny=False), hardware)
    elif module.__name__ == "train_heads":
        for arguments in module.commands(Path("heads"), 480.0, tiny=False).values():
            # The unrolled head does not exist yet; the head that it is made from has the same shape.
            unrolled, existing = str(module.UNROLLED), "smollm2-135m-eagle3"
            _check_training(
                _configuration_of([existing if argument == unrolled else argument for argument in arguments])
            )
    else:
        (folder := Path("with-ray")).mkdir(exist_ok=True)
        (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
        for arguments in module.commands(folder.absolute(), shapes.absolute(), tiny=False).values():
            yield from _command_engines(arguments[0], _configuration_of(arguments), hardware)


def _bench_engines(keys: dict[str, Any], hardware: Hardware) -> Iterator[tuple[str, Any, Any]]:
    from peagle.bench.config import BenchConfig
    from peagle.bench.plan import make_plan
    from peagle.catalog.targets import resolve_model

    config = BenchConfig(**keys)
    model = resolve_model(config.model)
    yield from ((setup.label, setup.spec, model) for setup in make_plan(config, hardware, model).setups)


def _check_training(config: Any) -> None:
    from peagle.drafter.pipeline import check_training

    for prompts in config.prompts:
        Path(prompts).stat()
    check_training(config.model_copy(update={"device": "cpu"}), lambda _: None)


def _command_engines(name: str, config: Any, hardware: Hardware) -> Iterator[tuple[str, Any, Any]]:
    if name == "generate":
        from tests.resolved_runs import resolve_run

        run = resolve_run(config, machine=hardware)
        yield run.drafter.name or "none", run.spec, run.model
    else:
        from pipelines.online.app import resolve as resolve_served

        for model in resolve_served(config, hardware, num_nodes=1, announce=lambda _: None):
            yield model.options.served_name, model.engine.spec, model.engine.model


def _configuration_of(arguments: list[str]) -> Any:
    """Return the configuration of a `peagle` command."""
    from jobs import cli, flags
    from peagle.drafter.config import TrainConfig
    from pipelines.batch.config import GenerateConfig
    from pipelines.online.config import ServeConfig

    models = {"generate": GenerateConfig, "serve": ServeConfig, "train": TrainConfig}
    parser: argparse.ArgumentParser = cli.parser_of(arguments[0])
    return flags.load(models[arguments[0]], parser.parse_args(arguments[1:]))
