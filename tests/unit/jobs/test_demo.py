import argparse

from jobs import demo, flags, generate
from pipelines.batch.config import GenerateConfig


def test_command_of_a_demo_run(tmp_path):
    keys = {
        "model": demo.MODEL, "input": "in.jsonl", "output": tmp_path / "a b", "prompt_template": "x {{ prompt }}\n",
        "enforce_eager": True, "max_num_seqs": 1, "drafter": "none",
    }  # fmt: skip
    command = demo.command_of(keys)
    assert command[:2] == ["peagle", "generate"]
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    assert flags.load(GenerateConfig, parser.parse_args(command[2:])) == GenerateConfig(**keys)
