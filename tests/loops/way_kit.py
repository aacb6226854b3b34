"""What a way of a loop is given: the same lines run on ranks and, in plain torch, in one process.

A *way* is a small function that touches gradients, states, weights or loaders as scripts do. It
notes what must be equal: losses, norms, and at its end the weights. A refusal with a reason is the
other right end.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from cells import CRASHED, DIFFERENT, EQUAL, REFUSED, Outcome
from drivetrain import Accelerator, broadcast_object_list
from drivetrain.errors import DrivetrainError
from stacks import Residual, Stack

Way = Callable[["Loop"], None]

WORDS, WIDTH, LENGTH, ROWS = 32, 8, 4, 8

RELATIVE, ABSOLUTE = 1e-8, 1e-9
"""Two orders above the rounding of fp64 in a few steps."""


WayBlock = partial(Residual, WIDTH, 16)


class Words(Stack):
    """A table of words, blocks and a head: tensor and pipeline parallelism can divide it."""

    def __init__(self, blocks: int = 2) -> None:
        first, last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        super().__init__((WayBlock() for _ in range(blocks)), first=first, last=last)
        self.example_inputs = torch.arange(2 * LENGTH).view(2, LENGTH)


class Loop:
    """A training that is the script's, under a strategy or in one process.

    Args:
        strategy: name and options; None: plain torch in one process.

    Attributes:
        accelerator: None in one process.
        notes: what is compared, by name.
    """

    def __init__(self, strategy: Mapping[str, Any] | None) -> None:
        self.strategy = strategy
        self.accelerator: Accelerator | None = None
        self.notes: dict[str, Tensor] = {}

    def begin(self, **options: Any) -> None:
        """Make the Accelerator with options; a way that needs none need not call this."""
        if self.strategy is not None:
            self.accelerator = Accelerator(strategy=dict(self.strategy), cpu=True, **options)

    @property
    def alone(self) -> bool:
        """Whether this is one process."""
        return self.strategy is None

    def prepare(self, *objects: Any) -> Any:
        """Return the objects as a script goes on with them."""
        if self.alone:
            return objects[0] if len(objects) == 1 else objects
        if self.accelerator is None:
            self.begin()
        return self.accelerator.prepare(*objects)

    def model(self, blocks: int = 2) -> Words:
        """Return a model, always with the same values."""
        torch.manual_seed(0)
        return Words(blocks)

    def ready(
        self, make: Callable[[nn.Module], Optimizer] = lambda m: SGD(m.parameters(), lr=0.5)
    ) -> tuple[nn.Module, Optimizer]:
        """Return a prepared model and its optimizer."""
        model = self.model()
        return self.prepare(model, make(model))

    def batch(self, number: int, rows: int = ROWS) -> Tensor:
        """Return the rows of a batch that this data-parallel rank trains: all in one process."""
        words = torch.randint(0, WORDS, (rows, LENGTH), generator=_seeded(number))
        return self.part(words)

    def part(self, whole: Tensor) -> Tensor:
        """Return the rows of a batch that this data-parallel rank trains: all in one process."""
        if self.alone:
            return whole
        axis = self.accelerator.mesh["dp"]
        return whole.chunk(axis.size)[axis.position]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward as the script does."""
        if self.alone:
            loss.backward(**options)
        else:
            self.accelerator.backward(loss, **options)

    def step(self, optimizer: Optimizer, loss: Tensor, **options: Any) -> None:
        """Take a step along the gradients of a loss."""
        self.backward(loss, **options)
        optimizer.step()
        optimizer.zero_grad()

    def steps(self, model: nn.Module, optimizer: Optimizer, count: int = 2) -> Iterator[int]:
        """Yield the number of each step when it has gradients; note the weights at the end."""
        for step in range(count):
            self.backward(self.loss(model, self.batch(step)))
            yield step
            optimizer.step()
            optimizer.zero_grad()
        self.weights(model)

    def train(self, model: nn.Module, optimizer: Optimizer, count: int = 3) -> None:
        """Take plain steps; note the weights at the end."""
        for _ in self.steps(model, optimizer, count):
            pass

    def accumulate(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context of a micro-batch."""
        return nullcontext() if self.alone else self.accelerator.accumulate(model)

    def weights(self, *models: nn.Module) -> None:
        """Note all weights and buffers of models."""
        for index, model in enumerate(models):
            whole = model.state_dict() if self.alone else self.accelerator.get_state_dict(model)
            for name, tensor in whole.items():
                self.note(f"{name} of model {index}", tensor)

    def folder(self) -> Path:
        """Return an empty folder that all ranks see."""
        return Path(broadcast_object_list([tempfile.mkdtemp()])[0])

    def note(self, name: str, value: Tensor | float) -> None:
        """Note a number that one process has as well."""
        whole = torch.as_tensor(value).detach().cpu().numpy()  # also of a tensor in pieces
        self.notes[name] = torch.from_numpy(whole.copy())


Part = Callable[[Loop, int, nn.Module], object]
"""A part of a way: it gets the number of a step, and the model."""


def between(part: Part) -> Way:
    """Return the way of three steps with this part between backward and step."""

    @wraps(part)
    def way(loop: Loop) -> None:
        model, optimizer = loop.ready()
        for step in loop.steps(model, optimizer, 3):
            part(loop, step, model)

    return way


def after(part: Part) -> Way:
    """Return the way of three steps with this part behind each."""

    @wraps(part)
    def way(loop: Loop) -> None:
        model, optimizer = loop.ready()
        for step in range(3):
            loop.step(optimizer, loop.loss(model, loop.batch(step)))
            part(loop, step, model)
        loop.weights(model)

    return way


def hooked(loop: Loop, hook: Callable[[Tensor], Any], *, before: bool, steps: int = 3) -> None:
    """Train with a hook on every parameter, registered before or after ``prepare``."""
    model = loop.model()
    given = list(model.parameters())
    if before:
        for parameter in given:
            parameter.register_hook(hook)
    model, optimizer = loop.prepare(model, SGD(given, lr=0.5))
    if not before:
        for parameter in model.parameters():
            parameter.register_hook(hook)
    loop.train(model, optimizer, steps)


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@contextmanager
def _ended(loop: Loop) -> Iterator[None]:
    try:
        yield
    finally:
        if loop.accelerator is not None:
            loop.accelerator.free_memory()


@contextmanager
def in_doubles() -> Iterator[None]:
    """Let models and batches be made in fp64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run_on_rank(way: Way, strategy: Mapping[str, Any]) -> Outcome:
    """Take a way under one strategy on this rank, and compare with one process."""
    with in_doubles():
        expected, found = Loop(None), Loop(strategy)
        try:
            way(expected)
        except Exception as error:
            return Outcome(CRASHED, f"in one process: {type(error).__name__}: {error}")
        try:
            with _ended(found):
                way(found)
        except DrivetrainError as error:
            return Outcome(REFUSED, f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome(CRASHED, f"{type(error).__name__}: {error}")
    text = "; ".join(differences(found.notes, expected.notes))
    return Outcome(DIFFERENT, text) if text else Outcome(EQUAL)


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Sequence[str]:
    """Return in words what is not equal."""
    if found.keys() != expected.keys():
        return [f"found notes {sorted(found)}, in one process {sorted(expected)}"]
    return [
        f"{name} is {found[name].flatten()[:3].tolist()}, in one process "
        f"{value.flatten()[:3].tolist()}"
        for name, value in expected.items()
        if found[name].shape != value.shape
        or not torch.allclose(
            found[name].double(), value.double(), RELATIVE, ABSOLUTE, equal_nan=True
        )
    ]
