"""What this process's allocator does with memory that is freed."""

from __future__ import annotations

import ctypes
import platform

MIB = 1 << 20
# mallopt(3): numbers from malloc.h. glibc takes at most 32 MiB as the threshold for blocks that are mapped apart.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MOST_MAPPED_BYTES, NEVER_TRIM_BYTES = 32 * MIB, 2**31 - 1


def keep_freed_memory() -> bool:
    """Makes this process keep memory that it frees, as one that serves requests does after a while; whether it could.

    glibc gives large blocks back to the system, or not, by what was freed before. Then the same run pays for zeroed pages or
    does not (about 0.4 us each on an H200's host: five times the time of a small stage), and repeats differ. Elsewhere than on
    Linux with glibc nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, MOST_MAPPED_BYTES) and libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM_BYTES))
