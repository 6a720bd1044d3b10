"""The instance type of this node, where the machine itself says it.

EC2 writes it into the firmware's tables (DMI). Google's and Microsoft's machines have only the vendor there, and their
metadata server knows the type. Other machines' networks are asked nothing.
"""

import re
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

from peagle.hardware import Hardware

METADATA = "http://169.254.169.254"  # of the machine's own host: it is never routed
_TIMEOUT_S = 1.0
_MOST_BYTES = 256
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")  # it is shown, and written down
# By vendor and product, as DMI has them: the path, and the header without which the server does not answer.
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


def identified(hardware: Hardware, *, root: Path = Path("/"), metadata: str = METADATA) -> Hardware:
    """This node's hardware with the instance type that it says it is, if it says one."""
    name = instance_type(root=root, metadata=metadata)
    return replace(hardware, machine_names=(name,)) if name else hardware


def instance_type(*, root: Path = Path("/"), metadata: str = METADATA) -> str | None:
    """The cloud's name for this kind of machine: "p5.48xlarge".

    None where the machine does not say it, or its metadata server has not answered within a second.

    Args:
        root: stands for the file system whose `/sys` is read.
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
    """The last part of the answer's path; empty where there is none."""
    direct = build_opener(ProxyHandler({}))  # a proxy would be asked what machine it is
    try:
        with direct.open(Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
            text: str = answer.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, HTTPException):
        return ""
    return text.strip().rpartition("/")[2]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
