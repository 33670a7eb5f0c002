"""Freed memory that stays with the process: its pages are zeroed once."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from hase.utils.paths import ROOT

pytest.importorskip("resource", reason="counts page faults, which Windows does not")
FAULTS = """
import resource
import numpy as np
from hase.utils.processes import keep_freed_memory

def page_faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        first, second = np.ones(2**20), np.ones(2**20)  # 8 MiB each
        del second, first
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(keep_freed_memory())
page_faults()
print(page_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library is not glibc")
def test_freed_memory_is_not_zeroed_again() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    assert kept == "True"
    assert int(faults) < 2**20 * 8 // 4096  # one array has so many pages
