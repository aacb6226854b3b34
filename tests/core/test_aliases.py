"""Names and arguments of Accelerate that ours lacks are answered with the way out."""

import importlib

import pytest

import drivetrain
from drivetrain import Accelerator, UsageError


def test_import_of_a_name_that_is_not_here():
    for name, way_out in (
        (
            "FullyShardedDataParallelPlugin",
            r"take Accelerator\(strategy='name'\).* --as-accelerate",
        ),
        ("DummyOptim", "make an optimizer of torch.optim, which any strategy takes$"),
        ("init_empty_weights", "go on with 'from accelerate import init_empty_weights'"),
        ("no_such_name", "cannot import name 'no_such_name'"),
    ):
        with pytest.raises(ImportError, match=way_out):
            exec(f"from drivetrain import {name}", {})
    assert not hasattr(drivetrain, "no_such_name")
    assert importlib.import_module("drivetrain.parallel") is drivetrain.parallel


def test_argument_that_is_not_here():
    for argument, way_out in (
        ("deepspeed_plugin", "strategy='name'"),
        ("dynamo_backend", "torch.compile"),
    ):
        said = f"found {argument}: take .*{way_out}.* --as-accelerate"
        with pytest.raises(UsageError, match=said):
            Accelerator(cpu=True, **{argument: None})
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            Accelerator(cpu=True, colour="red")
