"""What an Accelerator does and answers for a script that imports ``accelerate``."""

import math
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
from drivetrain.compat import accelerate as ours
from drivetrain.errors import CheckpointError, UsageError


@pytest.mark.parametrize(
    ("made_by", "gradient"), [(ours.Accelerator, 2.0), (drivetrain.Accelerator, 4.0)]
)
def test_a_short_last_window_is_divided_as_by_accelerate(made_by, gradient):
    accelerator = made_by(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.tensor([[1.0], [2.0], [4.0]]))
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1, bias=False), DataLoader(data))
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
        if accelerator.sync_gradients:
            last = model.weight.grad.item()
            model.weight.grad = None
    assert last == gradient


@pytest.mark.ranks(2)
def test_places_of_a_process_along_the_axes_and_words_among_them(tmp_path):
    tensors = {"name": "megatron", "tp": 2}
    for strategy, place in (("ddp", (0, 0, 1)), (tensors, (1, 0, 0))):
        accelerator = ours.Accelerator(cpu=True, strategy=strategy)
        found = (
            accelerator.tensor_parallel_rank,
            accelerator.pipeline_parallel_rank,
            accelerator.data_parallel_rank,
        )
        assert found == tuple(each * accelerator.process_index for each in place)
        assert accelerator.multi_device
        assert accelerator.should_save_model == accelerator.is_main_process
        saved = tmp_path / f"{found}"
        accelerator.save({"x": torch.ones(1)}, saved)
        assert saved.exists() == accelerator.is_main_process
        assert accelerator.reduce(torch.ones(1)).item() == accelerator.mesh["dp"].size
        mine = 1 + accelerator.data_parallel_rank
        longer = accelerator.pad_across_processes(torch.ones(mine))
        assert (len(longer), longer.sum()) == (accelerator.mesh["dp"].size, mine)
        count = 1 - accelerator.data_parallel_rank  # of the last replica there is no sample
        assert accelerator.metric_mean(2.0 if count else math.nan, count) == 2.0
        if accelerator.is_last_process:
            accelerator.set_trigger()
        assert [accelerator.check_trigger(), accelerator.check_trigger()] == [True, False]


def test_what_is_not_here_names_the_way_out():
    assert ours.Accelerator(cpu=True).fp8_recipe_handler is None

    with pytest.raises(UsageError, match="make one in each process"):
        pickle.dumps(ours.Accelerator(cpu=True))


# --- ``save_state`` and ``save_model`` with Accelerate's arguments ---


def prepared():
    accelerator = ours.Accelerator(cpu=True)
    return accelerator, accelerator.prepare(nn.Linear(2, 2))


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    accelerator, model = prepared()
    folder = tmp_path / "state"
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        accelerator.save_state(str(folder))
    (folder / "note").touch()
    nn.init.constant_(model.weight, 3.0)
    accelerator.load_state(str(folder), map_location="cpu")
    assert model.weight.eq(2.0).all()
    accelerator.save_state(str(folder))
    assert not (folder / "note").exists()
    with pytest.raises(CheckpointError, match="already exists"):
        accelerator.save_state(str(folder), overwrite=False)


@pytest.mark.parametrize("safe", [True, False])
def test_files_are_safetensors_and_a_line_says_so(tmp_path, caplog, safe):
    accelerator, model = prepared()
    with caplog.at_level("INFO"):
        accelerator.save_state(tmp_path / "state", safe)
        accelerator.save_model(model, tmp_path / "model", "1GB", safe)
    said = [line for line in caplog.messages if "safe_serialization=False has no effect" in line]
    assert len(said) == (0 if safe else 2)
    assert not [*tmp_path.rglob("*.bin"), *tmp_path.rglob("*.pt"), *tmp_path.rglob("*.pkl")]
    found = load_file(tmp_path / "model" / "model.safetensors")
    torch.testing.assert_close(found["weight"], model.weight.detach())
