"""``python -m drivetrain.reporting FOLDER``: writes the report of a run, beside its records.

A training starts this program when it ends: the interpreter of the training may be about to end,
too, and need not load what draws.
"""

import sys

from drivetrain.errors import DrivetrainError
from drivetrain.reporting.history import load_history
from drivetrain.reporting.page import write_report

if __name__ == "__main__":
    try:
        run = load_history(sys.argv[1])
        sys.stdout.write(f"{write_report([run], run.folder)}\n")
    except (DrivetrainError, OSError) as error:
        sys.exit(str(error))
