"""Lets the C library give memory back that is freed: who offloads to a disk has too little of it.

glibc learns from large blocks that are freed to keep such blocks, once per thread. Of a model whose
units come and go it keeps several times what is in use.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_LARGE = 1 << 20
"""Bytes from which a block is mapped by itself and given back when it is freed."""


def give_back_memory() -> None:
    """Give freed blocks from 1 MiB on back to the system, now and later; on glibc alone.

    It holds for the whole process, and goes over what its environment says.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_M_TRIM_THRESHOLD, _LARGE)
        library.malloc_trim(0)
