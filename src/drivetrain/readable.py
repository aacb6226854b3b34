"""The part of the contract that lets a script read and change a prepared model's values."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from drivetrain.errors import UsageError
from drivetrain.shards import TensorFacts, parameters_among, state_tensors


class Readable:
    """The whole values of a strategy's model; by default every rank has them all."""

    def gathered(
        self, parameters: Iterable[nn.Parameter], *, modify: bool = True
    ) -> AbstractContextManager[None]:
        """Context in which these parameters are whole on every rank; all ranks must enter it.

        Args:
            parameters: of the prepared model.
            modify: whether they may be changed inside; where ranks differ rank 0's values count.
        """
        return nullcontext()

    def inference(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context for many forwards without gradients: by default all parameters are whole.

        Args:
            module: as ``unwrap`` returns it.
        """
        return self.gathered(list(module.parameters()), modify=False)

    def state_facts(self, module: nn.Module) -> Sequence[TensorFacts]:
        """Describe the tensors of the whole model's state dict, alike on every rank. Collective.

        Args:
            module: as ``unwrap`` returns it.
        """
        return [TensorFacts.of(name, tensor) for name, tensor in state_tensors(module).items()]

    @contextmanager
    def whole_state(
        self, module: nn.Module, names: Sequence[str]
    ) -> Iterator[Mapping[str, Tensor]]:
        """Context with some whole tensors of the model's state on every rank, to be read.

        Args:
            module: as ``unwrap`` returns it.
            names: of ``state_facts``.
        """
        state = state_tensors(module)
        with self.gathered(parameters_among(state[name] for name in names), modify=False):
            yield {name: state[name].detach() for name in names}

    def dtensors(self) -> Mapping[str, Tensor]:
        """Return the shards of all parameters, by name, as ``torch.distributed.tensor.DTensor``s.

        They share the shards' memory. Every rank must call it.

        Raises:
            UsageError: the strategy does not keep rows of parameters.
        """
        raise UsageError(
            f"expected a strategy that keeps rows of each parameter, found {type(self).__name__}; "
            "take accelerator.get_state_dict(model) for whole tensors, or save_state(), whose "
            "shards every strategy reads"
        )
