"""Threads of a process that ends: their tasks end first, and nothing aborts."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.exhaustive

LET_GO = """
import threading, time
from drivetrain_offload.buffers import _AlignedMapping, _tensor
from drivetrain_offload.threads import ThreadPool

begun = threading.Event()

def give_back(region):
    begun.set()
    for _ in range(50):
        time.sleep(0.01)  # lets go of the interpreter inside of torch's destructor

pool = ThreadPool(1, "writer")
def hold(tensor):
    time.sleep(0.2)  # until the thread has the last reference

pool.submit(hold, _tensor(_AlignedMapping(4096, False), give_back))
begun.wait()
"""

ORDER = """
import time
from drivetrain_offload.threads import ThreadPool

inner = ThreadPool(1, "inner")
outer = ThreadPool(1, "outer")

def step():
    time.sleep(0.1)
    inner.submit(time.sleep, 0.1).result()
    print("stepped", flush=True)

outer.submit(step)
"""


def ended(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_thread_that_lets_go_of_a_tensor_at_the_end_aborts_nothing():
    done = ended(LET_GO)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_youngest_pool_ends_first_so_that_a_step_is_taken_whole():
    done = ended(ORDER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stepped\n", "")


@pytest.mark.exhaustive
def test_a_pool_ends_once():
    for end in ("del pool", "pool.shutdown(); pool.shutdown()"):
        code = "from drivetrain_offload.threads import ThreadPool\npool = ThreadPool(2, 'a')\n"
        done = ended(f"{code}pool.submit(print, 'done').result()\n{end}\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
