"""transformers.Trainer as a launched script: its losses go into a file."""

import json
import sys
from pathlib import Path

import trainers
from drivetrain.integrations.transformers import use_drivetrain

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = trainers.train("causal", use_drivetrain, folder, 2)
    if "weights" in found:
        (folder / "losses.json").write_text(json.dumps(found["losses"]))
