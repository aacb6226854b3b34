"""The precision policy: the dtype of each parameter, gradient and master, and what is refused."""

import pytest
import torch

from drivetrain.config import DtypesConfig, RunConfig
from drivetrain.errors import ConfigError
from drivetrain.runtime.precision import Precision

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MATRIX, VECTOR, SCALAR = (4, 4), (4,), ()
OTHERS = (FP64, torch.int64, torch.int8, torch.bool, torch.complex64)


def test_a_name_alone_converts_no_parameter():
    for name, compute in (("no", None), ("bf16", "bf16"), ("fp16", "fp16")):
        policy = Precision.of(name)
        assert policy.compute == compute
        assert policy.needs_scaling is (name == "fp16")
        for dtype in (FP32, BF16, FP16, *OTHERS):
            assert policy.forward_dtype(dtype, MATRIX) is dtype
            assert policy.master_dtype(dtype, MATRIX) is dtype
            assert policy.reduce_dtype(dtype) is dtype
            assert policy.accumulate_dtype(dtype) is (FP32 if dtype in (BF16, FP16) else dtype)


def test_param_converts_fp32_matrices_and_keeps_fp32_masters():
    for name, low in (("bf16", BF16), ("fp16", FP16)):
        policy = Precision.of(name, param=low)
        for shape in (MATRIX, (2, 3, 4, 5), VECTOR, SCALAR):
            assert policy.forward_dtype(FP32, shape) is (low if len(shape) > 1 else FP32)
            assert policy.master_dtype(FP32, shape) is FP32
        assert policy.reduce_dtype(low) is low
        for dtype in (BF16, FP16, *OTHERS):
            assert policy.forward_dtype(dtype, MATRIX) is dtype
            assert policy.master_dtype(dtype, MATRIX) is dtype
    policy = Precision.of("bf16", param=BF16, master=None)  # the low parameter is updated
    assert policy.forward_dtype(FP32, MATRIX) is BF16
    assert policy.master_dtype(FP32, MATRIX) is BF16
    assert policy.master_dtype(FP32, VECTOR) is FP32


def test_master_of_given_low_parameters_only_when_asked_for():
    for policy in (
        Precision.of("no", master=FP32),
        Precision.of("bf16", master=FP32),
        Precision.of("bf16", param=BF16, master=FP32),
    ):
        assert policy.master_dtype(BF16, MATRIX) is FP32
        assert policy.master_dtype(BF16, VECTOR) is FP32
        assert policy.master_dtype(FP16, MATRIX) is FP32
        for dtype in OTHERS:
            assert policy.master_dtype(dtype, MATRIX) is dtype


def test_reduce_changes_floats_up_to_fp32_alone():
    for reduce in (BF16, FP32):
        policy = Precision.of("bf16", reduce=reduce)
        assert {policy.reduce_dtype(dtype) for dtype in (FP32, BF16, FP16)} == {reduce}
        assert all(policy.reduce_dtype(dtype) is dtype for dtype in OTHERS)


def test_dtypes_that_do_not_fit_are_refused():
    for name, dtypes, message in (
        ("fp4", {}, "expected a precision of no, bf16, fp16 or fp8, found 'fp4'"),
        ("no", {"param": BF16}, "param: bf16 needs precision: bf16, found precision: no; set"),
        ("bf16", {"param": FP16}, "param: fp16 needs precision: fp16, found precision: bf16"),
        ("bf16", {"param": FP32}, "expected as_given, bf16 or fp16, found fp32"),
        ("no", {"reduce": FP16}, "reduce: fp16 needs precision: fp16, found precision: no"),
        ("bf16", {"reduce": FP16}, "set dtypes.reduce: bf16"),
        ("bf16", {"reduce": FP64}, "expected as_given, bf16, fp16 or fp32, found float64"),
        ("bf16", {"master": BF16}, "expected auto, fp32 or none, found bf16"),
        ("fp16", {"param": FP16, "master": None}, "updates underflow; set dtypes.master: fp32"),
    ):
        with pytest.raises(ConfigError, match=message):
            Precision.of(name, **dtypes)


def test_configuration_names_every_dtype():
    dtypes = DtypesConfig(param="bf16", reduce="fp32")
    policy = Precision.configured(RunConfig(precision="bf16", dtypes=dtypes))
    assert policy == Precision.of("bf16", param=BF16, reduce=FP32)
    assert str(policy) == "bf16: param bf16, compute bf16, reduce fp32, master fp32"
    none = DtypesConfig(param="bf16", master="none")
    assert Precision.configured(RunConfig(precision="bf16", dtypes=none)).master is None
    explicit = RunConfig(dtypes=DtypesConfig(master="fp32"))
    assert Precision.configured(explicit).master_of_given
    assert Precision.configured(RunConfig()) == Precision.of("no")
    eight = RunConfig(precision="fp8", dtypes=DtypesConfig(param="bf16", fp8="rowwise"))
    assert str(Precision.configured(eight)) == (
        "fp8: param bf16, compute bf16, reduce as given, master fp32, fp8 rowwise"
    )
