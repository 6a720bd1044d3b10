"""The hardware of this node: accelerators, memory, cores, supported number formats and instance type.

The information comes only from the operating system, `nvidia-smi` and the metadata servers of Google and Microsoft.
Reading it takes milliseconds, and needs neither torch nor CUDA.
"""

import os
import platform as python_platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.request import ProxyHandler, Request, build_opener

_GIB = 1024**3
# The instruction sets that matter to an engine on a CPU.
_RELEVANT_CPU_FLAGS = frozenset({"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16"})

_GPU_FIELDS = "name,memory.total,memory.free,compute_cap,uuid,mig.mode.current,driver_version"
# A driver without compute_cap is too old for any engine. `index` stands in for the fields that the driver lacks, so the
# node still counts as a GPU node, and is refused because of its driver.
_GPU_FIELDS_OF_OLD_DRIVERS = "name,memory.total,memory.free,index,uuid,index,driver_version"


class _Gpu(NamedTuple):
    """A GPU in the output of `nvidia-smi`. Its memory is None if it uses the machine's memory."""

    number: str
    name: str
    memory_gib: float | None
    free_gib: float | None
    capability: tuple[int, int]
    is_sliced: bool
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware of one node.

    Attributes:
        platform: the build of vLLM that this node needs.
        memory_gib, free_memory_gib: memory of one accelerator, or of the machine on a CPU node.
        num_cpus: logical CPUs available to this process (affinity mask and cgroup quota).
        accelerator: the GPU's marketing name; None on a CPU node.
        accelerator_kinds: for each GPU name, the value of CUDA_VISIBLE_DEVICES that selects these GPUs.
        has_mig: whether a visible GPU is divided into MIG slices.
        driver: NVIDIA's driver version, such as 580.65.06; empty if unknown.
        core_ids: one logical CPU per physical core in the affinity mask, by NUMA node.
        is_cpu_quota: whether a cgroup quota grants fewer CPUs than the affinity mask.
        machine_names: labels such as instance type, node group and region, as far as known.
    """

    platform: Literal["cuda", "cpu"]
    memory_gib: float
    free_memory_gib: float
    num_cpus: int
    accelerator: str | None = None
    num_accelerators: int = 0
    accelerator_kinds: Mapping[str, str] = field(default_factory=dict, hash=False)
    has_mig: bool = False
    driver: str = ""
    compute_capability: tuple[int, int] | None = None
    cpu_name: str = ""
    cpu_flags: frozenset[str] = frozenset()
    core_ids: tuple[int, ...] = ()
    is_cpu_quota: bool = False
    machine_names: tuple[str, ...] = ()

    @property
    def supports_bf16(self) -> bool:
        """Whether the hardware computes in bf16: all CPUs that vLLM supports, and GPUs from Ampere (8.0) on."""
        return self.platform == "cpu" or (self.compute_capability or (0, 0)) >= (8, 0)

    @property
    def has_slow_bf16(self) -> bool:
        """Whether bf16 is slower than float32, as on x86-64 CPUs without AVX-512."""
        return self.platform == "cpu" and "avx2" in self.cpu_flags and "avx512f" not in self.cpu_flags

    @property
    def supports_fp8_weights(self) -> bool:
        """Whether the hardware has FP8 matrix units: compute capability 8.9 (Ada) and up."""
        return self.platform == "cuda" and (self.compute_capability or (0, 0)) >= (8, 9)

    @property
    def supports_int8(self) -> bool:
        """Whether vLLM computes INT8 matrix products correctly."""
        if self.platform == "cpu":
            # Without VNNI, products of bytes are summed in 16 bits, which saturate
            # (docs/decisions/0016-int8-needs-vnni.md).
            return not self.cpu_flags.isdisjoint({"avx512_vnni", "avx_vnni"})
        # Turing to Hopper. From 10.0 (Blackwell) on, vLLM's CUTLASS kernels fail: "Int8 not supported on SM100"
        # (`csrc/libtorch_stable/quantization/w8a8/cutlass/c3x/scaled_mm_helper.hpp`).
        return (7, 5) <= (self.compute_capability or (0, 0)) < (10, 0)

    @property
    def supports_fp8_kv_cache(self) -> bool:
        """Whether the KV cache can be FP8: GPUs as for weights, CPUs with AVX-512 (vLLM's `cpu_attn.py`)."""
        return self.supports_fp8_weights or (self.platform == "cpu" and "avx512f" in self.cpu_flags)

    def describe(self) -> str:
        """Describe the node in a few words.

        >>> Hardware(platform="cpu", memory_gib=24, free_memory_gib=20, num_cpus=2).describe()
        'CPU, 2 CPUs, 24.0 GiB'
        """
        if self.platform == "cpu":
            return f"{self.cpu_name or 'CPU'}, {self.num_cpus} CPUs, {self.memory_gib:.1f} GiB"
        capability = ".".join(map(str, self.compute_capability or ()))
        gpus = f"{self.num_accelerators} x {self.accelerator}, {self.memory_gib:.1f} GiB each"
        return f"{gpus}, compute capability {capability}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "cpu_flags": sorted(self.cpu_flags),
            "core_ids": list(self.core_ids),
            "machine_names": list(self.machine_names),
            "compute_capability": list(self.compute_capability) if self.compute_capability else None,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Hardware":
        """Inverse of `to_dict`. Without `free_memory_gib`, all memory is free."""
        capability = values["compute_capability"]
        return cls(
            **{
                "free_memory_gib": values["memory_gib"],
                **values,
                "cpu_flags": frozenset(values["cpu_flags"]),
                "core_ids": tuple(values["core_ids"]),
                "machine_names": tuple(values.get("machine_names", ())),
                "compute_capability": tuple(capability) if capability else None,
            }
        )


def detect(*, root: Path = Path("/")) -> Hardware:
    """Detect the hardware of this node. `root` is the file system whose `/proc` and `/sys` are read."""
    num_in_mask, core_ids = _cores_in_mask(root)
    quota = _cpu_quota(root)
    num_cpus = num_in_mask if quota is None else max(1, min(num_in_mask, int(quota)))
    cpu_name, cpu_flags = _cpu_model(root)
    memory_gib, free_memory_gib = _host_memory_gib(root)
    host = Hardware(
        platform="cpu",
        memory_gib=memory_gib,
        free_memory_gib=free_memory_gib,
        num_cpus=num_cpus,
        cpu_name=cpu_name,
        cpu_flags=cpu_flags,
        core_ids=core_ids,
        is_cpu_quota=num_cpus < num_in_mask,
    )
    return _with_accelerators(host, _nvidia_smi())


def _with_accelerators(host: Hardware, gpus: list[_Gpu]) -> Hardware:
    """Return the node with its GPUs. If they differ, the properties are those of the weakest GPU."""
    if not gpus:
        return host
    numbers_by_name: dict[str, list[str]] = {}
    for gpu in gpus:
        numbers_by_name.setdefault(gpu.name, []).append(gpu.number)
    weakest = min(gpus, key=lambda gpu: (gpu.capability, gpu.memory_gib or host.memory_gib))
    return replace(
        host,
        platform="cuda",
        accelerator=weakest.name,
        num_accelerators=len(gpus),
        accelerator_kinds={name: ",".join(numbers) for name, numbers in numbers_by_name.items()},
        has_mig=any(gpu.is_sliced for gpu in gpus),
        driver=weakest.driver,
        compute_capability=weakest.capability,
        memory_gib=min(gpu.memory_gib or host.memory_gib for gpu in gpus),
        free_memory_gib=min(gpu.free_gib or host.free_memory_gib for gpu in gpus),
    )


def _nvidia_smi() -> list[_Gpu]:
    """Return the visible GPUs; empty without a driver."""
    for fields in (_GPU_FIELDS, _GPU_FIELDS_OF_OLD_DRIVERS):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except subprocess.CalledProcessError:
            continue
        except (OSError, subprocess.SubprocessError):
            break
        return _parse_nvidia_smi(output, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return []


def _parse_nvidia_smi(output: str, visible: str | None) -> list[_Gpu]:
    """Return the GPUs of `nvidia-smi`, filtered by CUDA_VISIBLE_DEVICES as in CUDA.

    An entry of `visible` is an index, the beginning of a UUID, or the UUID of a MIG slice. The first unknown entry ends
    the list. None means that the variable is not set.
    """
    gpus: dict[str, _Gpu] = {}
    for index, line in enumerate(output.strip().splitlines()):
        name, total, free, capability, uuid, mig, driver = (value.strip() for value in line.split(","))
        major, _, minor = capability.partition(".")
        gpus[uuid] = _Gpu(
            number=str(index),
            name=name.removeprefix("NVIDIA "),
            memory_gib=_mib_to_gib(total),
            free_gib=_mib_to_gib(free),
            capability=(int(major), int(minor)) if minor else (0, 0),
            is_sliced=mig == "Enabled",
            driver=driver,
        )
    if visible is None:
        return list(gpus.values())
    selected: list[_Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        # A slice matches every GPU that has slices, because it does not matter here which one it is on.
        matching = [
            gpu
            for uuid, gpu in gpus.items()
            if entry == gpu.number
            or (entry.startswith("GPU-") and uuid.startswith(entry))
            or (entry.startswith("MIG-") and gpu.is_sliced)
        ]
        if not matching:
            break
        selected.append(matching[0])
    return selected


def _mib_to_gib(mib: str) -> float | None:
    """Return GiB; None for "[N/A]", which GPUs without their own memory report."""
    try:
        return float(mib) / 1024
    except ValueError:
        return None


def _cores_in_mask(root: Path) -> tuple[int, tuple[int, ...]]:
    """Return the number of logical CPUs in the affinity mask, and the `core_ids` of `Hardware`."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores: dict[str, tuple[int, int]] = {}
    for cpu in allowed:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}"
        siblings = _read(folder / "topology/thread_siblings_list") or str(cpu)
        nodes = sorted(int(node.name.removeprefix("node")) for node in folder.glob("node[0-9]*"))
        # Keep the last hyper-thread of each core, to which vLLM binds a thread.
        cores[siblings] = (nodes[0] if nodes else 0, cpu)
    return len(allowed), tuple(cpu for _, cpu in sorted(cores.values()))


def _cpu_model(root: Path) -> tuple[str, frozenset[str]]:
    """Return the name and relevant flags of the first processor."""
    name, flags = python_platform.machine(), frozenset[str]()
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = _RELEVANT_CPU_FLAGS & set(value.split())
            break
    return name, flags


def _cpu_quota(root: Path) -> float | None:
    """Return the number of CPUs that the cgroup's quota grants; None without a quota."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        if fields := (_read(folder / "cpu.max") or "").split():  # version 2: "200000 100000" or "max 100000"
            quotas.append((fields[0], fields[1]))
        if quota := _read(folder / "cpu.cfs_quota_us"):  # version 1; -1 means no quota
            quotas.append((quota, _read(folder / "cpu.cfs_period_us") or "100000"))
    granted = [int(quota) / int(period) for quota, period in quotas if quota.isdecimal()]
    return min(granted, default=None)


def _host_memory_gib(root: Path) -> tuple[float, float]:
    """Return total and available memory of the machine, within the cgroup's limit."""
    fields = dict(line.split(":", 1) for line in (_read(root / "proc/meminfo") or "").splitlines() if ":" in line)
    total, available = (int(fields.get(key, "0 kB").split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _read(folder / limit_name) or "max"
            if limit.isdecimal() and int(limit) < total:
                total = int(limit)
                available = min(available, total - int(_read(folder / usage_name) or 0))
    return total / _GIB, max(0, available) / _GIB


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Return the folders that might limit this process: the mount's root and the process's group, cgroup v2 and v1."""
    folders = []
    for mount in (root / "sys/fs/cgroup", root / "sys/fs/cgroup" / controller):
        folders.append(mount)
        for line in (_read(root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", controller) and path.strip("/"):
                folders.append(mount / path.strip("/"))
    return folders


def _read(path: Path) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


# --- the instance type

# EC2 writes the instance type into the firmware's tables (DMI). On Google's and Microsoft's machines, the tables only
# have the vendor, and the metadata server has the type. On other machines, no server is queried.
METADATA = "http://169.254.169.254"  # link-local, never routed
_TIMEOUT_S = 1.0
_VALID_INSTANCE_TYPE = re.compile(r"[A-Za-z0-9._-]{1,100}")  # restricted, because the name is displayed and stored
# For each vendor and product in DMI: the path to query, and the required header.
_QUERIES = {
    ("Google", "Google Compute Engine"): (
        "/computeMetadata/v1/instance/machine-type",  # projects/1234/machineTypes/a3-highgpu-8g
        {"Metadata-Flavor": "Google"},
    ),
    ("Microsoft Corporation", "Virtual Machine"): (
        "/metadata/instance/compute/vmSize?api-version=2021-02-01&format=text",
        {"Metadata": "true"},
    ),
}


def detect_machine() -> Hardware:
    """Detect the hardware of this node, with its instance type in `machine_names` if it is known."""
    name = instance_type()
    return replace(detect(), machine_names=(name,) if name else ())


def instance_type(*, root: Path = Path("/"), metadata: str = METADATA) -> str | None:
    """Return the cloud's name for this type of machine, such as "p5.48xlarge", or None."""
    vendor, product = (_read(root / "sys/class/dmi/id" / name) or "" for name in ("sys_vendor", "product_name"))
    if vendor == "Amazon EC2":
        name = product
    elif query := _QUERIES.get((vendor, product)):
        name = _query(metadata + query[0], query[1])
    else:
        return None
    return name if _VALID_INSTANCE_TYPE.fullmatch(name) else None


def _query(url: str, headers: dict[str, str]) -> str:
    """Return the last path segment of the response; empty on failure."""
    opener = build_opener(ProxyHandler({}))  # a proxy would return the type of its own machine
    try:
        with opener.open(Request(url, headers=headers), timeout=_TIMEOUT_S) as response:
            text: str = response.read(256).decode(errors="replace")
    except (OSError, HTTPException):
        return ""
    return text.strip().rpartition("/")[2]
