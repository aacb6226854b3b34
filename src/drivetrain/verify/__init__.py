"""Verification: a run is recorded, recorded again under the reference, and the two are compared.

``drivetrain verify`` does so for a user's script. In a test, on ranks, the same takes no process of
its own::

    from drivetrain import Accelerator
    from drivetrain.registry import strategies
    from drivetrain.verify import Recorder, RecordRequest, compare, judge

    def recorded(strategy):
        accelerator = Accelerator(strategy=strategy, cpu=True)
        recorder = Recorder(RecordRequest())
        accelerator.observe(recorder)            # before the first prepare()
        train(accelerator)                       # an ordinary script
        accelerator.free_memory()
        return recorder.record                   # alike on every rank, in memory

    expected = recorded(strategies().reference())
    comparison = compare(recorded("ddp"), expected)
    verdict, errors = judge(comparison, doubles=True)   # for models in fp64
    assert verdict != "error", errors[0]

The reference is data-parallel over all ranks. To compare with ranks that share a replica (tensor or
pipeline parallelism), give the reference run the same batches: run it on as many ranks as the other
run has on its axis ``dp``. A test that runs both on one pool of ranks gives every rank of the
reference the same batch instead: the mean of equal gradients is the gradient.

- ``recorder.note(name, value)`` adds a number of the test's own, such as an evaluation loss, to the
  next step.
- ``comparison.largest("weight")`` is the largest relative difference of a kind: ``loss``,
  ``gradient norm``, ``weight``, ``note``, or ``start`` for the weights before the first step.
- ``comparison.problem`` says why two runs cannot be compared, for example other batches.
"""

from drivetrain.verify.compare import Comparison, Difference, Verdict, compare, judge
from drivetrain.verify.recorder import Recorder, RecordRequest, RunRecord, StepRecord

__all__ = [
    "Comparison",
    "Difference",
    "RecordRequest",
    "Recorder",
    "RunRecord",
    "StepRecord",
    "Verdict",
    "compare",
    "judge",
]
