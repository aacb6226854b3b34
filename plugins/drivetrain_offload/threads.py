"""Pools whose threads run torch's operations alone, each on the core that it is on."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch


def computing_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads run torch's operations without helpers of their own.

    Args:
        threads: how many; all have started when this returns.
        name: what their names begin with.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    everyone = threading.Barrier(threads)

    def alone() -> None:
        # A thread takes the number over from the process at its first question, even after a
        # number of its own was set: so it asks first.
        torch.get_num_threads()
        torch.set_num_threads(1)
        everyone.wait()  # else a quick thread would take the task of one that is not there yet

    # The call holds for the thread that makes it, and for threads that start later: give those
    # back what they would have had.
    before = torch.get_num_threads()
    for task in [pool.submit(alone) for _ in range(threads)]:
        task.result()
    torch.set_num_threads(before)
    return pool
