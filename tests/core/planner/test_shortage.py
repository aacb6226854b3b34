"""An allocator's error says who holds the memory of its rank, and the smallest change that fits."""

import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, find_executable_batch_size
from drivetrain.planner import auto
from forked_programs import run_python
from stacks import Residual

ASKED = 2**20
MOST = 8
"""Rows with which the model below gets memory; looks at it have fewer."""


def refuse():
    words = f"can't allocate memory: you tried to allocate {ASKED} bytes"
    raise RuntimeError(f"DefaultCPUAllocator: {words}")


class Refusing(nn.Tanh):
    def forward(self, x):
        inner = super().forward(x)
        if len(x) > MOST:
            refuse()
        return inner


class Failing(torch.optim.AdamW):
    fails = False

    def step(self, closure=None):
        if self.fails:
            refuse()
        return super().step(closure)


def prepared(width=32, **options):
    """Return an accelerator, a model and an optimizer that have taken a step."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, config={"report": False}, **options)
    model = nn.Sequential(*(Residual(width, 4 * width, act=Refusing) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, Failing(model.parameters()))
    accelerator.backward(model(torch.ones(2, width)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer


def note_of(error):
    (note,) = error.value.__notes__
    return note


def bytes_of(note, kind):
    """Return the size in words of a kind, and what is promised."""
    line = re.search(rf"  {kind}: ([^,\n]+)(?:, cost\(\) promises ([^,\n]+))?$", note, re.MULTILINE)
    return line.groups()


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_error_has_one_note_wherever_it_leaves_a_step(where):
    accelerator, model, optimizer = prepared()
    x = torch.ones(MOST + 1 if where == "forward" else MOST, 32, requires_grad=True)
    x.register_hook(lambda gradient: refuse() if where == "backward" else None)
    optimizer.optimizer.fails = where == "step"
    refused = pytest.raises(RuntimeError, match="^DefaultCPUAllocator")
    with refused as error, accelerator.accumulate():
        accelerator.backward(model(x).square().mean())
        optimizer.step()
    note = note_of(error)
    assert note.startswith("out of memory on rank 0 (cpu): ")
    assert "1.0 MiB more asked for" in note
    held, promised = bytes_of(note, "parameters")
    assert held == promised == "130.5 KiB"  # 4 blocks of 8,352 numbers
    gradients, promised = bytes_of(note, "gradients")
    assert (gradients == "0 B") == (where == "forward")
    assert (gradients == promised) == (where == "step")
    assert "a whole step needs" in note
    accelerator.end_training()


def test_a_step_has_no_batch_in_memory():
    accelerator, model, optimizer = prepared()
    x = torch.ones(MOST, 32)
    held = weakref.ref(x)
    accelerator.backward(model(x).square().mean())
    del x
    assert held() is None
    optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_account_is_that_of_the_rank(strategy):
    accelerator, model, _ = prepared(width=256, strategy=strategy)
    with pytest.raises(RuntimeError, match="allocate") as error, accelerator.gathered(model):
        model(torch.ones(MOST + 1, 256))
    note = note_of(error)
    assert note.startswith(f"out of memory on rank {accelerator.process_index} ")
    for kind in ("parameters", "optimizer states"):
        held, promised = bytes_of(note, kind)
        assert held == promised
    gathered, _ = bytes_of(note, "gathered for use")
    assert (gathered != "0 B") == (strategy == "zero3")
    accelerator.end_training()


def named(lines):
    """Return the words of the change that lines name; "" where they name none."""
    _, found, words = "\n".join(lines).partition("the smallest change that fits, with ")
    return " ".join(words.split()[2:]) if found else ""


@pytest.mark.ranks(2)
def test_where_more_is_lacking_the_change_is_larger():
    accelerator, *_ = prepared(width=256)
    (entry,) = accelerator._state.models
    accelerator._state.last_call = (torch.ones(16, 256, 256),), {}
    ladder = auto.Ladder(entry, accelerator._state, now=0, asked=0, beside=0)
    (whole, *_) = ladder.lines(0)
    needed = float(re.search(r"needs ([\d.]+) MiB", whole)[1]) * 2**20
    (fits,) = ladder.lines(round(needed) + 2**20)
    assert "and fits: look for another process" in fits
    rooms = (needed * share / 100 for share in range(99, 0, -1))
    changes = list(dict.fromkeys(named(ladder.lines(round(room))) for room in rooms))
    assert changes[0].startswith("recompute: {mode: ")
    kinds = [re.match(r"recompute: \{|accumulation|strategy|$", each)[0] for each in changes]
    order = list(dict.fromkeys(kinds))
    assert order == ["recompute: {", "accumulation", "strategy", ""]
    assert "accumulation: 16 and batches of a rank with 1 in place of 16 samples" in changes
    assert any(re.match(r"strategy: name: \w+ recompute: .* accumulation: 16 ", c) for c in changes)
    *_, last = ladder.lines(0)
    assert last.startswith("no known change fits, the least needs ")


def test_a_language_model_may_need_its_loss_in_pieces():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=64, vocab_size=4096)
    accelerator = Accelerator(cpu=True, config={"report": False})
    accelerator.prepare(transformers.GPT2LMHeadModel(config))
    (entry,) = accelerator._state.models
    words = torch.zeros(1, 64, dtype=torch.long)
    named_words = {"input_ids": words, "labels": words, "use_cache": False}
    accelerator._state.last_call = (), named_words
    ladder = auto.Ladder(entry, accelerator._state, now=0, asked=0, beside=0)
    (whole, *_) = ladder.lines(0)
    needed = float(re.search(r"needs ([\d.]+) MiB", whole)[1]) * 2**20
    assert named(ladder.lines(round(needed) - (800 << 10))) == "loss: chunked"


def test_tries_of_batch_sizes_explain_nothing():
    _accelerator, model, _ = prepared()
    errors = []

    @find_executable_batch_size(starting_batch_size=MOST + 1)
    def train(size):
        try:
            return model(torch.ones(size, 32))
        except RuntimeError as error:
            errors.append(error)
            raise

    assert len(train()) == MOST
    assert [hasattr(error, "__notes__") for error in errors] == [False]


def test_a_snapshot_of_the_allocator_is_left_in_the_folder(monkeypatch, tmp_path):
    world = SimpleNamespace(rank=3, device=torch.device("cuda"))
    run = SimpleNamespace(memory_snapshot=str(tmp_path / "new"))
    state = SimpleNamespace(world=world, config=SimpleNamespace(run=run))
    written = []
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", written.append)
    assert auto._snapshot(state) == tmp_path / "new" / "rank-3.pickle"
    assert written == [str(tmp_path / "new" / "rank-3.pickle")]
    assert (tmp_path / "new").is_dir()


SCRIPT = """
import resource, psutil, torch
from torch import nn
from drivetrain import Accelerator
accelerator = Accelerator(cpu=True, config={"report": False})
model = accelerator.prepare(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
accelerator.backward(model(torch.ones(2, 64)).mean())
x = torch.ones(1, 64).expand(2**24, 64)
limit = psutil.Process().memory_info().vms + (500 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
model(x)
"""


def test_the_system_refuses_memory(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_python("train.py", folder=tmp_path)
    assert done.returncode == 1
    assert "RuntimeError: [enforce fail" in done.stderr
    assert "4.0 GiB more asked for" in done.stderr
    change = r"fits, with .*:\n  accumulation: \d+\n  and batches of a rank with \d+ "
    assert re.search(change, done.stderr)
