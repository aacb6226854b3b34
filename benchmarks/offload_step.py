"""Times training steps with optimizer state in stores against the same strategy without.

::

    python benchmarks/offload_step.py --path DIRECTORY
    drivetrain launch --nproc-per-node 2 benchmarks/offload_step.py --path DIRECTORY

Every way trains a model of its own; steps of all ways alternate, in an order that changes, so that
each step is timed beside its neighbors. A ratio is the median over rounds of the quotient within a
round. A step is forward, backward, clipping, optimizer and clearing; the time until parameters are
there for the next step counts with that. On a GPU, where there is one, ``memory`` has everything
there, and the tokens per second of ``cpu`` should be at least 0.85 of its own.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from drivetrain import Accelerator

WIDTH, WORDS, TOKENS = 768, 4096, 64


def model_of(layers: int) -> nn.Module:
    """Return a transformer of about seven million parameters per layer."""
    layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), body, nn.Linear(WIDTH, WORDS))


def way(strategy: dict[str, object], layers: int, batch: int, low: bool) -> Callable[[], float]:
    """Return a function that takes a step and returns its seconds."""
    precision = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}} if low else {}
    gpu = torch.cuda.is_available()
    accelerator = Accelerator(strategy=strategy, cpu=not gpu, **precision)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = model_of(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)

    def loss_of(ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    def step() -> float:
        ids = torch.randint(WORDS, (batch, TOKENS), device=accelerator.device)
        start = time.perf_counter()
        accelerator.backward(loss_of(ids))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def main() -> None:
    """Measure, and print a line per way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--path", required=True, help="directory on a local disk")
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--low", action="store_true", help="bf16 parameters with fp32 masters")
    arguments = parser.parse_args()
    base = {"name": arguments.strategy}
    disk = {"optimizer": "nvme", "path": arguments.path}
    options = {
        "memory": base,
        "cpu": {**base, "offload": {"optimizer": "cpu"}},
        "nvme": {**base, "offload": {**disk, "store_options": {"release_memory": False}}},
    }
    ways = {
        name: way(strategy, arguments.layers, arguments.batch, arguments.low)
        for name, strategy in options.items()
    }
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 2):
        names = list(ways)
        order.shuffle(names)
        for name in names:
            # A step waits for the update of the step before: two in a row make it whole.
            found = ways[name]() + ways[name]()
            if number >= 2:
                seconds[name].append(found / 2)
    for name, found in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(found, seconds["memory"], strict=True))
        median = statistics.median(found)
        speed = arguments.batch * TOKENS / median
        print(f"{name:8} {median * 1e3:8.0f} ms  {speed:8.0f} tokens/s  {ratio:.3f} of memory")


if __name__ == "__main__":
    main()
