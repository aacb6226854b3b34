"""Random number generators of this process: seed, capture, restore, fork.

Covered are Python's ``random``, NumPy's global generator when something has imported NumPy (it is
never imported here), torch's CPU generator, and the generator of the current accelerator.
"""

import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.runtime.world import own_rank

_NUMPY_SEED_LIMIT = 1 << 32


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed every generator of this process.

    Args:
        seed: the seed.
        device_specific: add the rank, so that ranks draw different numbers.
        deterministic: let torch use deterministic algorithms only.
    """
    if device_specific:
        seed += own_rank()
    torch.manual_seed(seed)  # the CPU and every accelerator
    _seed_without_torch(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _seed_without_torch(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % _NUMPY_SEED_LIMIT)


class Snapshot:
    """The state of every generator now, to be put back.

    ``packed`` may come later, or never: tensors and ``restore`` cost far more.
    """

    def __init__(self) -> None:
        numpy, accelerator = sys.modules.get("numpy"), _accelerator()
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._numpy = None if numpy is None else numpy.random.get_state(legacy=False)
        self._accelerator = None if accelerator is None else accelerator.get_rng_state()

    def packed(self) -> dict[str, Tensor]:
        """Return the state as CPU tensors, as ``capture`` does."""
        version, words, gauss = self._python
        numbers = [version, *words, gauss is not None, _bits(gauss or 0.0)]  # 628
        state = {"python": torch.tensor(numbers, device="cpu"), "torch": self._torch}
        if self._numpy is not None:
            state["numpy"] = _packed_numpy(self._numpy)
        if self._accelerator is not None:
            state["accelerator"] = self._accelerator
        return state

    def put_back(self) -> None:
        """Set the generators to this state."""
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._accelerator is not None:
            _accelerator().set_rng_state(self._accelerator)


def capture() -> dict[str, Tensor]:
    """Return the state of every generator as CPU tensors of uint8 or int64.

    Keys: ``python`` and ``torch``; ``numpy`` when NumPy is loaded; ``accelerator`` when there is
    one (the current device's generator).

    Raises:
        UsageError: NumPy's global generator is not its default one.
    """
    return Snapshot().packed()


def restore(state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Set the generators to a captured state.

    Returns:
        The keys without a generator in this process: ``numpy`` while NumPy is not loaded,
        ``accelerator`` on a machine without one.

    Raises:
        UsageError: a key is unknown, or a state is none of such a generator.
    """
    _check(state)
    left_out = []
    for key, value in state.items():
        if key == "python":
            version, *words, has_gauss, bits = value.tolist()
            random.setstate((version, tuple(words), _float(bits) if has_gauss else None))
        elif key == "torch":
            torch.set_rng_state(value)
        elif key == "numpy":
            if (numpy := sys.modules.get("numpy")) is None:
                left_out.append("numpy")
            else:
                *words, place, has_gauss, bits = value.tolist()
                numpy.random.set_state(("MT19937", words, place, has_gauss, _float(bits)))
        elif key == "accelerator":
            if (accelerator := _accelerator()) is None:
                left_out.append("accelerator")
            else:
                accelerator.set_rng_state(value)
        else:
            raise UsageError(
                f"expected states of python, torch, numpy and accelerator, found {key!r}; "
                "restore what capture() returned"
            )
    return tuple(left_out)


def _check(state: Mapping[str, Tensor]) -> None:
    """Refuse what are no states of generators as this process has them."""
    for key, own in capture().items():
        found = state.get(key, own)
        if (found.dtype, found.shape) != (own.dtype, own.shape):
            raise UsageError(
                f"expected a state of {key} with {len(own)} elements of {own.dtype}, found shape "
                f"{tuple(found.shape)} of {found.dtype}; take another checkpoint: this one is "
                "damaged, or of another kind of device"
            )


@contextmanager
def fork(seed: int, around: Snapshot | None = None) -> Iterator[None]:
    """Seed every generator inside the block, and put the former states back after it.

    Args:
        seed: of all generators.
        around: the states that a block around this one puts back; then this one puts back none.
    """
    before = Snapshot() if around is None else None
    seed_torch(seed)
    _seed_without_torch(seed)
    try:
        yield
    finally:
        if before is not None:
            before.put_back()


def seed_torch(seed: int) -> None:
    """Seed the generators of torch that a snapshot has, and none of another device."""
    torch.default_generator.manual_seed(seed)
    accelerator = _accelerator()
    if accelerator is not None:
        accelerator.manual_seed(seed)


def _accelerator() -> Any:
    """Return the module of the current accelerator, as torch.cuda, or None."""
    current = torch.accelerator.current_accelerator(check_available=True)
    return None if current is None else torch.get_device_module(current)


def _packed_numpy(state: Any) -> Tensor:
    """Pack as (627,) int64: 624 words, position, whether a Gaussian is kept, its bits."""
    if state["bit_generator"] != "MT19937":
        raise UsageError(
            "expected NumPy's default global generator MT19937, found "
            f"{state['bit_generator']}; use a numpy.random.Generator object of your own instead"
        )
    inner = state["state"]
    numbers = [*inner["key"].tolist(), inner["pos"], state["has_gauss"], _bits(state["gauss"])]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _bits(number: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
