"""Steps of shards in stores against torch.optim with fused=True, bit by bit."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from drivetrain.errors import StorageError, UsageError
from drivetrain.store import ShardSpec, ShardStep
from drivetrain_offload import nvme as files
from drivetrain_offload import stepping as pipeline
from drivetrain_offload.host import HostStore
from drivetrain_offload.nvme import NvmeStore
from drivetrain_offload.options import NvmeConfig

FACTOR = 0.37109843
TILE = 4 * 4096
SIZES = [0, 1, 63, 64, 1000, 70_001, 9000, 5]  # a tile has 4096 elements of fp32
RULES = [
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (AdamW, {"lr": torch.tensor(3e-3), "amsgrad": True, "maximize": True}),
    (Adam, {"lr": torch.tensor(1e-2), "amsgrad": True, "weight_decay": 0.01}),
    (Adam, {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.1, "eps": 1e-6}),
    (Adam, {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    (SGD, {"lr": 1e-1}),
    (SGD, {"lr": 1e-1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": torch.tensor(0.1), "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (Adagrad, {"lr": 1e-1, "lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    (Adagrad, {"lr": 1e-1, "lr_decay": 0.1, "initial_accumulator_value": 0.3, "maximize": True}),
]
ADAMW = RULES[0]


@pytest.fixture(autouse=True)
def small_tiles_of_one_thread(monkeypatch):
    """The kernels cut a whole shard by torch's threads, at places that are not aligned."""
    monkeypatch.setattr(pipeline, "TILE_BYTES", TILE)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", "nvme"])
def store(request, tmp_path):
    made = HostStore() if request.param == "cpu" else disk(tmp_path)
    yield made
    made.close()


@pytest.fixture
def on_disk(tmp_path):
    made = disk(tmp_path)
    yield made
    made.close()


def disk(path):
    return NvmeStore(NvmeConfig(path=str(path), request_mib=8192 / 2**20, threads=2))


class Both:
    """One block of shards in a store, and the same parameters in torch's own optimizer.

    Shards of even index have a master in memory; those of odd index have one in the store, and
    an output in bf16. Two param groups take turns, by pairs.
    """

    def __init__(self, store, kind, options, *, dtype=torch.float32, sizes=SIZES, block="a"):
        made = torch.Generator().manual_seed(3)
        values = [torch.randn(n, generator=made, dtype=dtype) for n in sizes]
        self.plain = [torch.nn.Parameter(value.clone()) for value in values]
        groups = [{"params": self.plain[0::4] + self.plain[1::4]}]
        groups += [{"params": self.plain[2::4] + self.plain[3::4], "weight_decay": 0.3}]
        self.optimizer = kind([g for g in groups if g["params"]], **{"fused": True, **options})
        for group in self.optimizer.param_groups[1:]:
            group["lr"] = 3e-3
        stepper = store.stepper(self.optimizer)
        assert stepper is not None
        self.stepper, self.block, self.generator = stepper, block, made
        self.adopt(block)
        self.masters = [None if self.kept(i) else values[i].clone() for i in range(len(sizes))]
        for i, value in enumerate(values):
            if self.kept(i):
                stepper.set_master(block, i, value)
        self.outs = [
            torch.full_like(value, -7, dtype=torch.bfloat16) if self.kept(i) else None
            for i, value in enumerate(values)
        ]

    def kept(self, index):
        return index % 2 == 1

    def adopt(self, block):
        specs = [ShardSpec(p.numel(), p.dtype, self.kept(i)) for i, p in enumerate(self.plain)]
        self.stepper.adopt(block, specs, self.optimizer.param_groups[0])

    def group(self, index):
        groups = self.optimizer.param_groups
        return next(g for g in groups if any(p is self.plain[index] for p in g["params"]))

    def step(self, without=(), dtype=torch.bfloat16, factor=FACTOR):
        """Submit a step of the shards, take it with torch, and return what is under way."""
        steps = []
        for i, parameter in enumerate(self.plain):
            parameter.grad = None
            if i in without:
                continue
            gradient = torch.randn(parameter.numel(), generator=self.generator).to(dtype)
            master, out = self.masters[i], self.outs[i]
            each = factor / (1 + i % 3)
            steps.append(ShardStep(i, self.group(i), gradient, master, out, each))
            parameter.grad = gradient.to(parameter.dtype, copy=True).mul_(each)
        pending = self.stepper.submit(self.block, steps)
        self.optimizer.step()
        return pending

    def assert_same(self):
        for i, parameter in enumerate(self.plain):
            states = dict(self.stepper.states(self.block, i))  # waits: masters are there, too
            master = self.masters[i]
            master = self.stepper.master(self.block, i) if master is None else master
            assert same_bits(master, parameter.detach()), i
            wanted = {k: v for k, v in self.optimizer.state[parameter].items() if v is not None}
            if wanted.get("step") == 0:  # Adagrad's, before its first step
                wanted = {}
            assert states.keys() == wanted.keys()
            for name, state in states.items():
                assert same_bits(state, wanted[name]), (i, name)
            if self.outs[i] is not None and states:
                assert same_bits(self.outs[i], parameter.detach().bfloat16())


def same_bits(a: Tensor, b: Tensor) -> bool:
    same = (a.shape, a.dtype) == (b.shape, b.dtype)
    return same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def one(store, *, numel=20_000, kept=True):
    """Return a stepper for AdamW, its group, and a function that makes a step of its one shard."""
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))])
    stepper, group = store.stepper(optimizer), optimizer.param_groups[0]
    stepper.adopt("a", [ShardSpec(numel, torch.float32, kept)], group)
    master = None if kept else torch.zeros(numel)
    return stepper, lambda: [ShardStep(0, group, torch.ones(numel), master)]


def test_many_steps_have_the_bits_of_torch(store):
    loops = [(kind, {**options, "fused": None}) for kind, options in RULES]
    rules = RULES + loops if isinstance(store, HostStore) else RULES[::3]
    cases = [(*rule, torch.float32) for rule in rules]
    for turn, (kind, options, dtype) in enumerate([*cases, (*ADAMW, torch.float64)]):
        both = Both(store, kind, options, dtype=dtype, block=f"a{turn}")
        for number, without in enumerate([(), (1, 4), (5,), (0, 2, 3)]):
            pending = both.step(without)
            for group in both.optimizer.param_groups:  # after submit: for the next step
                group["lr"] = group["lr"] * 0.5
            if number == 2:
                both.assert_same()
        pending.wait()
        assert pending.done()
        both.assert_same()
        both.stepper.close()


def test_a_submission_does_not_wait_and_a_wait_can_be_interrupted(store, monkeypatch):
    # A process that was started in the background ignores the signal, and so do its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gate = threading.Event()
    stepper, step = one(store)
    tiler = stepper._tiler
    real = tiler.update_all
    monkeypatch.setattr(tiler, "update_all", lambda updates: gate.wait(20) and real(updates))
    pending = [stepper.submit("a", step()) for _ in range(3)]
    assert not any(each.done() for each in pending)
    interrupt = (threading.main_thread().ident, signal.SIGINT)
    timer = threading.Timer(0.05, signal.pthread_kill, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pending[0].wait()
    timer.join()
    signal.signal(signal.SIGINT, before)
    gate.set()
    for each in pending:
        each.wait()
    assert dict(stepper.states("a", 0))["step"] == 3
    stepper.close()


def test_only_the_bytes_of_states_and_masters_go_over_the_disk(on_disk, monkeypatch):
    moved = Counter()

    def counted(verb, real):
        def call(fd, views, at):
            done = real(fd, views, at)
            moved[verb] += done
            return done

        return call

    numel = 40 * 1024  # whole blocks of the disk
    for kept, each in ((True, 12), (False, 8)):
        stepper, step = one(on_disk, numel=numel, kept=kept)
        moved.clear()
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "preadv", counted("read", os.preadv))
            patch.setattr(files.os, "pwritev", counted("write", os.pwritev))
            for _ in range(3):
                stepper.submit("a", step())
            stepper.close()
        assert moved == {"read": 3 * each * numel, "write": 3 * each * numel}


@pytest.mark.parametrize(("kind", "options"), [RULES[2], RULES[7], RULES[8]])
def test_states_go_to_another_stepper_and_back_to_nothing(on_disk, kind, options):
    both = Both(on_disk, kind, options)
    without = [] if kind is SGD else [4]  # torch's SGD wants all first steps to be one
    both.step(without)
    both.step(without)
    first, both.block = both.block, "c"
    states = [dict(both.stepper.states(first, i)) for i in range(len(SIZES))]
    assert bool(states[4]) is (4 not in without and bool(both.optimizer.state[both.plain[4]]))
    both.adopt("c")
    for i, given in enumerate(states):
        shaped = {name: s.view(1, -1) if s.dim() else float(s) for name, s in given.items()}
        both.stepper.set_states("c", i, shaped)
        if both.kept(i):
            both.stepper.set_master("c", i, both.stepper.master(first, i))
    both.step()
    both.assert_same()
    for i, parameter in enumerate(both.plain):
        nothing = {"momentum_buffer": None} if kind is SGD else {}
        both.stepper.set_states("c", i, nothing)
        both.optimizer.state[parameter].clear()
        if kind is Adagrad:  # makes its states at once
            fresh = Adagrad([parameter], **options)
            both.optimizer.state[parameter] = fresh.state[parameter]
        assert not list(both.stepper.states("c", i))
    both.step()
    both.assert_same()
    both.stepper.close()


def test_a_block_is_read_after_its_last_step_also_when_that_is_late(store, monkeypatch):
    both = Both(store, *ADAMW, sizes=[900, 800])  # fits into one set of buffers
    spec = [ShardSpec(10, torch.float32, False)]
    both.stepper.adopt("b", spec, both.optimizer.param_groups[0])
    tiler = both.stepper._tiler
    real = tiler.update_all
    monkeypatch.setattr(tiler, "update_all", lambda updates: time.sleep(0.02) or real(updates))
    between = [ShardStep(0, both.group(0), torch.ones(10), torch.ones(10))]
    for _ in range(3):
        both.step()
        both.step()
        both.stepper.submit("b", between)
    both.assert_same()
    both.stepper.close()


def test_room_is_taken_before_the_first_step_and_nothing_is_written(on_disk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwritev", lambda *_: pytest.fail("written"))
        before = on_disk.nbytes
        stepper, step = one(on_disk, numel=1025)
        assert on_disk.nbytes - before == 3 * 8192
        assert not list(stepper.states("a", 0))
    group, before = step()[0].group, on_disk.nbytes
    with pytest.raises(StorageError, match="free bytes"):
        stepper.adopt("b", [ShardSpec(1 << 50, torch.float32, False)], group)
    assert on_disk.nbytes == before
    stepper.adopt("b", [ShardSpec(1, torch.float32, False)], group)
    stepper.submit("a", [ShardStep(0, group, torch.ones(1025), None)]).wait()
    stepper.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_ends_steps(on_disk, monkeypatch, call):
    stepper, step = one(on_disk)
    stepper.adopt("b", [ShardSpec(20_000, torch.float32, True)], step()[0].group)
    stepper.submit("a", step()).wait()

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, call, fail)
        with pytest.raises(StorageError, match="EIO"):
            for _ in range(3):  # of a write that failed, the next step knows
                pending = stepper.submit("a", step())
                pending.wait()
    if call == "preadv":
        with pytest.raises(StorageError, match="EIO"):
            pending.wait()
    for _ in range(2):
        with pytest.raises(StorageError, match="EIO"):
            stepper.submit("a", step())
        with pytest.raises(StorageError, match=r"failed before: .*EIO"):
            stepper.submit("b", step())
    stepper.close()


def test_tiles_are_whole_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "TILE_BYTES", 8 * 2**20)
    for mib, tile in ((4, 8), (3, 6), (64, 8)):
        made = NvmeStore(NvmeConfig(path=str(tmp_path), request_mib=mib))
        stepper = made.stepper(AdamW([torch.nn.Parameter(torch.zeros(1))]))
        assert stepper._tile_bytes == tile * 2**20
        stepper.close()
        made.close()


def test_refuses_what_does_not_fit_before_anything_is_stepped(store):
    stepper, step = one(store, numel=100)
    (good,) = step()
    group = good.group
    for wrong, words in [
        (ShardStep(0, group, torch.ones(99), None), r"gradient of shard 0: expected 100 .*99"),
        (ShardStep(0, group, torch.ones(100), torch.ones(100)), "expected no master for shard 0"),
        (ShardStep(0, group, torch.ones(100), None, torch.ones(1)), "out of shard 0: expected 100"),
        (ShardStep(0, {**group, "amsgrad": True}, torch.ones(100), None), "max_exp_avg_sq"),
    ]:
        with pytest.raises(UsageError, match=words):
            stepper.submit("a", [wrong])
    with pytest.raises(UsageError, match="one step per shard"):
        stepper.submit("a", [good, good])
    with pytest.raises(KeyError):
        stepper.submit("b", [good])
    with pytest.raises(UsageError, match="expected a new block, found 'a'"):
        stepper.adopt("a", [], group)
    full = {"step": 1, "exp_avg": torch.ones(100), "exp_avg_sq": torch.ones(100)}
    for states, words in [
        ({"step": 1}, r"\['exp_avg', 'exp_avg_sq', 'step'\], found \['step'\]"),
        ({**full, "max_exp_avg_sq": torch.ones(100)}, "found .*max_exp_avg_sq"),
        ({**full, "exp_avg": torch.ones(3)}, "a: exp_avg: expected 100 elements, found 3"),
    ]:
        with pytest.raises(UsageError, match=words):
            stepper.set_states("a", 0, states)
    with pytest.raises(UsageError, match="a: master: expected 100 elements"):
        stepper.set_master("a", 0, torch.ones(3))
    assert not list(stepper.states("a", 0))
    stepper.adopt("c", [ShardSpec(5, torch.float32, False)], group)
    with pytest.raises(UsageError, match="found shard 0, whose master stays elsewhere"):
        stepper.master("c", 0)
    with pytest.raises(UsageError, match="expected a master for shard 0"):
        stepper.submit("c", [ShardStep(0, group, torch.ones(5), None)])
    half = ShardStep(0, group, torch.ones(5), torch.ones(5).bfloat16())
    with pytest.raises(UsageError, match="expected a master of torch.float32"):
        stepper.submit("c", [half])
    stepper.close()


def test_close_lets_steps_end_and_ends_threads(store):
    assert store.stepper(RMSprop([torch.nn.Parameter(torch.zeros(1))])) is None
    before = threads()
    stepper, _ = one(store, numel=100, kept=False)
    group = {**AdamW([torch.nn.Parameter(torch.zeros(1))]).param_groups[0], "lr": 0.5}
    master = torch.zeros(100)
    pending = stepper.submit("a", [ShardStep(0, group, torch.ones(100), master)])
    stepper.close()
    stepper.close()
    assert pending.done()
    assert (master < -0.4).all()
    assert threads() == before
    for use in (lambda: stepper.submit("a", []), lambda: stepper.master("a", 0)):
        with pytest.raises(UsageError, match="closed"):
            use()


def threads():
    names = [thread.name for thread in threading.enumerate()]
    return sum(name.startswith(("drivetrain-tiles", "drivetrain-step")) for name in names)


def test_outputs_are_asked_for_once_and_the_end_is_told(store):
    stepper, step = one(store)
    asked, told = [], []

    def out():
        asked.append(torch.zeros(20_000))
        return asked[-1]

    (plain,) = step()
    wanted = ShardStep(0, plain.group, plain.gradient, None, out)
    stepper.submit("a", [wanted], lambda: told.append(asked[0].clone())).wait()
    assert len(asked) == 1
    assert same_bits(told[0], stepper.master("a", 0))
    assert told[0].all()

    def broken():
        raise ValueError("no place for it")

    with pytest.raises(ValueError, match="no place"):
        stepper.submit("a", step(), broken).wait()
    stepper.close()


def test_an_error_in_arithmetic_or_an_output_is_the_step_s(store):
    stepper, step = one(store)
    (plain,), told = step(), []
    wanted = ShardStep(0, plain.group, plain.gradient, None, lambda: torch.zeros(3))
    pending = stepper.submit("a", [wanted], lambda: told.append(1))
    with pytest.raises(UsageError, match="out of shard 0: expected 20,000 elements, found 3"):
        pending.wait()
    stepper.close()
    assert not told
    stepper, step = one(store)
    sliced = ShardStep(0, step()[0].group, torch.ones(40_000)[::2], None)
    pending = stepper.submit("a", [sliced])
    for _ in range(2):
        with pytest.raises(UsageError, match="gradient to be contiguous"):
            pending.wait()
    with pytest.raises((UsageError, StorageError), match="gradient to be contiguous"):
        stepper.submit("a", step())
    stepper.close()


# --- threads of a process that ends ---


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

STEPS = """
import sys, torch
from drivetrain.store import ShardSpec, ShardStep
from drivetrain_offload.host import HostStore
from drivetrain_offload.options import NvmeConfig
from drivetrain_offload.nvme import NvmeStore
n = 1 << 20
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
group = optimizer.param_groups[0]
for store in HostStore(), NvmeStore(NvmeConfig(path=sys.argv[1])):
    stepper = store.stepper(optimizer)
    stepper.adopt('a', [ShardSpec(n, torch.float32, True)], group)
    for _ in range(20): stepper.submit('a', [ShardStep(0, group, torch.ones(n), None)])
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("code", "said"), [(LET_GO, ""), (ORDER, "stepped\n"), (STEPS, "")])
def test_the_interpreter_ends_while_threads_work(tmp_path, code, said):
    """The youngest pool ends first, and no tensor that is let go aborts."""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
