"""The version of the distribution, read by the build backend and by ``drivetrain --version``."""

__version__ = "0.1.0"
