"""This node's hardware with its instance type, if the machine names it.

EC2 writes it into the firmware's tables (DMI). On Google's and Microsoft's machines these only have the vendor, and the
metadata server has the type. Other machines are not queried.
"""

import re
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

from peagle import hardware
from peagle.hardware import Hardware

METADATA = "http://169.254.169.254"  # link-local, never routed
_TIMEOUT_S = 1.0
_MAX_BYTES = 256
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")  # it is displayed and stored
# By vendor and product in DMI: path and required header.
_QUESTIONS = {
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
    return replace(hardware.detect(), machine_names=(name,) if name else ())


def instance_type(*, root: Path = Path("/"), metadata: str = METADATA) -> str | None:
    """Return the cloud's name of this kind of machine, such as "p5.48xlarge", or None.

    Args:
        root: the file system whose `/sys` is read.
        metadata: the address of the metadata server.
    """
    vendor, product = (_read(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name"))
    if vendor == "Amazon EC2":
        name = product
    elif question := _QUESTIONS.get((vendor, product)):
        name = _ask(metadata + question[0], question[1])
    else:
        return None
    return name if _NAME.fullmatch(name) else None


def _ask(url: str, headers: dict[str, str]) -> str:
    """Return the last path segment of the response; empty on failure."""
    direct = build_opener(ProxyHandler({}))  # a proxy would answer for its own machine
    try:
        with direct.open(Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
            text: str = answer.read(_MAX_BYTES).decode(errors="replace")
    except (OSError, HTTPException):
        return ""
    return text.strip().rpartition("/")[2]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
