"""The commands of benchmarks/GPU_QUEUE.md, as a shell reads them, and what each makes of a card.

The page's blocks run in bash with functions in the place of the programs: they write down what they were asked, and do
nothing. Each command is then parsed. Its engines are resolved and given to vLLM as any other's, and a training is
checked as far as it can be without its device.
"""

import argparse
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import shapes as qwen
from peagle.hardware import Hardware
from tests.rehearsal.shapes import write_json, write_tokenizer

_ROOT = Path(__file__).parents[2]
QUEUE = _ROOT / "benchmarks" / "GPU_QUEUE.md"
_WRITES_DOWN = """
set -e
note() { printf '%q ' "$@" >> "$ASKED"; echo >> "$ASKED"; }
peagle() { note peagle "$@"; }
python() { note python "$@"; }
timeout() { while [[ $1 == -* || $1 =~ ^[0-9]+$ ]]; do shift; done; "$@"; }
curl() { :; }; tar() { :; }; rm() { :; }; sleep() { :; }; kill() { :; }
"""


def queued_commands(folder: Path) -> list[list[str]]:
    """Every command of the queue that starts with `peagle` or `python`, in the page's order.

    Raises:
        CalledProcessError: a block is not understood by a shell.
    """
    asked = folder / "asked"
    asked.touch()
    blocks = re.findall(r"^```\n(.*?)^```", QUEUE.read_text(), re.MULTILINE | re.DOTALL)
    script = _WRITES_DOWN + "\n".join(blocks)  # a block may use a function of an earlier one
    environment = os.environ | {"ASKED": str(asked)}
    subprocess.run(["bash", "-c", script], cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return [shlex.split(line) for line in asked.read_text().splitlines()]


def rehearse_queue(hardware: Hardware, folder: Path) -> list[dict[str, Any]]:
    """Every command of the queue on one of the cards: its engines, with their outcome."""
    one = replace(hardware, num_accelerators=1)
    commands = queued_commands(folder)  # first: a block may leave out what is there
    _write_folders(folder)
    os.chdir(folder)
    return [cell for command in commands for cell in _rehearse(command, one)]


def _write_folders(folder: Path) -> None:
    """What the commands find on a host: the repository, the shapes, and heads that an earlier item has trained."""
    from peagle.catalog.folders import read_config
    from peagle.catalog.shipped_heads import HEADS_FOLDER
    from peagle.errors import CatalogError

    for name in ("peagle", "benchmarks"):
        (folder / name).symlink_to(_ROOT / name)
    for name, tiny in (("shapes", False), ("shapes-tiny", True)):
        target = qwen.target_config(tiny=tiny)
        write_json(folder / name / "target", target)
        write_tokenizer(folder / name / "target")
        for method in ("peagle", "eagle3"):
            write_json(folder / name / method, qwen.head_config(method, target, tiny=tiny))
    write_json(folder / "shapes" / "peagle-fp8", qwen.head_config("peagle", qwen.target_config(tiny=False), tiny=False))
    for method, layers in (("peagle", 2), ("peagle", 4), ("peagle", 5), ("eagle3", 2), ("eagle3", 4)):
        shipped = read_config(HEADS_FOLDER / f"smollm2-135m-{method}", CatalogError)
        write_json(folder / "heads" / f"{method}-{layers}" / "head", dict(shipped) | {"made_for": f"{layers} layers"})


def _rehearse(command: list[str], hardware: Hardware) -> Iterator[dict[str, Any]]:
    words = shlex.join(command)
    try:
        for name, spec, run in _engines(command, hardware):
            found = _accept(spec, run, hardware)
            yield {"command": words, "engine": name, "outcome": "accepted", **found}
    except Exception as error:
        yield {
            "command": words,
            "engine": "",
            "outcome": "failed",
            "message": f"{type(error).__name__}: {error}"[:2000],
        }


def _accept(spec: Any, model: Any, hardware: Hardware) -> dict[str, Any]:
    from tests.rehearsal.cell import accept

    return asdict(accept(spec, model, hardware, []))


def _engines(command: list[str], hardware: Hardware) -> Iterator[tuple[str, Any, Any]]:
    """Name, spec and model of each engine that a command starts; a command without any is parsed all the same."""
    from peagle.catalog.targets import resolve_model

    program, *rest = command
    if program == "python":
        script = Path(rest[0]).name
        if script == "shapes.py":
            qwen.options(rest[1:])
            return
        if script != "step_profile.py":
            raise ValueError(f"{rest[0]}: not known here, so it would not be rehearsed")
        rest = ["bench", *rest[1:]]  # it takes the flags of `peagle bench`
    config = _parsed(rest)
    if rest[0] in ("bench", "evaluate"):
        from peagle.bench.acceptance import Evaluation
        from peagle.bench.plan import make_plan

        model = resolve_model(config.model)
        plan = make_plan if rest[0] == "bench" else Evaluation.make_plan
        yield from ((setup.label, setup.spec, model) for setup in plan(config, hardware, model).setups)
    elif rest[0] == "generate":
        from pipelines.batch.resolve import resolve

        run = resolve(config, hardware, ["prompt"], announce=lambda _: None)
        yield run.drafter.name or "none", run.spec, run.model
    elif rest[0] == "train":
        from peagle.drafter.checks import check_training

        for prompts in config.prompts:
            Path(prompts).stat()
        check_training(config.model_copy(update={"device": "cpu"}), lambda _: None)
    elif rest[0] == "serve":
        from pipelines.online.app import resolve as resolve_served

        for one in resolve_served(config, hardware, num_nodes=1, announce=lambda _: None):
            yield one.keys.served_name, one.engine.spec, one.engine.model


def _parsed(words: list[str]) -> Any:
    """The configuration of a `peagle` command, as the command itself reads it; None where it has none."""
    from jobs import cli, flags
    from peagle.bench.config import BenchConfig, EvaluateConfig
    from peagle.drafter.config import TrainConfig
    from pipelines.batch.config import GenerateConfig
    from pipelines.online.config import ServeConfig

    models = {
        "bench": BenchConfig, "evaluate": EvaluateConfig, "generate": GenerateConfig, "serve": ServeConfig,
        "train": TrainConfig,
    }  # fmt: skip
    parser: argparse.ArgumentParser = cli._parser(words[0])
    args = parser.parse_args(words)
    return flags.load(models[words[0]], args) if words[0] in models else None
