"""``python -m drivetrain.compat SCRIPT``: a script's ``import accelerate`` finds drivetrain."""

import sys

from drivetrain.compat.importing import run_script
from drivetrain.errors import UsageError

if __name__ == "__main__":
    if not sys.argv[1:]:
        raise UsageError("expected SCRIPT or -m MODULE after python -m drivetrain.compat")
    run_script(sys.argv[1:])
