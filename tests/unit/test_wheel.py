"""The wheel includes every file of the packages, according to the configuration of setuptools."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def package_files():
    """Return the files of the packages, such as `peagle/errors.py`, without compiled files."""
    for name in SETUPTOOLS["packages"]["find"]["include"]:
        for path in (ROOT / name.removesuffix("*")).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)


def test_modules_are_in_packages_of_the_wheel():
    modules = [path for path in package_files() if path.suffix == ".py"]
    assert len(modules) > 100
    folders = {parent for path in modules for parent in path.parents if parent != Path()}
    assert [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []
    assert all(
        any(fnmatch(folder.parts[0], pattern) for pattern in SETUPTOOLS["packages"]["find"]["include"])
        for folder in folders
    )


def test_other_files_are_package_data():
    packaged = {
        path.relative_to(ROOT)
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    data = {path for path in package_files() if path.suffix != ".py"}
    assert {path.suffix for path in data} >= {".safetensors", ".yaml", ".csv", ".j2", ".html", ".js"}
    assert sorted(map(str, data - packaged)) == []
