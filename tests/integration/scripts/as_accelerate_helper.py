"""A module of the user's beside the script: its ``accelerate`` is the script's."""

from accelerate import Accelerator


def describe(accelerator):
    from transformers.trainer import Accelerator as LibraryAccelerator

    ours = isinstance(accelerator, Accelerator)
    return f"helper {ours}, library {LibraryAccelerator.__module__}"
