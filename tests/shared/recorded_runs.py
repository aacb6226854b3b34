"""Folders of runs as ranks write them, without a training."""

from drivetrain.observe.figures import RUN, Journal, StartFolder, StepFigures
from drivetrain.runtime.world import new_start

FACTS = {
    "script": "train.py",
    "restarts": 0,
    "strategy": "ddp",
    "precision": "no: fp32",
    "ranks": 2,
    "mesh": {"dp": 2},
    "accumulation": 1,
    "hosts": ["here"],
    "environment": {"device": "CPU", "torch": "2"},
    "configuration": [
        {"key": "strategy.name", "value": "ddp", "origin": "default"},
        {"key": "seed", "value": None, "origin": "default"},
    ],
    "models": [
        {
            "name": "GPT",
            "parameters": 1000,
            "trained": 1000,
            "sent": {"dp/all_reduce": 4000},
            "uncounted": {},
        }
    ],
    "peak": None,
}


def step(number, rank=0, **values):
    """Return a record of a step of 0.1 s, of which rank 0 waits 0.04 s and others nothing."""
    waiting = {"dp": 0.04} if rank == 0 else {}
    sections = {"data": 0.01, "forward": 0.02, "backward": 0.03 if rank == 0 else 0.07}
    return StepFigures(
        **{
            "step": number,
            "time": 1.8e9 + number / 10,
            "seconds": 0.1,
            "sections": sections,
            "waiting": waiting,
            "loss": 8.0 / number + rank,
            "lr": 0.1,
            "grad_norm": 1.0,
            "samples": 4,
            "tokens": 64,
            "memory": {"resident": (2 + rank) << 30},
            "sent": {"dp/all_reduce": 4000},
        }
        | values
    )


def write_run(project, steps, /, *, ranks=2, facts=None, events=(), end="ended", **values):
    """Write a start with these steps on each rank; ``events`` come first, ``end`` last."""
    start = StartFolder(project / RUN / new_start())
    start.write_facts(FACTS | (facts or {}))
    for rank in range(ranks):
        journal = Journal(start.journal(rank), {"rank": rank, "place": {"dp": rank}})
        for name in events:
            journal.note(name, source="saved")
        for number in steps:
            journal.add(step(number, rank, **values))
        if end:
            journal.note(end)
        journal.close()
    return start
