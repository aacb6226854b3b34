"""A layer of a configuration as code makes it: the arguments of an ``Accelerator``."""

from drivetrain.config import Layer, ValueOrigin


def code_layer(values):
    return Layer.of(
        (key, value, ValueOrigin("code", f"Accelerator({key.rpartition('.')[2]}={value!r})"))
        for key, value in values.items()
    )
