"""``notebook_launcher`` as scripts for Accelerate call it."""

import pytest
from torch.multiprocessing import ProcessRaisedException

from drivetrain.compat import accelerate as ours
from drivetrain.errors import UsageError


def test_accelerates_arguments_choose_precision_and_processes(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("strategy: zero1")
    monkeypatch.setenv("DRIVETRAIN_CONFIG", str(tmp_path / "run.yaml"))

    def train(folder):
        accelerator = ours.Accelerator(cpu=True)
        text = f"{accelerator.mixed_precision} {accelerator.config.strategy}"
        (folder / str(accelerator.process_index)).write_text(text)

    ours.notebook_launcher(train, (tmp_path,), 2, "bf16", use_port="29511")
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["bf16 zero1"] * 2


def test_processes_start_again_after_a_failure_so_many_times(tmp_path):
    def train(folder):
        starts = len(list(folder.iterdir()))
        (folder / str(starts)).touch()
        assert starts == 2, f"start {starts}"

    with pytest.raises(ProcessRaisedException, match="start 1"):
        ours.notebook_launcher(train, (tmp_path,), 1, max_restarts=1)
    ours.notebook_launcher(train, (tmp_path,), 1, max_restarts=1)
    assert len(list(tmp_path.iterdir())) == 3


def test_no_precision_leaves_it_to_the_launch_configuration(monkeypatch):
    given = []
    start = "drivetrain.notebook.notebook_launcher"
    monkeypatch.setattr(start, lambda *args, **options: given.append((args, options)))
    ours.notebook_launcher(print, (1,), 2)
    assert given == [((print, (1,), 2), {"mixed_precision": None})]
    with pytest.raises(UsageError, match="num_nodes=2; .* 'drivetrain launch'"):
        ours.notebook_launcher(print, num_nodes=2)
