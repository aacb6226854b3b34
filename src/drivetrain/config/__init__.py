"""Configuration: one declaration per knob, one YAML schema, one precedence.

``schema`` says how a knob is declared and holds the core's own, ``document`` reads YAML with line
numbers, ``resolve`` merges the layers (code > command line > file > default) and remembers where
each value came from. Nothing here imports torch.
"""

from drivetrain.config.document import Layer as Layer
from drivetrain.config.document import ValueOrigin as ValueOrigin
from drivetrain.config.document import dump_yaml as dump_yaml
from drivetrain.config.document import read_file as read_file
from drivetrain.config.document import read_sets as read_sets
from drivetrain.config.resolve import Resolved as Resolved
from drivetrain.config.resolve import resolve as resolve
from drivetrain.config.schema import DataConfig as DataConfig
from drivetrain.config.schema import DtypesConfig as DtypesConfig
from drivetrain.config.schema import LaunchConfig as LaunchConfig
from drivetrain.config.schema import NestedStrategy as NestedStrategy
from drivetrain.config.schema import Option as Option
from drivetrain.config.schema import RecomputeConfig as RecomputeConfig
from drivetrain.config.schema import RunConfig as RunConfig
from drivetrain.config.schema import mapping as mapping
from drivetrain.config.schema import nested_strategy as nested_strategy
from drivetrain.config.schema import option as option
from drivetrain.config.schema import options_of as options_of
from drivetrain.config.schema import section as section
