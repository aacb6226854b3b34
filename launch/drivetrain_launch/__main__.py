"""Runs the command as ``python -m drivetrain_launch``, when the script is not on PATH."""

from drivetrain_launch.cli import main

if __name__ == "__main__":
    main()
