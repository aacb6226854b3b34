"""A run that was saved and loaded goes on as if nothing had happened; a refused load as well."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, CheckpointError, ProjectConfiguration, UsageError, set_seed
from said import said


def build(folder):
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, config={"report": False})
    set_seed(5)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer, row):
    accelerator.backward(model(row).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def flip_a_byte(directory):
    path = next(directory.glob("model-0-weights-*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.ranks(2)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path):
    accelerator, *parts = build(tmp_path)
    folders = [tmp_path / "checkpoints" / f"checkpoint_{number}" for number in range(3)]
    saved = []
    for _ in folders:
        saved.append(weights_of(parts[0]))
        accelerator.save_state()
        step(accelerator, *parts, torch.ones(2, 3))
    if accelerator.is_main_process:
        flip_a_byte(folders[2])
    accelerator.wait_for_everyone()
    again, fresh, _ = build(tmp_path)
    with said("drivetrain") as lines:
        assert again.resume()
    assert all(map(torch.equal, saved[1], weights_of(fresh)))
    if again.is_main_process:
        text = "\n".join(lines)
        assert "checkpoint_2/model-0-weights" in text
        assert "checkpoint_1" in text.rpartition("going on from")[2]
    with pytest.raises(CheckpointError, match="expected sha256"):
        again.load_state(folders[2])
    again.wait_for_everyone()
    if again.is_main_process:
        flip_a_byte(folders[0])
        flip_a_byte(folders[1])
    again.wait_for_everyone()
    with pytest.raises(CheckpointError, match="checkpoint_2/model-0-weights"):
        again.resume()  # never from the start, beside checkpoints
    accelerator.free_memory()
    again.free_memory()


def test_a_folder_without_a_manifest_is_passed_over_with_a_warning(tmp_path):
    accelerator, *_ = build(tmp_path)
    folders = [tmp_path / "checkpoints" / f"checkpoint_{number}" for number in range(3)]
    with pytest.raises(CheckpointError, match="found no folder of such a name"):
        accelerator.load_state()
    folders[0].mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"expected manifest.json in .*checkpoint_0"):
        accelerator.resume()  # never from the start, beside what may be one
    assert accelerator.save_state() == str(folders[1])
    folders[2].mkdir()
    with said("drivetrain", "manifest.json") as lines:
        assert accelerator.resume()
    (line,) = lines
    assert f"in {folders[2]}" in line
    assert line.endswith(f"going on from the one before, {folders[1]}")


def test_resume_starts_anew_where_there_is_nothing(tmp_path):
    accelerator, *_ = build(tmp_path)
    assert not accelerator.resume()
    assert not accelerator.resume(tmp_path / "last")
    accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_0").rename(tmp_path / ".last.old-0123456789abcdef")
    assert accelerator.resume(tmp_path / "last"), "a kill between two renames"
    assert accelerator.save_iteration == 1, "the number of the next save"
    accelerator, model, _ = build(tmp_path / "other")
    accelerator.save_state()
    accelerator.backward(model(torch.ones(2, 3)).sum())
    accelerator.load_state()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(UsageError, match="project_dir"):
        Accelerator(cpu=True).resume()


class Counter:
    """Counts its loads."""

    loads = 0
    state_dict = dict

    def load_state_dict(self, state):
        self.loads += 1


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_refused_load_changes_nothing(tmp_path, strategy):
    def start(lacking=None):
        whole = lacking is None
        accelerator = Accelerator(cpu=True, strategy=strategy)
        torch.manual_seed(0 if whole else 1)
        first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.Adam(first.parameters(), lr=0.1 if whole else 0.5)
        first, optimizer = accelerator.prepare(first, optimizer)
        second = nn.Sequential(nn.Linear(2, 3 if lacking == "second model" else 2))
        accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))
        by_batch = {"batch_sampler": [[0], [1]]} if lacking == "unit" else {}
        counter = Counter()
        if lacking != "object":
            accelerator.register_for_checkpointing(counter)
        if lacking != "scheduler":
            accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        if lacking != "loader":
            accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 2)), **by_batch))
        return accelerator, first, optimizer, counter

    first, *_ = start()
    first.save_state(tmp_path / "ck")
    first.free_memory()
    for lacking in ("object", "scheduler", "loader", "second model", "unit"):
        second, model, optimizer, counter = start(lacking)
        with second.gathered(model):
            before = weights_of(model)
        with pytest.raises(CheckpointError):
            second.load_state(tmp_path / "ck")
        with second.gathered(model):
            assert all(map(torch.equal, before, weights_of(model))), lacking
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]
        assert not counter.loads
        second.free_memory()
    with pytest.raises(UsageError, match="expected a directory"):
        Accelerator(cpu=True).save_state()
    with pytest.raises(UsageError, match="project_dir"):
        Accelerator(cpu=True).load_state()


def test_hooks_may_keep_models_out(tmp_path):
    accelerator = Accelerator(cpu=True)
    kept, left = accelerator.prepare(nn.Linear(2, 2), nn.Linear(3, 3))
    saved_to = []

    def hook(models, weights, directory):
        saved_to.append(directory)
        models.pop()
        weights.pop()

    handle = accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(tmp_path / "one")
    handle.remove()
    loader = accelerator.register_load_state_pre_hook(lambda models, directory: models.pop())
    before = left.weight.detach().clone()
    nn.init.zeros_(kept.weight)
    accelerator.load_state(tmp_path / "one")
    loader.remove()
    assert kept.weight.abs().sum() > 0
    assert torch.equal(left.weight, before)
    assert len(saved_to) == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_hooks_write_into_the_checkpoint_and_take_weights_alone(tmp_path, strategy):
    """The pair of hooks of trainers that save each part in a format of their own."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in models]
    model, other, *optimizers = accelerator.prepare(*models, *optimizers)

    def save(models, weights, directory):
        with accelerator.gathered(models[0]):
            if accelerator.is_main_process:
                torch.save(models[0].state_dict(), Path(directory, "part.pt"))
        assert len(models) == 2
        if accelerator.is_main_process:  # as such trainers do: rank 0 decides for all
            weights.pop(0)

    def load(models, directory):
        one = models.pop(0)
        with accelerator.gathered(one):
            one.load_state_dict(torch.load(Path(directory, "part.pt"), weights_only=True))

    def train(steps):
        for number in range(steps):
            row = torch.full((1, 2), 1.0 + number + accelerator.process_index)
            for one, optimizer in zip((model, other), optimizers, strict=True):
                step(accelerator, one, optimizer, row)
        others = accelerator.get_state_dict(other).items()
        return accelerator.get_state_dict(model) | {f"other.{n}": value for n, value in others}

    kept = accelerator.register_save_state_pre_hook(save)
    loading = accelerator.register_load_state_pre_hook(load)
    train(2)
    accelerator.save_state(tmp_path / "one")
    expected = {name: value.clone() for name, value in train(2).items()}
    accelerator.load_state(tmp_path / "one")
    found = train(2)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
    loading.remove()
    with pytest.raises(CheckpointError, match="a hook of load_state to load the weights of Linear"):
        accelerator.load_state(tmp_path / "one")
    kept.remove()
    accelerator.free_memory()


@pytest.mark.ranks(2)
def test_hooks_that_fail_on_one_rank_fail_on_all_and_leave_nothing(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))

    def fail_on_rank_1(models, weights, directory):
        Path(directory, f"file-{accelerator.process_index}").write_text("half")
        if not accelerator.is_main_process:
            raise OSError("the disk of the hook is full")

    handle = accelerator.register_save_state_pre_hook(fail_on_rank_1)
    with pytest.raises(CheckpointError, match="the disk of the hook is full"):
        accelerator.save_state(tmp_path / "one")
    accelerator.wait_for_everyone()
    assert not list(tmp_path.iterdir())
    accelerator.wait_for_everyone()
    handle.remove()
    (tmp_path / "one").mkdir(exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(tmp_path / "one")  # an empty directory is no obstacle
    accelerator.load_state(tmp_path / "one")

    def refuse_on_rank_1(models, directory):
        if not accelerator.is_main_process:
            raise OSError("the hook finds no file")

    accelerator.register_load_state_pre_hook(refuse_on_rank_1)
    with pytest.raises(CheckpointError, match="rank 1: .*the hook finds no file"):
        accelerator.load_state(tmp_path / "one")
    accelerator.free_memory()


@pytest.mark.parametrize("steps", [1, 3, 9, 11])  # in and after the first window, and a later one
def test_a_window_under_way_begins_again_in_a_resumed_run(steps, tmp_path):
    """Shuffled rows of two loaders, dropout, evaluations between windows."""
    rows = torch.arange(52.0).reshape(26, 2)

    def build():
        set_seed(5)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, config={"report": False})
        model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loaders = [DataLoader(part, batch_size=1, shuffle=True) for part in (rows[:13], rows[13:])]
        seen = DataLoader(rows, batch_size=9, shuffle=True)
        return accelerator, accelerator.prepare(model, optimizer, *loaders, seen)

    def train(accelerator, parts, stop=None):
        model, optimizer, one, two, seen = parts
        for _ in range(one.epoch, 2):
            for number, (a, b) in enumerate(zip(one, two, strict=True)):
                with accelerator.accumulate(model):
                    optimizer.zero_grad()
                    accelerator.backward(model(a + b).square().mean() / 1000)
                    optimizer.step()
                if number == stop:
                    accelerator.save_state(tmp_path / "checkpoint")
                    stop = None
                if accelerator.sync_gradients and optimizer.steps % 2 == 0:
                    for x in seen:
                        model(x)  # draws for dropout, too
        return weights_of(model)

    whole = train(*build(), stop=steps)
    accelerator, parts = build()
    accelerator.load_state(tmp_path / "checkpoint")
    assert all(map(torch.equal, train(accelerator, parts), whole))
