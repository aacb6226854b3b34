"""A module of the user's beside the script: its ``accelerate`` is the script's."""

import importlib
import os

from accelerate import Accelerator


def describe(accelerator):
    library = importlib.import_module(os.environ.get("LIBRARY", "transformers.trainer"))
    ours = isinstance(accelerator, Accelerator)
    return f"helper {ours}, library {library.Accelerator.__module__}"
