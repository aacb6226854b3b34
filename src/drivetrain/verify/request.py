"""The request to record a run: the message of ``drivetrain verify`` to the ranks."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain.config import DtypesConfig, RecomputeConfig, Resolved
from drivetrain.facade.settings import resolve_strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordRequest:
    """Which steps are recorded, and how the run differs from the script's own.

    Attributes:
        steps: the script ends after so many optimizer steps; 0 records all steps there are.
        folder: where rank 0 writes the record; "" keeps it in memory, on every rank.
        strategy: name and options that replace the script's; None leaves the script's own.
        reference: whether the run defines the right numbers: nothing but the strategy is kept of
            the configuration's ways to save memory and bytes.
        doubles: compute in fp64, without mixed precision.
        dropout: False sets every dropout's probability to 0.
    """

    steps: int = 0
    folder: str = ""
    strategy: Mapping[str, Any] | None = None
    reference: bool = False
    doubles: bool = False
    dropout: bool = True

    def applied(self, config: Resolved) -> Resolved:
        """Return a configuration of the script, changed as the request says."""
        if self.strategy is not None:
            config = resolve_strategy(self.strategy, config)
        run = config.run
        if self.doubles:
            run = replace(run, precision="no", dtypes=DtypesConfig())
        if self.reference:
            run = replace(run, dtypes=DtypesConfig(), recompute=RecomputeConfig())
        return replace(config, run=run)

    def write(self, path: Path) -> None:
        """Write it to a file."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "RecordRequest":
        """Read it from a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))
