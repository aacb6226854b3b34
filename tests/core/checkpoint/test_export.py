"""Exports are what Hugging Face style loaders read, and never a mixture of two models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from drivetrain.checkpoint import export
from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.saving import Save
from drivetrain.errors import CheckpointError, ConfigError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.shards import Ranges, Shard, TensorFacts

WORLD = World()


def tensors_of(count, value=0.0):
    return {f"layer.{i}": torch.full((10,), value + i) for i in range(count)}


def write(directory, tensors, size="10GB"):
    plan = export.plan_export([TensorFacts.of(name, t) for name, t in tensors.items()], size)
    export.write_export(
        directory, plan, lambda names: ((n, tensors[n]) for n in names), world=WORLD
    )
    return plan


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def same(found, expected):
    found = dict(found)
    alike = (torch.equal(found[name], tensor) for name, tensor in expected.items())
    return found.keys() == expected.keys() and all(alike)


def test_several_files_with_an_index(tmp_path):
    tensors = tensors_of(5)
    write(tmp_path, tensors, 80)
    assert names(tmp_path) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    assert same(export.read_export(tmp_path), tensors)


def test_a_tensor_above_the_limit_gets_its_own_file(tmp_path):
    tensors = {"a": torch.ones(1), "b": torch.ones(100), "c": torch.ones(1)}
    plan = write(tmp_path, tensors, 8)
    assert [[t.name for t in file] for file in plan.files.values()] == [["a"], ["b"], ["c"]]
    plan = export.plan_export([TensorFacts.of(name, tensors[name]) for name in "bca"], 8)
    assert [[t.name for t in file] for file in plan.files.values()] == [["b"], ["c", "a"]]
    mixed = {"narrow": torch.ones(1, dtype=torch.bfloat16), "wide": torch.ones(2)}
    plan = write(tmp_path / "mixed", mixed)
    (file,) = plan.files.values()
    assert [each.name for each in file] == ["wide", "narrow"], "so that each is aligned"
    assert same(export.read_export(tmp_path / "mixed"), mixed)


def test_negative_values_have_to_fit_a_dtype_too(tmp_path):
    def exported(values):
        shard = Shard("w", "", torch.tensor(values), (2,), Part.whole((2,)))
        Save(tmp_path / "ck", WORLD, overwrite=True).finish(Contents(models=[[shard]]))
        export.export_checkpoint(tmp_path / "ck", tmp_path / "out", dtype=torch.float16)
        return dict(export.read_export(tmp_path / "out"))["w"].tolist()

    with pytest.raises(CheckpointError, match=r"to fit torch.float16.*from -1e\+06 to 1"):
        exported([-1e6, 1.0])
    assert exported([-torch.inf, 1.0]) == [-torch.inf, 1.0], "it was infinite before"


def test_parts_of_an_exported_tensor(tmp_path):
    tensor = torch.arange(60.0).reshape(3, 4, 5)
    write(tmp_path, {"w": tensor})
    for dim in (0, 1, 2, -1, -3):
        some = Ranges(dim, ((0, 1), (2, 3)))
        assert torch.equal(export.ExportedWeights(tmp_path).read("w", some), some.of(tensor)), dim


def test_tied_tensors_are_stored_once_in_one_file(tmp_path):
    tied = torch.ones(4)
    plan = write(tmp_path, {"embedding": tied, "other": torch.ones(4), "head": tied})
    assert plan.aliases == {"head": "embedding"}
    assert plan.total_bytes == 32
    assert dict(export.read_export(tmp_path / "model.safetensors")).keys() == {"embedding", "other"}
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_earlier_export_leaves_nothing_behind(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("x")
    (tmp_path / ".model.safetensors.tmp-0123456789abcdef").write_text("of a killed export")
    for turn, limit in enumerate((80, "10GB", 40, 80, 80)):
        tensors = tensors_of(5, 10.0 * turn)
        plan = write(tmp_path, tensors, limit)
        index = ["model.safetensors.index.json"] if len(plan.files) > 1 else []
        kept = ["adapter_model.safetensors", "config.json"]
        assert names(tmp_path) == sorted([*plan.files, *index, *kept])
        assert same(export.read_export(tmp_path), tensors)


def test_fetching_goes_on_after_a_failure(tmp_path):
    """Fetching communicates: a rank that stopped would leave the others waiting."""
    seen = []
    plan = export.plan_export([TensorFacts(n, (1,), torch.float32, n) for n in "abc"])

    def fetch(wanted):
        for name in wanted:
            seen.append(name)
            yield name, torch.ones(1, device="meta")

    with pytest.raises(CheckpointError, match="hold strided data"):
        export.write_export(tmp_path, plan, fetch, world=WORLD)
    assert seen == ["a", "b", "c"]


def test_sizes():
    sizes = {"10GB": 10**10, "512MiB": 2**29, "1.5 kb": 1500, 7: 7, "7": 7, "7B": 7}
    assert {text: export.parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "-1GB", 0, -5, "10 apples", "0MB"):
        with pytest.raises(ConfigError, match="expected a file size such as '10GB'"):
            export.parse_size(text)


def test_damaged_exports(tmp_path):
    def refused(message, folder=tmp_path):
        with pytest.raises(CheckpointError, match=message):
            list(export.read_export(folder))

    refused("found neither")
    refused("there is no exported model", tmp_path / "none.safetensors")
    write(tmp_path, tensors_of(4), 80)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused("1 are missing: model-00002-of-00002")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 20)
    refused("is not whole")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    refused("expected the index of an export, with weight_map")
    for file in ("../secret.safetensors", "/etc/passwd", "a/b", "", 3, None):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        refused("expected a plain file name")


def test_a_killed_export_never_mixes_two_models(tmp_path, monkeypatch):
    write(tmp_path, tensors_of(4), 80)
    real, moved = Path.replace, []

    def stop(self, target):
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, tensors_of(4, 10.0), 80)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="found neither"):
        list(export.read_export(tmp_path))
    write(tmp_path, tensors_of(4, 20.0), 80)
    assert same(export.read_export(tmp_path), tensors_of(4, 20.0))
    assert len(names(tmp_path)) == 3
