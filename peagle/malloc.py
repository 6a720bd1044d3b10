"""Return freed memory to the operating system."""

import ctypes


def trim_malloc() -> None:
    """Return freed memory of the C library to the system. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
