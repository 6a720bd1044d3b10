import mmap
import os
import time
from pathlib import Path

import pytest

from peagle.bench import memory
from peagle.bench.memory import PeakMemory, memory_reader, tree_rss_gib
from peagle.hardware import Hardware

PAGE_GIB = os.sysconf("SC_PAGE_SIZE") / 1024**3
GPU = Hardware(platform="cuda", accelerator="H100", num_accelerators=1, memory_gib=80, free_memory_gib=80, num_cpus=8)


def write_process(proc: Path, pid: int, parent: int, pages: int) -> None:
    (proc / str(pid)).mkdir()
    fields = ["S", str(parent), *["0"] * 19, str(pages), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {' '.join(fields)}")


def test_a_process_and_all_below_it_are_added_up(tmp_path: Path) -> None:
    for pid, parent, pages in ((10, 1, 100), (11, 10, 20), (12, 11, 3), (13, 1, 5000)):
        write_process(tmp_path, pid, parent, pages)
    assert tree_rss_gib(10, tmp_path) == pytest.approx(123 * PAGE_GIB)
    assert tree_rss_gib(99, tmp_path) is None


def test_this_process_holds_what_it_allocates() -> None:
    block = 200 * 1024**2
    before = tree_rss_gib()
    with mmap.mmap(-1, block) as pages:  # an allocator may hand out what it has kept of an earlier test
        pages.write(b"x" * block)
        after = tree_rss_gib()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(block / 1024**3, abs=0.05)


def test_the_largest_reading_counts_also_one_in_between() -> None:
    readings = iter([1.0, 7.0, None])
    with PeakMemory(lambda: next(readings, 2.0), every_s=0.01) as peak:
        time.sleep(0.2)
    assert peak.gib == 7.0


def test_on_a_gpu_what_was_in_use_before_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([3.0, 60.0, None])
    monkeypatch.setattr(memory, "device_gib", lambda: next(readings))
    read = memory_reader(GPU)
    assert read() == 57.0
    assert read() is None
