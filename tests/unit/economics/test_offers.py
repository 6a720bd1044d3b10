import pytest

from peagle.economics.prices import is_accelerator


@pytest.mark.parametrize(
    ("name", "device_name", "expected"),
    [
        ("A100-80GB", "NVIDIA A100-SXM4-80GB", True),
        ("A100-80GB", "NVIDIA A100 80GB PCIe", True),
        ("A100-80GB", "A100-80G", True),  # Ray's name
        ("A100-80GB", "NVIDIA A100-SXM4-40GB", False),
        ("A100", "NVIDIA A100-SXM4-80GB", False),
        ("A100", "NVIDIA A100-SXM4-40GB", True),
        ("A100", "A100", True),
        ("A100-80GB", "A100", False),
        ("H100", "NVIDIA H100 80GB HBM3", True),
        ("H100-SXM", "NVIDIA H100 80GB HBM3", True),
        ("H100-SXM", "NVIDIA H100 PCIe", False),
        ("H200-SXM", "NVIDIA H200 NVL", False),
        ("L4", "NVIDIA L40S", False),
        ("B200", "NVIDIA GB200", False),
        ("RTXPRO6000", "RTX-PRO-6000", True),
        (None, "NVIDIA L4", False),
    ],
)
def test_a_table_and_a_driver_mean_the_same_card(name, device_name, expected):
    assert is_accelerator(name, device_name) == expected
