"""drivetrain: one loop, any parallelism.

The public names are imported when they are first used, so that the command line starts without
importing torch.
"""

from drivetrain._version import __version__

__all__ = ["__version__"]
