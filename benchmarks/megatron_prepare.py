"""Times ``prepare()`` of large decoders over two tensor-parallel ranks, and the memory it takes.

::

    python benchmarks/megatron_prepare.py
    python benchmarks/megatron_prepare.py --only 7b-block

The loader has rows of 2048 tokens, and the model is looked at with two of them. ``7b-block`` is one
block of Llama 7B, embeddings and head; ``1b`` is a whole model of 1.1 billion parameters; both have
bf16 weights, and both ranks hold the whole model before ``prepare()``, as a script that builds it
does. ``7b-plan`` is all of Llama 7B on the meta device, of which only the plan is made. Times are
wall times of the slower rank; memory is the peak of resident memory over the model itself.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import torch
from live_memory import forget_peak, resident
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drivetrain import Accelerator
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.cost import CellLayout

RANKS, TOKENS = 2, 2048
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
SIZES: dict[str, dict[str, int]] = {
    "7b-block": {**LLAMA_7B, "num_hidden_layers": 1},
    "7b-plan": {**LLAMA_7B, "num_hidden_layers": 32},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}


def measured(name: str) -> dict[str, Any]:
    """Prepare one model on this rank; return parameters, seconds and bytes."""
    torch.set_num_threads(1)
    accelerator = Accelerator(strategy={"name": "megatron", "tp": RANKS}, cpu=True)
    planned = name.endswith("plan")
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES[name])).to(torch.bfloat16)
    if not planned:
        model = in_memory(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    tokens = torch.arange(4 * TOKENS).view(4, TOKENS) % 32000
    loader = DataLoader(TensorDataset(tokens, tokens), 2, collate_fn=as_text)
    forget_peak()
    before = resident("VmRSS")
    started = time.perf_counter()
    if planned:
        CellLayout.of(MegatronConfig(tp=RANKS), model, accelerator.run)
    else:
        accelerator.prepare(model, loader)
    seconds = time.perf_counter() - started
    return {"parameters": count, "seconds": seconds, "bytes": resident("VmHWM") - before}


def in_memory(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model with zeros, which make no difference to a plan."""
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    return model


def as_text(rows: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """Return rows as a script for a language model has them."""
    tokens, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def on_ranks(name: str) -> list[dict[str, Any]]:
    """Measure on all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(RANKS):
        given = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        command = [sys.executable, __file__, "--rank", name]
        environment = {**os.environ, **{key: str(value) for key, value in given.items()}}
        children.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]


def main() -> None:
    """Measure each model, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(measured(arguments.rank)), flush=True)
        return
    for name in arguments.only:
        found = on_ranks(name)
        seconds, memory = (max(rank[key] for rank in found) for key in ("seconds", "bytes"))
        billions = found[0]["parameters"] / 1e9
        print(f"{name}: {billions:.2f} billion parameters, {seconds:.1f} s, ", end="")
        print(f"{memory / 2**20:.0f} MiB over the model")


if __name__ == "__main__":
    main()
