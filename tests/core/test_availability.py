"""What is there, asked without importing it."""

import inspect
import os
import sys

import pytest

import drivetrain
from drivetrain import availability


def test_every_question_has_an_answer():
    questions = [f for name, f in inspect.getmembers(availability) if name.endswith("_available")]
    assert len(questions) >= 14
    before = set(sys.modules)
    assert {type(question()) for question in questions} == {bool}
    assert availability.is_bf16_available(), "on a CPU, too"
    heavy = {"deepspeed", "transformers", "wandb", "mlflow", "datasets", "peft"}
    assert not heavy & (set(sys.modules) - before)


def test_a_folder_that_a_tracker_left_is_no_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    assert not availability.is_wandb_available()
    (tmp_path / "trackio").mkdir()
    (tmp_path / "trackio" / "__init__.py").write_text("raise ImportError('not even imported')")
    assert availability.is_trackio_available()


def test_patch_environment_restores_exactly(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_TEST_KEPT", "before")
    monkeypatch.delenv("DRIVETRAIN_TEST_NEW", raising=False)
    expected = dict(os.environ)
    patched = availability.patch_environment(drivetrain_test_kept=1, DRIVETRAIN_TEST_NEW="new")
    with pytest.raises(ZeroDivisionError), patched:
        assert os.environ["DRIVETRAIN_TEST_KEPT"] == "1"
        assert os.environ["DRIVETRAIN_TEST_NEW"] == "new"
        del os.environ["DRIVETRAIN_TEST_NEW"]
        1 / 0  # noqa: B018
    assert dict(os.environ) == expected


def test_an_old_torch_has_no_gpu_of_apple(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert drivetrain.is_mps_available(min_version="1.12")
    assert not drivetrain.is_mps_available(min_version="99.0")
