import json
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from peagle import hardware
from peagle.hardware import Hardware, detect, detect_machine, instance_type

CPUINFO = """processor : 0
model name : Testium 9000
flags : fpu sse avx2 avx512f avx512_bf16 rdrand

processor : 1
model name : Testium 9000
flags : fpu
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 4 logical CPUs (2 cores with 2 threads, one core per NUMA node), 8 GiB and no GPU."""
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    write(tmp_path, "proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
    for cpu, (siblings, node) in enumerate([("0,2", 1), ("1,3", 0), ("0,2", 1), ("1,3", 0)]):
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}/node{node}").mkdir()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(hardware, "_nvidia_smi", list)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cpus_and_memory_are_detected(root: Path) -> None:
    detected = detect(root=root)
    assert (detected.platform, detected.cpu_name, detected.num_cpus) == ("cpu", "Testium 9000", 4)
    assert detected.cpu_flags == {"avx2", "avx512f", "avx512_bf16"}
    assert (detected.memory_gib, detected.free_memory_gib) == (8.0, 6.0)
    # The last thread of each core; the core of NUMA node 0 comes first.
    assert (detected.is_cpu_quota, detected.core_ids) == (False, (3, 2))


def test_affinity_mask_limits_cpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1})
    detected = detect(root=root)
    assert (detected.num_cpus, detected.core_ids) == (1, (1,))


@pytest.mark.parametrize(
    ("files", "num_cpus"),
    [
        ({"sys/fs/cgroup/cpu.max": "250000 100000"}, 2),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 4),
        ({"sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, 4),
        ({"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/cpu.max": "100000 100000"}, 1),
    ],
    ids=["v2", "v2-unlimited", "v2-less-than-one", "v1", "v1-unlimited", "v2-own-group"],
)
def test_cpus_are_limited_by_the_cgroup_quota(root: Path, files: dict[str, str], num_cpus: int) -> None:
    for name, text in files.items():
        write(root, name, text)
    detected = detect(root=root)
    assert detected.num_cpus == num_cpus
    assert detected.is_cpu_quota == (num_cpus < 4)


@pytest.mark.parametrize(
    "files",
    [
        {"sys/fs/cgroup/memory.max": str(2 * 1024**3), "sys/fs/cgroup/memory.current": str(1024**3)},
        {
            "proc/self/cgroup": "4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(2 * 1024**3),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(1024**3),
        },
    ],
    ids=["v2", "v1"],
)
def test_memory_is_limited_by_the_cgroup(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        write(root, name, text)
    detected = detect(root=root)
    assert (detected.memory_gib, detected.free_memory_gib) == (2.0, 1.0)


TWO_GPUS = """\
NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, GPU-aa11, Disabled, 580.65.06
NVIDIA L4, 23034, 22000, 8.9, GPU-bb22, [N/A], 580.65.06
"""


def test_different_gpus_have_the_properties_of_the_weakest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda: hardware._parse_nvidia_smi(TWO_GPUS, None))
    detected = detect(root=root)
    assert (detected.platform, detected.num_accelerators, detected.accelerator) == ("cuda", 2, "L4")
    assert detected.compute_capability == (8, 9)
    assert detected.memory_gib == pytest.approx(22.49, abs=0.01)
    assert detected.num_cpus == 4
    assert "2 x L4" in detected.describe()
    assert detected.accelerator_kinds == {"H100 80GB HBM3": "0", "L4": "1"}
    assert (detected.driver, detected.has_mig) == ("580.65.06", False)
    assert hardware.Hardware.from_dict(detected.to_dict()) == detected


def test_gpu_without_own_memory_has_the_size_of_host_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVIDIA GB10, [N/A], [N/A], 12.1, GPU-aa, [N/A], 580.95.05\n"
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda: hardware._parse_nvidia_smi(line, None))
    detected, host = detect(root=root), hardware._host_memory_gib(root)
    assert (detected.accelerator, detected.memory_gib, detected.free_memory_gib) == ("GB10", *host)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["H100 80GB HBM3", "L4"]),
        ("1", ["L4"]),
        ("GPU-aa11", ["H100 80GB HBM3"]),
        ("GPU-bb", ["L4"]),
        ("MIG-cc", []),
        ("1,7,0", ["L4"]),
        ("-1", []),
        ("", []),
        ("1,0", ["L4", "H100 80GB HBM3"]),
    ],
)
def test_cuda_visible_devices_selects_gpus(visible: str | None, names: list[str]) -> None:
    assert [gpu.name for gpu in hardware._parse_nvidia_smi(TWO_GPUS, visible)] == names


def test_mig_slice_is_detected() -> None:
    (detected,) = hardware._parse_nvidia_smi(TWO_GPUS.replace("Disabled", "Enabled"), "MIG-4c60d78c-506f")
    assert (detected.name, detected.is_sliced) == ("H100 80GB HBM3", True)


def test_old_or_missing_driver_has_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "compute_cap" in command[1]:
            raise subprocess.CalledProcessError(2, command, output='Field "compute_cap" is not a valid field to query.')
        return subprocess.CompletedProcess(command, 0, stdout="Tesla T4, 15109, 15000, 0, GPU-1, 0, 440.33.01\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (detected,) = hardware._nvidia_smi()
    assert (detected.name, detected.capability, detected.is_sliced) == ("Tesla T4", (0, 0), False)
    assert detected.driver == "440.33.01"
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "")
    assert hardware._nvidia_smi() == [], "no driver"


@pytest.mark.parametrize(
    ("capability", "bf16", "fp8", "int8"),
    [
        ((7, 0), False, False, False),
        ((7, 5), False, False, True),
        ((8, 0), True, False, True),
        ((8, 9), True, True, True),
        ((9, 0), True, True, True),
        ((10, 0), True, True, False),
        ((12, 0), True, True, False),
    ],
)
def test_number_formats_by_compute_capability(capability: tuple[int, int], bf16: bool, fp8: bool, int8: bool) -> None:
    gpu = Hardware(platform="cuda", memory_gib=80, free_memory_gib=80, num_cpus=8, compute_capability=capability)
    assert (gpu.supports_bf16, gpu.supports_fp8_weights, gpu.supports_fp8_kv_cache) == (bf16, fp8, fp8)
    assert gpu.supports_int8 == int8


@pytest.mark.parametrize(
    ("flag", "int8", "fp8_kv_cache"),
    [("avx2", False, False), ("avx512f", False, True), ("avx512_vnni", True, False), ("avx_vnni", True, False)],
)
def test_number_formats_by_cpu_flag(flag: str, int8: bool, fp8_kv_cache: bool) -> None:
    cpu = Hardware(platform="cpu", memory_gib=8, free_memory_gib=8, num_cpus=2, cpu_flags=frozenset({flag}))
    assert (cpu.supports_int8, cpu.supports_fp8_kv_cache, cpu.supports_fp8_weights) == (int8, fp8_kv_cache, False)


def test_detect_this_machine() -> None:
    detected = detect()
    assert detected.num_cpus >= 1
    assert detected.memory_gib >= detected.free_memory_gib > 0
    assert json.loads(json.dumps(detected.to_dict()))["num_cpus"] == detected.num_cpus


def test_hardware_json_round_trip() -> None:
    h100 = Hardware(
        platform="cuda", accelerator="H100", num_accelerators=8, compute_capability=(9, 0), memory_gib=80,
        free_memory_gib=70, num_cpus=192, cpu_flags=frozenset({"avx2"}), core_ids=(0, 2),
    )  # fmt: skip
    values = json.loads(json.dumps(h100.to_dict()))
    assert Hardware.from_dict(values) == h100
    del values["free_memory_gib"]
    assert Hardware.from_dict(values) == replace(h100, free_memory_gib=80)
    assert Hardware.from_dict(detect().to_dict()).platform == detect().platform


# --- the instance type, from fake firmware tables and a fake metadata server

NOWHERE = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture
def write_firmware(tmp_path):
    def write(vendor, product):
        folder = tmp_path / "sys/class/dmi/id"
        folder.mkdir(parents=True)
        (folder / "sys_vendor").write_text(f"{vendor}\n")
        (folder / "product_name").write_text(f"{product}\n")
        return tmp_path

    return write


@pytest.fixture
def start_metadata_server():
    """Return a function that starts a metadata server. It returns the server's URL and a list of the requested paths.

    `responses` has (required header, status, text) by path.
    """
    servers = []

    def start(responses):
        requests = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append(self.path)
                header, status, text = responses.get(self.path, ("Host", 404, ""))
                self.send_response(status if self.headers[header] else 403)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}", requests

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


GOOGLE, AZURE = ("Google", "Google Compute Engine"), ("Microsoft Corporation", "Virtual Machine")
GOOGLE_PATH = "/computeMetadata/v1/instance/machine-type"
AZURE_PATH = "/metadata/instance/compute/vmSize?api-version=2021-02-01&format=text"


def test_instance_type_is_read_from_the_firmware_of_ec2(write_firmware, tmp_path):
    assert instance_type(root=tmp_path, metadata=NOWHERE) is None
    assert instance_type(root=write_firmware("Amazon EC2", "p5.48xlarge"), metadata=NOWHERE) == "p5.48xlarge"


@pytest.mark.parametrize(("name", "names"), [("p5.48xlarge", ("p5.48xlarge",)), (None, ())])
def test_instance_type_is_a_machine_name(monkeypatch, name, names):
    monkeypatch.setattr(hardware, "instance_type", lambda: name)
    assert detect_machine().machine_names == names


@pytest.mark.parametrize(
    ("system", "path", "header", "text", "expected"),
    [
        (GOOGLE, GOOGLE_PATH, "Metadata-Flavor", "projects/12/machineTypes/a3-highgpu-8g", "a3-highgpu-8g"),
        (AZURE, AZURE_PATH, "Metadata", "Standard_ND96isr_H100_v5", "Standard_ND96isr_H100_v5"),
    ],
)
def test_instance_type_comes_from_the_metadata_server(
    monkeypatch, write_firmware, start_metadata_server, system, path, header, text, expected
):
    monkeypatch.setenv("http_proxy", NOWHERE)
    url, requests = start_metadata_server({path: (header, 200, text)})
    assert instance_type(root=write_firmware(*system), metadata=url) == expected
    assert requests == [path]


@pytest.mark.parametrize("response", [(500, "a3-highgpu-8g"), (200, ""), (200, "<html>"), (200, "x" * 200)])
def test_invalid_metadata_response_is_ignored(write_firmware, start_metadata_server, response):
    url, _ = start_metadata_server({GOOGLE_PATH: ("Host", *response)})
    assert instance_type(root=write_firmware(*GOOGLE), metadata=url) is None


@pytest.mark.parametrize("system", [("Dell Inc.", "PowerEdge"), ("Xen", "HVM domU"), ("Google", "Pixelbook")])
def test_other_machines_are_not_queried(write_firmware, start_metadata_server, system):
    url, requests = start_metadata_server({})
    assert instance_type(root=write_firmware(*system), metadata=url) is None
    assert requests == []


def test_silent_metadata_server_is_ignored(monkeypatch, write_firmware):
    root = write_firmware(*AZURE)
    assert instance_type(root=root, metadata=NOWHERE) is None
    monkeypatch.setattr(hardware, "_TIMEOUT_S", 0.05)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent:  # accepts connections and never responds
        assert instance_type(root=root, metadata=f"http://127.0.0.1:{silent.server_port}") is None
