"""The folder of a checkpoint."""

import pytest


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "checkpoint")
