"""Runs the command as ``python -m drivetrain_launch``, for when the console script is not on PATH."""

from drivetrain_launch.cli import main

if __name__ == "__main__":
    main()
