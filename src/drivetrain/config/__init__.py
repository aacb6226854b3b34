"""Configuration: one declaration per knob, one YAML schema, one precedence.

``option`` declares a knob, ``schema`` holds the core's own knobs, ``document`` reads YAML with line
numbers, ``resolve`` merges the layers (code > command line > file > default) and remembers where
each value came from. Nothing here imports torch.
"""

from drivetrain.config.document import Layer as Layer
from drivetrain.config.document import ValueOrigin as ValueOrigin
from drivetrain.config.document import dump_yaml as dump_yaml
from drivetrain.config.document import read_file as read_file
from drivetrain.config.document import read_sets as read_sets
from drivetrain.config.option import NestedStrategy as NestedStrategy
from drivetrain.config.option import Option as Option
from drivetrain.config.option import mapping as mapping
from drivetrain.config.option import nested_strategy as nested_strategy
from drivetrain.config.option import option as option
from drivetrain.config.option import options_of as options_of
from drivetrain.config.option import section as section
from drivetrain.config.resolve import Resolved as Resolved
from drivetrain.config.resolve import resolve as resolve
from drivetrain.config.schema import DataConfig as DataConfig
from drivetrain.config.schema import DtypesConfig as DtypesConfig
from drivetrain.config.schema import LaunchConfig as LaunchConfig
from drivetrain.config.schema import RecomputeConfig as RecomputeConfig
from drivetrain.config.schema import RunConfig as RunConfig
