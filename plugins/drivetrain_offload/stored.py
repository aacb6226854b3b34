"""The stores that options name, and the shards of flat tensors that lie in them."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from drivetrain.errors import ConfigError
from drivetrain.registry import stores
from drivetrain.sharding.layout import ParameterSlot
from drivetrain.sharding.options import OffloadOptions, store_knobs
from drivetrain.sharding.shard import ShardHome
from drivetrain.store import SteppingStore, TensorStore


class ShardInStore(ShardHome):
    """A shard that lies in a store and comes for every use, as the same tensor as in memory.

    ``key`` names the shard in the store; the other arguments are those of ``ShardHome``.
    """

    in_store: ClassVar[bool] = True
    at_hand: ClassVar[bool] = False

    def __init__(
        self, numel: int, dtype: torch.dtype, own: Sequence[Tensor], store: TensorStore, key: str
    ) -> None:
        super().__init__(numel, dtype, own)
        self._store = store
        self._key = key
        self._fresh: Tensor | None = torch.empty(numel, dtype=dtype)  # until it is full

    def fill(self, places: Sequence[Tensor] | None = None) -> None:
        """Bring it, and copy it."""
        if self._own:
            chosen = self._own if places is None else list(places)
            with torch.no_grad():
                torch._foreach_copy_(chosen, self._pieces(self._fetch()))

    def take(self) -> None:
        """Put the changed values back."""
        values = self._fetch().clone()
        self._taken_back(values)
        self.replace(values)

    def read(self, slot: ParameterSlot) -> Tensor:
        """Bring all of it, and return a copy of a part, which does not hold the rest."""
        return self._fetch()[slot.local].clone()

    def write(self, slot: ParameterSlot, values: Tensor) -> None:
        """Bring it, change it and put it back; at first, wait until it was written for good."""
        if self._fresh is not None:
            self._fresh[slot.local].copy_(values)
            return
        whole = self._fetch().clone()
        whole[slot.local].copy_(values)
        self.replace(whole)

    def replace(self, values: Tensor) -> None:
        """Put it."""
        self._fresh = None
        self._store.put(self._key, values.to(self.dtype))

    def flush(self) -> None:
        """Put the first values into the store; from here on no shard stays in memory."""
        if self._fresh is not None:
            self.replace(self._fresh)

    def narrow(self, dtype: torch.dtype) -> None:
        """Put a narrower copy in its place."""
        if dtype is not self.dtype:
            values = self._fetch()
            self.dtype = dtype
            self.replace(values)

    def ahead(self) -> None:
        """Let the store read ahead."""
        if self._fresh is None:
            self._store.prefetch([self._key])

    def _fetch(self) -> Tensor:
        return self._store.fetch(self._key) if self._fresh is None else self._fresh


def open_stores(options: OffloadOptions) -> dict[str, SteppingStore]:
    """Open the stores that the options of one model name, each once; return them by name.

    Args:
        options: as ``check`` found them right.

    Raises:
        ConfigError: a store cannot keep optimizer state.
    """
    kinds = {n: stores().load(n) for n in sorted({options.optimizer, options.params} - {""})}
    settings = dict(options.store_options)
    if options.path:
        settings["path"] = options.path
    return {name: _open(name, kind, settings) for name, kind in kinds.items()}


def _open(name: str, kind: Any, settings: dict[str, Any]) -> SteppingStore:
    knobs = store_knobs(kind)
    chosen = {key: value for key, value in settings.items() if key in knobs}
    store = kind(kind.Config(**chosen)) if knobs else kind()
    if not isinstance(store, SteppingStore):
        raise ConfigError(
            f"expected a store that keeps optimizer state, found {name!r}, which keeps tensors "
            "only; take one that has stepper(), such as cpu"
        )
    return store
