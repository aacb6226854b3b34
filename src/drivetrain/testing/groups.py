"""Joins the ranks of a test in a process group, and leaves all groups without a long wait."""

import gc
import threading
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _world

from drivetrain.runtime.loopback import LOOPBACK
from drivetrain.testing.messages import Job

_START_TIMEOUT = timedelta(seconds=60)


def join_group(job: Job) -> None:
    """Make this process a rank of a fresh gloo group, if the test has more than one rank."""
    if job.size > 1:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(job.rendezvous, _store(job.store_port)),
            rank=job.rank,
            world_size=job.size,
            timeout=timedelta(seconds=job.timeout_s),
        )


def leave_groups() -> None:
    """Destroy every process group of this process and return when their connections are closed.

    gloo closes a connection at a tick of its event loop, up to 10 ms away, one after the other. For
    several groups that is most of what a short test takes: so each is closed by a thread.
    """
    if not dist.is_initialized():
        return
    groups = list(_world.pg_map)
    dist.destroy_process_group()
    gc.collect()  # what else refers to a group, and would close it in the middle of a later test
    closing = [threading.Thread(target=groups[i : i + 1].clear) for i in range(len(groups))]
    groups.clear()
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def _store(port: int) -> TCPStore:
    """Return the connection of this process to the store, a new one if a test has cut it."""
    try:
        _connection(port).check(["alive"])
    except dist.DistError:
        _connection.cache_clear()
    return _connection(port)


@cache
def _connection(port: int) -> TCPStore:
    # Made once: torch looks up the name of the address for it, which can take seconds.
    return TCPStore(LOOPBACK, port, timeout=_START_TIMEOUT, wait_for_workers=False)
