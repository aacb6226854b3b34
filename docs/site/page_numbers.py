"""The numbers of the docs' tables, from the costs that strategies promise and from the simulator.

A table's first cells say which case a row is; the functions here fill in the others.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import yaml

from drivetrain.cost import Cost, ModelSpec, TensorSpec, Traffic
from drivetrain.errors import ConfigError
from drivetrain.parallel.options import OffloadOptions
from drivetrain.registry import stores, strategies
from drivetrain.runtime.mesh import Mesh
from drivetrain.runtime.precision import Precision
from drivetrain.runtime.world import World
from drivetrain.strategy import Run
from drivetrain_megatron.pipeline.command import UNIT_DURATIONS, simulate
from drivetrain_megatron.pipeline.schedules import make_schedule
from drivetrain_offload.tiers import TierPlan, Tiers, held, tiers_of

Rows = Sequence[Sequence[str]]

GIB = 2**30
BLOCKS, SIDE = 100, 1000
ELEMENTS = BLOCKS * SIDE * SIDE
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "none": None}
FP32, BF16 = Precision.of("no"), Precision.of("bf16", param=torch.bfloat16)
BF16_REDUCED_IN_FP32 = Precision.of("bf16", param=torch.bfloat16, reduce=torch.float32)
POLICIES = {
    "fp32, or autocast (`precision: bf16`)": Precision.of("bf16"),
    "`precision: bf16`, `dtypes: {param: bf16}`": BF16,
    "the same, `reduce: fp32`": BF16_REDUCED_IN_FP32,
}
STAGES = ("zero1", "zero2", "zero3")
ROOM = {"device": 24 * GIB, "host": 60 * GIB, "disk": 900 * GIB}


def cost(
    name: str, options: Mapping[str, Any], precision: Precision, ranks: int, window: int = 1
) -> Cost:
    """Return the cost of equal blocks of two matrices in fp32."""
    kind = strategies().load(name)
    model = ModelSpec(tuple(_blocks()))
    found: Cost = kind.cost(kind.Config(**options), model, _run(precision, ranks, window, "cpu"))
    return found


def dtypes(old: Rows) -> Rows:
    """Return the dtypes and the bytes per element of each precision and section ``dtypes``."""
    return [[*row[:2], *_dtypes_of(*(cell.strip("`") for cell in row[:2]))] for row in old]


def fsdp_bytes(old: Rows) -> Rows:
    """Return the bytes per element under each sharding of fsdp."""
    return [
        [
            row[0],
            _bytes("fsdp", {"sharding": "grad"}, POLICIES[row[0]]),
            _bytes("fsdp", {"sharding": "hybrid"}, POLICIES[row[0]]),
            _bytes("fsdp", {"accumulate": "local"}, POLICIES[row[0]]),
        ]
        for row in old
    ]


def offload_bytes(old: Rows) -> Rows:
    """Return the bytes per parameter of each tier beside an accelerator, in bf16 and in fp32."""
    return [
        [
            *row[:3],
            *(
                _same(
                    formula(lambda n: bytes_of_tier(tier, name, offload, precision, n))  # noqa: B023
                    for name in re.findall(r"\w+", row[0])
                )
                for precision in (BF16, FP32)
                for tier in ROOM
            ),
        ]
        for row in old
        for offload in [{"optimizer": row[1].strip("`"), "params": row[2].strip("`")}]
    ]


def timeline(name: str, *, ranks: int, micro_batches: int, chunks: int) -> Any:
    """Return the times of a simulated schedule, where a whole forward takes a unit."""
    durations = {kind: duration / chunks for kind, duration in UNIT_DURATIONS.items()}
    return simulate(make_schedule(name, ranks, micro_batches, chunks), durations)


def formula(at: Callable[[int], float], letter: str = "N") -> str:
    """Return a function of the number of ranks as a sum such as ``4 + 16/N``.

    Raises:
        ValueError: the function is no such sum.
    """
    values = {ranks: at(ranks) for ranks in (2, 4, 8)}
    shared = round(4 * (values[2] - values[4]))
    fixed = round(values[2] - shared / 2)
    for ranks, found in values.items():
        if not math.isclose(found, fixed + shared / ranks, rel_tol=2e-3, abs_tol=2e-3):
            raise ValueError(f"expected {fixed} + {shared}/N bytes, found {found} at {ranks}")
    return " + ".join([str(fixed)] * bool(fixed) + [f"{shared}/{letter}"] * bool(shared)) or "0"


def bytes_of_tier(
    tier: str,
    name: str,
    offload: Mapping[str, Any],
    precision: Precision,
    ranks: int = 1,
    device: str = "cuda",
) -> float:
    """Return the bytes of a tier per parameter, without those that are no multiple of it."""
    left_out = (
        "buffers of gradients",
        "largest unit in use",
        "buffers of stores",
        "values on their way",
    )
    kinds = _tiers_of_blocks(name, tuple(offload.items()), precision, ranks, device).needed[tier]
    return sum(nbytes for kind, nbytes in kinds.items() if kind not in left_out) / ELEMENTS


def _bytes_of(precision: Precision) -> list[str]:
    return [_bytes(name, {}, precision) for name in ("ddp", *STAGES)]


def _bytes(name: str, options: Mapping[str, Any], precision: Precision) -> str:
    """Return the bytes held per element, without buffers that are lent."""
    kind = strategies().load(name)
    try:
        kind.check_options(kind.Config(**options), precision)
    except ConfigError:
        return "refused"
    stays = name == "zero1" or options.get("accumulate") == "local"
    hybrid = options.get("sharding") == "hybrid"

    def at(size: int) -> float:
        given = {**options, "shard_size": size} if hybrid else options
        kinds = cost(name, given, precision, 2 * size if hybrid else size).held
        return sum(n for what, n in kinds.items() if what != "lent" or stays) / ELEMENTS

    return formula(at, "S" if hybrid else "N")


def _dtypes_of(name: str, section: str) -> list[str]:
    given = {key: DTYPES[value] for key, value in yaml.safe_load(f"{{{section}}}").items()}
    precision = Precision.of(name, **given)
    param = precision.param or "fp32"
    compute = precision.compute or "fp32"
    master = precision.master or f"the {param} parameter"
    return [
        param,
        f"{compute}, scaled" if name == "fp16" else compute,
        precision.reduce or param,
        master.replace("fp32 parameter", "parameter"),
        *_bytes_of(precision),
    ]


@cache
def _tiers_of_blocks(name: str, offload: tuple[tuple[str, Any], ...], *how: Any) -> Tiers:
    return _tiers(_blocks(), name, dict(offload), *how)


def _tiers(
    specs: Sequence[TensorSpec],
    name: str,
    offload: Mapping[str, Any],
    precision: Precision,
    ranks: int,
    device: str,
) -> Tiers:
    """Return what one rank keeps with AdamW, as ``prepare`` finds it."""
    kind = strategies().load(name)
    run = _run(precision, ranks, device=device)
    config = kind.Config(offload=OffloadOptions(**offload))
    model = ModelSpec(tuple(specs))
    units = kind.plan(config, model, run)
    estimate = kind.estimate(config, units, run)
    lent = config.lent_buffers * estimate.lent_bytes()
    states = {spec.name: 2 for spec in specs}
    plan = TierPlan(model=model, estimate=estimate, states=states, lent=lent)
    named = {offload["optimizer"], offload.get("params", "")} - {""}
    opened = {store: stores().load(store) for store in named}
    needed = held(plan, tiers_of(config.offload, opened, run.world))
    needed["host"]["buffers of stores"] += opened[offload["optimizer"]].working_bytes
    return Tiers(needed=needed, room=ROOM, sharing=ranks)


def _run(precision: Precision, ranks: int, window: int = 1, device: str = "cuda") -> Run:
    world = World(
        size=ranks, local_size=ranks, hosts=("host",) * ranks, device=torch.device(device)
    )
    mesh = Mesh.plan({"dp": ranks}, world)
    return Run(world=world, mesh=mesh, precision=precision, accumulation=window, traffic=Traffic())


def _blocks() -> list[TensorSpec]:
    return [
        TensorSpec(f"layers.{i}.{name}", (SIDE, SIDE // 2), torch.float32, True)
        for i in range(BLOCKS)
        for name in ("weight", "other")
    ]


def _same(texts: Any) -> str:
    (text,) = set(texts)
    return text
