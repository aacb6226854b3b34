"""Objects that the script registered: what goes into a checkpoint of them, and what comes back.

Their state is tensors and plain values, which is stored as such. State of any other kind is stored
only when the script brings its own codec; without the same codec it is never read again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.checkpoint import CheckpointReader
from drivetrain.errors import CheckpointError, UsageError

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Registered:
    """An object with ``state_dict()`` and ``load_state_dict()``, and perhaps a codec.

    Attributes:
        item: the object.
        encode: makes bytes of its state; None stores tensors and plain values.
        decode: makes the state of these bytes.
    """

    item: Any
    encode: Encode | None = None
    decode: Decode | None = None

    def encoded(self) -> bytes:
        """Return the state as the codec writes it.

        Raises:
            CheckpointError: the codec returned something else than bytes.
        """
        data = self.encode(self.item.state_dict()) if self.encode is not None else None
        if not isinstance(data, bytes):
            raise CheckpointError(
                f"expected encode() to return bytes for the state of {type(self.item).__name__}, "
                f"found {type(data).__name__}"
            )
        return data


def check_registration(
    objects: Sequence[Any], encode: Encode | None, decode: Decode | None
) -> None:
    """Refuse what cannot be kept in a checkpoint.

    Raises:
        UsageError: names the arguments without the two methods, or the missing half of the codec.
    """
    lacking = [
        f"argument {i} ({type(item).__name__})"
        for i, item in enumerate(objects)
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
    ]
    if lacking:
        raise UsageError(
            "expected objects with state_dict() and load_state_dict(), found without: "
            + ", ".join(lacking)
        )
    if (encode is None) != (decode is None):
        found = "encode" if decode is None else "decode"
        raise UsageError(f"expected encode and decode together, found {found} alone; give both")


def file_name(index: int) -> str:
    """Return the file of one object's encoded state."""
    return f"object-{index:05d}.encoded"


def load_registered(
    objects: Sequence[Registered], reader: CheckpointReader, states: Sequence[Any]
) -> None:
    """Give registered objects their state back, in the order of registration.

    Raises:
        CheckpointError: a state is encoded, and its object was registered without a codec.
    """
    encoded = reader.state.get("encoded", {})
    for index, (registered, state) in enumerate(zip(objects, states, strict=True)):
        found = state
        if index in encoded:
            if registered.decode is None:
                raise CheckpointError(
                    f"expected registered object {index} ({type(registered.item).__name__}) to "
                    f"have a codec, found none; its state in {encoded[index]} is read only with "
                    "the one it was written with: register_for_checkpointing(object, encode=..., "
                    "decode=...)"
                )
            found = registered.decode(reader.encoded(encoded[index]))
        registered.item.load_state_dict(found)
