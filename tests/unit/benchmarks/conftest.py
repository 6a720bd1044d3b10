"""The tiny shapes of the GPU queue."""

import pytest

from benchmarks.gpu.shapes import write_shapes


@pytest.fixture(scope="session")
def shapes(tmp_path_factory):
    """Write the folders of the tiny target and its heads; the FP8 head is the other one under its name."""
    root = tmp_path_factory.mktemp("shapes")
    write_shapes(root, tiny=True)
    (root / "peagle-fp8").symlink_to(root / "peagle")
    return root
