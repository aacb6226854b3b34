"""Fingerprints of trainings: equal before and after a change of the code that changes no result.

For each strategy in many configurations, on 1 to 4 ranks, over awkward models: the losses and norms
to the last bit, the sequence of operations (operation, label, elements, dtype) of every
communicator, the ledger of bytes sent, and the bytes of the checkpoint, which holds weights and
optimizer state. Digests depend on torch and on the processor, so they are compared on one machine::

    python tests/fingerprint.py record before.json
    python tests/fingerprint.py check before.json              # exit status 1 where they differ
    python tests/fingerprint.py check before.json --only zero3 --ranks 2

``--only`` takes parts of names: those of configurations and of models, as in ``zero3/tied``.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "shared"))  # a script does not read pytest's paths

WINDOW, STEPS = 2, 3
DISK = "DISK"
"""Stands for a folder that is there during one run only."""

MASTERS = {"mixed_precision": "bf16", "config": {"dtypes": {"param": "bf16"}}}

AWKWARD = (
    "mlp", "tied", "adapted", "first_frozen", "unused", "branching", "odd_shapes", "transposed",
    "mixed_dtypes", "batchnorm", "called_twice", "two_outputs", "recomputed",
)  # fmt: skip
FEW = ("mlp", "tied", "adapted", "odd_shapes")
WORDS = ("gpt2", "llama-gqa", "dropout")
LOSS_INSIDE = ("gpt2-loss", "llama-gqa-loss")

ALL, PAIRS, FOUR = (1, 2, 3, 4), (1, 2), (4,)


def configurations() -> Iterator[tuple[str, Any, dict[str, Any], tuple[str, ...], tuple[int, ...]]]:
    """Yield (name, strategy, further arguments of Accelerator, models, numbers of ranks)."""
    for name in ("ddp", "zero1", "zero2", "zero3", "fsdp", "megatron"):
        yield name, name, {}, AWKWARD, ALL
    yield (
        "ddp-powersgd",
        {"name": "ddp", "hook": "powersgd", "powersgd_start_step": 1},
        {},
        FEW,
        (2, 3),
    )
    for stage in ("zero1", "zero2", "zero3"):
        whole = {"name": stage, "partition": "parameter"}
        yield f"{stage}-whole", whole, {}, FEW, (1, 2, 3)
        yield f"{stage}-masters", stage, MASTERS, FEW, (1, 2, 4)
        yield f"{stage}-fp16", stage, {"mixed_precision": "fp16"}, FEW, (2,)
        yield f"{stage}-buckets", {"name": stage, "bucket_mib": 0.001}, {}, FEW, (2, 3)
    yield "zero2-local", {"name": "zero2", "accumulate": "local"}, {}, FEW, (1, 2, 3)
    sharded = {"name": "zero3", "keep_below": 0}
    yield "zero3-all", sharded, {}, AWKWARD, (1, 2, 3)
    yield "zero3-words", sharded, {}, ("gpt2",), (2,)
    near = {**sharded, "reshard_after_forward": 2}
    yield "zero3-near", near, {}, FEW, FOUR
    for name, options, ranks in (
        ("hybrid", {"sharding": "hybrid", "shard_size": 2}, FOUR),
        ("hybrid-local", {"sharding": "hybrid", "shard_size": 2, "accumulate": "local"}, FOUR),
        ("grad", {"sharding": "grad"}, (2,)),
        ("kept", {"reshard_after_forward": False, "live_units": 1}, (3,)),
        ("local", {"accumulate": "local"}, (1, 2)),
    ):
        yield f"fsdp-{name}", {"name": "fsdp", **options}, {}, FEW, ranks
    yield "fsdp-masters", "fsdp", MASTERS, FEW, PAIRS
    yield "fsdp-words", "fsdp", {}, ("gpt2", "llama-gqa"), (2,)
    stores: tuple[tuple[str, dict[str, Any]], ...] = (
        ("cpu", {"optimizer": "cpu"}),
        ("nvme", {"optimizer": "nvme", "path": DISK}),
        ("delayed", {"optimizer": "cpu", "delayed": True}),
        ("half", {"optimizer": "cpu", "ratio": 0.5}),
    )
    for stage in ("zero1", "zero2", "zero3", "fsdp"):
        for name, section in stores:
            strategy = {"name": stage, "offload": section}
            yield f"{stage}-{name}", strategy, {}, FEW, PAIRS
        yield f"{stage}-cpu-masters", {"name": stage, "offload": stores[0][1]}, MASTERS, FEW, PAIRS
        yield f"{stage}-nvme-masters", {"name": stage, "offload": stores[1][1]}, MASTERS, FEW, (2,)
    everything = {"optimizer": "nvme", "params": "nvme", "path": DISK}
    yield "zero3-params", {**sharded, "offload": everything}, {}, FEW, PAIRS
    yield "fsdp-params", {"name": "fsdp", "offload": everything}, MASTERS, FEW, PAIRS
    yield "offload", {"name": "offload", "optimizer": "cpu"}, {}, FEW, PAIRS
    for name, cell, ranks in (
        ("tp2", {"tp": 2}, (2, 4)),
        ("tp2-sequence", {"tp": 2, "sequence_parallel": True}, (2, 4)),
        ("tp4", {"tp": 4}, FOUR),
        ("pp2", {"pp": 2}, (2, 4)),
        ("pp2-gpipe", {"pp": 2, "schedule": "gpipe"}, (2,)),
        ("pp2-interleaved", {"pp": 2, "chunks": 2, "schedule": "interleaved"}, (2,)),
        ("pp2-zb-h1", {"pp": 2, "schedule": "zb-h1"}, (2,)),
        ("pp4", {"pp": 4}, FOUR),
        ("tp2-pp2", {"tp": 2, "pp": 2}, FOUR),
        ("tp2-zero3", {"tp": 2, "data_parallel": {"name": "zero3", "keep_below": 0}}, FOUR),
        ("pp2-zero1", {"pp": 2, "data_parallel": "zero1"}, FOUR),
    ):
        models = (*WORDS, *LOSS_INSIDE) if "pp" in cell else (*FEW, *WORDS)
        yield f"megatron-{name}", {"name": "megatron", **cell}, {}, models, ranks


# --- one rank ---


class Recorder:
    """Notes what communicators are asked for; ``digests`` returns it, one digest for each."""

    def __init__(self) -> None:
        from drivetrain.collectives import Communicator

        self._seen: dict[int, list[str]] = {}
        self._axes: dict[int, Any] = {}
        inner, recorder = Communicator._header, self

        def noted(communicator: Any, call: Any, tensor: Any) -> Any:
            if header := inner(communicator, call, tensor):
                seen = recorder._seen.setdefault(id(communicator), [])
                recorder._axes[id(communicator)] = communicator  # alive, so that ids stay its own
                dtype = "parts" if tensor is None else tensor.dtype
                seen.append(f"{call.operation} {call.label} {header.elements} {dtype}")
            return header

        Communicator._header = noted  # type: ignore[method-assign]

    def digests(self) -> dict[str, str]:
        """Return a digest of each communicator's operations, and forget them."""
        found: dict[str, list[str]] = defaultdict(list)
        for key, seen in self._seen.items():
            axis = self._axes[key].axis.name
            found[axis].append(f"{len(seen)} {_digest(chr(10).join(seen).encode())}")
        self._seen.clear()
        self._axes.clear()
        return {axis: " ".join(sorted(digests)) for axis, digests in sorted(found.items())}


def rank_main(chosen: list[str], folder: Path) -> None:
    """Train everything on this rank; write what it found to a file of the folder."""
    import torch

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recorder = Recorder()
    found = {}
    for name, given, options, models, ranks in configurations():
        strategy = json.loads(json.dumps(given).replace(DISK, str(folder / "disk")))
        for model in models:
            key = f"{name}/{model}/{size}"
            if size in ranks and key in chosen:
                scratch = folder / key.replace("/", "-")
                found[key] = fingerprint(model, strategy, options, scratch, recorder)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def fingerprint(
    model_name: str, strategy: Any, options: Mapping[str, Any], scratch: Path, recorder: Recorder
) -> dict[str, Any]:
    """Return the fingerprint of one training, or the error that refuses it."""
    import numpy
    import torch

    from drivetrain import Accelerator
    from drivetrain.errors import DrivetrainError

    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    recorder.digests()
    accelerator = None
    found: dict[str, Any] = {}
    try:
        accelerator = Accelerator(
            strategy=strategy, cpu=True, gradient_accumulation_steps=WINDOW, **options
        )
        found["values"] = _train(accelerator, model_name)
        accelerator.save_state(str(scratch))
        accelerator.wait_for_everyone()
        sent = accelerator.traffic.sent()
        found["ledger"] = {" ".join(key): count for key, count in sorted(sent.items())}
        found["operations"] = recorder.digests()
        if accelerator.is_main_process:
            found["checkpoint"] = _digest_of_files(scratch)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(scratch)
    except DrivetrainError as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    if accelerator is not None:
        accelerator.free_memory()
    return found


def _train(accelerator: Any, name: str) -> list[str]:
    """Train for a few steps; return losses and norms as hexadecimal floats."""
    import torch

    model, loss_of = _model(name)
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank = accelerator.mesh["dp"].rank
    values = []
    for step in range(STEPS):
        for micro_batch in range(WINDOW):
            with accelerator.accumulate(model):
                loss = loss_of(model, WINDOW * step + micro_batch, rank)
                values.append(loss.detach())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    values.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
    return [float(value).hex() for value in values]


def _model(name: str) -> tuple[Any, Any]:
    """Return a model and the function (model, batch number, rank) -> loss."""
    import torch
    import torch.nn.functional as F

    from drivetrain.testing.models import CASES
    from huggingface_models import ARCHITECTURES, VOCABULARY, logits_of, token_batch

    if name in CASES:
        case = CASES[name]
        return case.build(), lambda model, step, rank: case.loss(model, case.batch(step, rank))

    def loss_of(model: Any, step: int, rank: int) -> Any:
        tokens = token_batch(100 * step + rank, rows=4)
        if name in LOSS_INSIDE:
            return model(input_ids=tokens, labels=tokens).loss
        logits = logits_of(model(input_ids=tokens))
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.reshape(-1))

    torch.manual_seed(7)
    if name == "dropout":
        return ARCHITECTURES["gpt2"](4, dropout=0.1), loss_of
    return ARCHITECTURES[name.removesuffix("-loss")](4), loss_of


def _digest_of_files(folder: Path) -> str:
    """Return a digest of a checkpoint's files; versions of libraries in the manifest left out."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.name == "manifest.json":
            manifest = json.loads(path.read_text())
            del manifest["libraries"], manifest["sha256"]
            lines.append(json.dumps(manifest, sort_keys=True))
        elif path.is_file():
            lines.append(f"{path.relative_to(folder)} {_digest(path.read_bytes())}")
    return _digest("\n".join(lines).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# --- all ranks ---


def take(only: list[str], sizes: list[int]) -> dict[str, Any]:
    """Return all fingerprints by configuration/model/ranks."""
    found: dict[str, Any] = {}
    for size in sizes:
        chosen = [
            key
            for name, _, _, models, ranks in configurations()
            for model in models
            for key in [f"{name}/{model}/{size}"]
            if size in ranks and (not only or any(part in key for part in only))
        ]
        if chosen:
            found |= _on_ranks(size, chosen)
    return found


def _on_ranks(size: int, chosen: list[str]) -> dict[str, Any]:
    from reserved_ports import reserved_port

    with tempfile.TemporaryDirectory() as name, reserved_port() as port:
        folder = Path(name)
        (folder / "disk").mkdir()
        (folder / "chosen.json").write_text(json.dumps(chosen))
        command = [sys.executable, __file__, "rank", str(folder)]
        log = folder / "log"
        with log.open("wb") as output:
            processes = [
                subprocess.Popen(command, env=_environment(rank, size, port), stderr=output)
                for rank in range(size)
            ]
            codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{log.read_text()}\nranks ended with {codes}")
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    return {key: [each[key] for each in ranks] for key in ranks[0]}


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    given = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    return {**os.environ, **{key: str(value) for key, value in given.items()}}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a line for each training whose fingerprint is another one."""
    lines = []
    for key, ranks in after.items():
        if key not in before:
            lines.append(f"{key}: not in the record")
        elif ranks != before[key]:
            differ = {
                field
                for one, other in zip(before[key], ranks, strict=True)
                for field in {*one, *other}
                if one.get(field) != other.get(field)
            }
            lines.append(f"{key}: {', '.join(sorted(differ))}")
    return lines


def main() -> None:
    """Record fingerprints, or compare them with a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["record", "check", "rank"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 3, 4])
    given = parser.parse_args()
    if given.action == "rank":
        rank_main(json.loads((given.path / "chosen.json").read_text()), given.path)
        return
    found = take(given.only, given.ranks)
    if given.action == "record":
        given.path.write_text(json.dumps(found, indent=1, sort_keys=True))
        print(f"{len(found)} trainings recorded in {given.path}")
        return
    lines = differences(json.loads(given.path.read_text()), found)
    print("\n".join([*lines, f"{len(found)} trainings, {len(lines)} differ"]))
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
