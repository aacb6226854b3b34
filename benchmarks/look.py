"""Times one look at a model: what an operation costs on fake tensors, and remembered.

::

    python benchmarks/look.py

Times are CPU times of one thread in microseconds, the least of several rounds. ``first`` is an
operation on fake tensors in a process that has never met it, ``fake`` the same operation on fake
tensors later, and ``remembered`` an operation on tensors without values whose result is known.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from drivetrain.model import ValuelessTensor, look_at, results

ROUNDS, CALLS = 9, 30
ROWS, TOKENS, WIDTH, HEADS = 2, 64, 128, 4
CPU = torch.device("cpu")

Operation = Callable[..., object]
X = (ROWS, TOKENS, WIDTH)
Q = (ROWS, HEADS, TOKENS, WIDTH // HEADS)
OPERATIONS: dict[str, tuple[Operation, Sequence[tuple[int, ...]]]] = {
    "linear": (F.linear, [X, (WIDTH, WIDTH)]),
    "gelu": (F.gelu, [X]),
    "add": (torch.add, [X, X]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (WIDTH,), w, w), [X, (WIDTH,)]),
    "view, transpose": (lambda x: x.view(ROWS, TOKENS, HEADS, -1).transpose(1, 2), [X]),
    "split": (lambda x: x.split(WIDTH // HEADS, -1), [X]),
    "attention": (F.scaled_dot_product_attention, [Q, Q, Q]),
    "softmax": (lambda x: F.softmax(x, -1), [Q]),
    "embedding": (lambda w: F.embedding(torch.zeros(X[:2]).long(), w), [(1000, WIDTH)]),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(TOKENS).long()), [(TOKENS, 1000)]),
}


def microseconds(call: Callable[[], object], calls: int) -> float:
    started = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - started) / calls * 1e6


def on_fakes(operation: Operation, tensors: Sequence[Tensor]) -> Callable[[], object]:
    def given(tensor: Tensor) -> results.GivenTensor:
        places.append(tensor)
        return results.GivenTensor(len(places) - 1, results.facts_of(tensor))

    places: list[Tensor] = []
    frozen = results.freeze(tuple(tensors), given)
    surroundings = (False, torch.get_default_dtype())
    empty = results.freeze({}, given)
    return lambda: results.computed(operation, frozen, empty, surroundings)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'microseconds':16}{'first':>10}{'fake':>10}{'remembered':>12}")
    sums = [0.0, 0.0, 0.0]
    for name, (operation, shapes) in OPERATIONS.items():
        fake = on_fakes(operation, [torch.empty(shape) for shape in shapes])
        empty = [ValuelessTensor.like(shape, torch.float32, CPU) for shape in shapes]
        first = microseconds(fake, 1)
        later = min(microseconds(fake, CALLS) for _ in range(ROUNDS))
        again = min(microseconds(lambda: operation(*empty), CALLS) for _ in range(ROUNDS))  # noqa: B023
        sums = [a + b for a, b in zip(sums, (first, later, again), strict=True)]
        print(f"{name:16}{first:>10.0f}{later:>10.0f}{again:>12.0f}")
    print(
        f"{'mean':16}" + "{:>10.0f}{:>10.0f}{:>12.0f}".format(*(s / len(OPERATIONS) for s in sums))
    )
    model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=WIDTH, n_head=HEADS, vocab_size=1000))
    inputs = {"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)}
    for when in ("first", "later"):
        started = time.thread_time()
        look = look_at(model, (), inputs)
        taken = time.thread_time() - started
        count = len(look.operations)
        print(f"a look at GPT-2, {when}: {count} operations, {taken * 1e3:.0f} ms, ", end="")
        print(f"{taken / count * 1e6:.0f} us each")


if __name__ == "__main__":
    main()
