"""Configuration: one declaration per knob, one YAML schema, one precedence.

``option`` declares a knob, ``schema`` holds the core's own knobs, ``document`` reads YAML with line
numbers, ``resolve`` merges the layers (code > command line > file > default) and remembers where
each value came from. Nothing here imports torch.
"""

from drivetrain.config.document import (
    Layer,
    ValueOrigin,
    dump_yaml,
    read_file,
    read_sets,
)
from drivetrain.config.option import (
    NestedStrategy,
    Option,
    mapping,
    nested_strategy,
    option,
    options_of,
    section,
)
from drivetrain.config.resolve import Resolved, resolve
from drivetrain.config.schema import (
    CheckpointConfig,
    DataConfig,
    DtypesConfig,
    LaunchConfig,
    ProfileConfig,
    RecomputeConfig,
    RunConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DtypesConfig",
    "LaunchConfig",
    "Layer",
    "NestedStrategy",
    "Option",
    "ProfileConfig",
    "RecomputeConfig",
    "Resolved",
    "RunConfig",
    "ValueOrigin",
    "dump_yaml",
    "mapping",
    "nested_strategy",
    "option",
    "options_of",
    "read_file",
    "read_sets",
    "resolve",
    "section",
]
