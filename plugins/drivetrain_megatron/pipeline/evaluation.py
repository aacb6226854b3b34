"""Evaluation in a pipeline: the output of the whole batch, with its values on every stage."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from drivetrain.errors import UsageError
from drivetrain_megatron.pipeline.batch_trial import Division
from drivetrain_megatron.pipeline.batches import Dims, MicroBatch
from drivetrain_megatron.pipeline.local import LocalStages
from drivetrain_megatron.pipeline.whole_batch import joined_blocks, joined_outputs
from drivetrain_megatron.pipeline.worker import StageWorker
from drivetrain_megatron.recording.proxy import StageProxy


class Evaluation:
    """Runs forwards of a model without backward.

    The last stage has the values of most outputs. Hidden states come from the stages of their
    blocks: which stage has which is found in the first call of each kind.
    """

    def __init__(self, stages: LocalStages) -> None:
        self._stages = stages
        self._sources: dict[Hashable, list[int]] = {}

    def run(
        self,
        kind: Hashable,
        batches: Sequence[MicroBatch],
        whole: MicroBatch,
        division: Division,
        dims: Dims | None,
    ) -> Any:
        """Return the output of the whole batch; metrics then need to know of no pipeline.

        Arguments are as in ``WholeBatch``.

        Raises:
            UsageError: a part of the output exists on no stage; raised by all of them.
        """
        stages = self._stages
        outline = stages.outline(whole)
        leaves, tree = tree_flatten(outline)
        sources = self._sources.get(kind)
        workers = stages.run_forwards(
            batches, division.kept if dims is None or len(batches) == 1 else None
        )
        asked = workers.keys() if sources is None else {stages.count - 1, *sources}
        passed = [output for worker in workers.values() for output in worker.outputs.values()]
        outputs = {
            index: joined_outputs(worker.outputs, dims or (), _as_it_is)
            if worker.kept is None
            else self._finished(worker, whole, division)
            for index, worker in sorted(workers.items())
            if worker.stage.is_last or (index in asked and worker.kept is not None)
        }
        if sources is None:
            self._check_trees([*passed, *outputs.values()], tree)
            sources = self._sources[kind] = self._found(leaves, outputs)
        found = [
            self._shared(leaf, source, tree_leaves(outputs[source])[place])
            if source in outputs
            else self._shared(leaf, source)
            for place, (leaf, source) in enumerate(zip(leaves, sources, strict=True))
        ]
        return tree_unflatten(found, tree)

    def _finished(self, worker: StageWorker, whole: MicroBatch, division: Division) -> Any:
        given = joined_blocks(worker.made, division, _as_it_is)
        again = len(worker.made) == 1
        return self._stages.finish(worker.stage, whole, given, again=again)

    def _check_trees(self, outputs: Iterable[Any], expected: TreeSpec) -> None:
        """Check that blocks contribute to the output by their results alone."""
        differs = any(tree_flatten(output)[1] != expected for output in outputs)
        if any(self._stages.agree([differs])):
            raise UsageError(
                "expected an output made of what blocks return, found one with tensors that hooks "
                "collect inside of blocks, such as attention weights: the other pipeline stages "
                "have no such blocks. Call the model without them (output_attentions=False), or "
                "use no pipeline (pp: 1)"
            )

    def _found(self, leaves: Sequence[Any], outputs: Mapping[int, Any]) -> list[int]:
        """Return for each leaf of the output the last stage that has its values."""
        mine = [0] * len(leaves)
        for stage, output in sorted(outputs.items()):
            for place, leaf in enumerate(tree_leaves(output)):
                if not isinstance(leaf, StageProxy):
                    mine[place] = stage + 1
        found = [code - 1 for code in self._stages.agree(mine)]
        if min(found, default=0) < 0:
            missing = leaves[found.index(-1)]
            raise UsageError(
                f"expected an output whose tensors follow from blocks of one pipeline stage, found "
                f"one of shape {tuple(missing.shape)} that follows from several, or from a "
                "parameter that the model's first forward did not use and that lies on another "
                "stage: return the parts and put them together outside of the model, or use no "
                "pipeline (pp: 1)"
            )
        return found

    def _shared(self, leaf: Any, source: int, value: Tensor | None = None) -> Any:
        """Return a leaf of the output with the values of its stage."""
        if not isinstance(leaf, StageProxy):
            return leaf  # every stage has it
        if value is None:
            value = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._stages.device)
        shared = value.detach().contiguous()
        self._stages.share(shared, source, "outputs of a stage")
        return shared


def _as_it_is(number: int, tensor: Tensor) -> Tensor:
    return tensor
