"""A model under strategies with and without stores, trained and compared to the last bit."""

import torch
from torch import nn
from torch.optim import AdamW

from drivetrain import Accelerator
from stacks import Residual, Stack

STEPS = 4
WORDS, WIDTH = 31, 24


class Net(Stack):
    """A tied head, a frozen layer, a parameter of no dims, one of odd size, one that is unused."""

    def __init__(self):
        first, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        blocks = (Residual(WIDTH, 41, act=nn.GELU, norm=nn.LayerNorm) for _ in range(3))
        super().__init__(blocks, first=first, last=last, tied=True)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(5))

    def body(self, x):
        return self.frozen(super().body(x)) * self.scale


class Free(Net):
    """The same without frozen parameters, which stages without divided parameters leave alone."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(True)


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (4, 7), generator=generator)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten().roll(1))


def adamw(model, **options):
    parameters = [p for p in model.parameters() if p.requires_grad]
    wide = [p for p in parameters if p.dim() > 1]
    rest = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-2, **options)


class Training:
    """One model under one strategy."""

    def __init__(self, strategy, *, make=adamw, window=1, model=Net, **options):
        self.accelerator = Accelerator(
            strategy=strategy, cpu=True, gradient_accumulation_steps=window, **options
        )
        torch.manual_seed(5)
        given = model()
        optimizer = make(given)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        prepared = self.accelerator.prepare(given, optimizer, schedule)
        self.model, self.optimizer, self.schedule = prepared
        self.window = window
        self.losses = []

    def micro(self, seed, *, clip=None, to_none=True):
        rank = self.accelerator.process_index
        with self.accelerator.accumulate(self.model):
            loss = loss_of(self.model, 100 * seed + rank)
            self.accelerator.backward(loss)
            self.losses.append(loss.item())
            if clip and self.accelerator.sync_gradients:
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.losses.append(float(norm))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=to_none)

    def steps(self, count=STEPS, *, first=0, **how):
        for micro in range(count * self.window):
            self.micro(first * self.window + micro, **how)
        return self

    def found(self):
        weights = self.accelerator.get_state_dict(self.model)
        state = self.optimizer.state_dict()["state"]
        return self.losses, weights, state

    def close(self):
        found = self.found()
        self.accelerator.free_memory()
        return found


def assert_same(one, other):
    assert str(one[0]) == str(other[0])  # nan is nan
    assert list(one[1]) == list(other[1])
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=0)
    assert one[2].keys() == other[2].keys()
    for number, state in one[2].items():
        assert state.keys() == other[2][number].keys()
        for key, value in state.items():
            mine, theirs = map(torch.as_tensor, (value, other[2][number][key]))
            assert torch.equal(mine.view(-1), theirs.view(-1)), key


STRATEGIES = {
    "zero1": {"name": "zero1", "bucket_mib": 0.004},
    "zero2": {"name": "zero2", "bucket_mib": 0.004},
    "zero2 parameter": {"name": "zero2", "partition": "parameter"},
    "zero3": {"name": "zero3", "keep_below": 30, "own_unit_from": 500},
    "fsdp": {"name": "fsdp", "unit_from": 500},
    "fsdp grad": {"name": "fsdp", "unit_from": 500, "sharding": "grad"},
}


def offloads(name, path):
    yield {"optimizer": "cpu"}
    yield {"optimizer": "nvme", "path": path}
    yield {"optimizer": "nvme", "path": path, "ratio": 0.5}
    if "params" in name or name.startswith(("zero3", "fsdp")):
        yield {"optimizer": "cpu", "params": "cpu"}
        yield {"optimizer": "nvme", "params": "nvme", "path": path}
        yield {"optimizer": "cpu", "params": "nvme", "path": path}
