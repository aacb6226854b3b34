"""Threads of a process that ends: their tasks end first, and nothing aborts."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.exhaustive

LET_GO = """
import threading, time
from drivetrain_offload.tiles import _AlignedMapping, _tensor
from drivetrain_offload.tiles import ThreadPool

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
from drivetrain_offload.tiles import ThreadPool

inner, outer = ThreadPool(1, "inner"), ThreadPool(1, "outer")

def step():
    time.sleep(0.1)
    inner.submit(time.sleep, 0.1).result()
    print("stepped", flush=True)

outer.submit(step)
"""


@pytest.mark.parametrize(("code", "said"), [(LET_GO, ""), (ORDER, "stepped\n")])
def test_the_youngest_pool_ends_first_and_no_tensor_that_is_let_go_aborts(code, said):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
