"""``drivetrain checkpoint``: shows what is there, finds whatever is wrong, exports one by one."""

import gc
import json
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from drivetrain.checkpoint import manifest
from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.export import read_export
from drivetrain.checkpoint.loading import ModelReader
from drivetrain.checkpoint.manifest import SavedTensor
from drivetrain.checkpoint.saving import Save
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.shards import Shard
from drivetrain_launch.commands.checkpoint import summary
from manifests import rewrite

WEIGHT = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def whole(name, tensor, state=""):
    return Shard(name, state, tensor, tuple(tensor.shape), Part.whole(tensor.shape))


def pieces(name, tensor, cut, state=""):
    """Two flat ranges, as two ranks that share a parameter hold them."""
    for first, last in ((0, cut), (cut, tensor.numel())):
        part = Part((0,) * tensor.dim(), tuple(tensor.shape), (first, last))
        yield Shard(name, state, tensor.reshape(-1)[first:last], tuple(tensor.shape), part)


@pytest.fixture
def saved(tmp_path):
    first = [
        *pieces("embedding.weight", WEIGHT, 7),
        whole("norm.weight", torch.ones(6, dtype=torch.bfloat16)),
        whole("norm.count", torch.tensor(3)),
        *pieces("embedding.weight", WEIGHT * 2, 9, "0.exp_avg"),
    ]
    contents = Contents(
        models=[first, [whole("bias", torch.tensor([1.0, 1e6]))]],
        aliases=[{"head.weight": "embedding.weight"}, {}],
        state={"steps": [7]},
        rank_state={"random": torch.zeros(4, dtype=torch.uint8)},
    )
    Save(tmp_path / "ck", World()).finish(contents)
    return tmp_path / "ck"


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def weights_file(directory):
    return directory / "model-0-weights-00000-of-00001.safetensors"


def test_inspect_shows_every_tensor_when_asked(command, saved):
    out = command.output("checkpoint", "inspect", str(saved), "--all")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "format version 1" in lines
    assert "ranks that wrote it 1" in lines
    assert "steps of the optimizers 7" in lines
    assert "embedding.weight F32 4 x 6 96 B 2" in lines
    assert "embedding.weight 0.exp_avg F32 4 x 6 96 B 2" in lines
    assert "norm.count I64 scalar 8 B 1" in lines
    assert "head.weight embedding.weight" in lines


def test_inspect_shows_a_row_for_layers_that_repeat():
    def tensor(name, shape, state=""):
        return SavedTensor(name, state, "F32", shape, ())

    layers = [tensor(f"layers.{i}.weight", (4, 6)) for i in (10, 0, 1, 2)]
    state = [tensor(one.name, (4, 6), "0.exp_avg") for one in layers]
    wide = [tensor("layers.3.weight", (8, 6)), tensor("head.0.bias", ())]
    assert summary([*layers, *state, *wide]) == [
        ("head.0.bias", "scalar", "F32", "1", "4 B", "", ""),
        ("layers.{0..2,10}.weight", "4 x 6", "F32", "4", "384 B", "exp_avg F32", "384 B"),
        ("layers.3.weight", "8 x 6", "F32", "1", "192 B", "", ""),
        ("all", "", "F32", "6", "580 B", "exp_avg F32", "384 B"),
    ]
    rows = summary([*layers, *state[:2]])  # layers of which two have never been stepped
    assert [row[0] for row in rows] == ["layers.{0,10}.weight", "layers.{1..2}.weight", "all"]


def test_inspect_as_json(command, saved):
    found = json.loads(command.output("checkpoint", "inspect", str(saved), "--json"))
    assert (found["version"], found["world_size"], found["steps"]) == (1, 1, [7])
    assert found["models"][0]["aliases"] == {"head.weight": "embedding.weight"}
    assert found["models"][0]["tensors"][0] == {
        "name": "embedding.weight",
        "state": "",
        "dtype": "F32",
        "shape": [4, 6],
        "bytes": 96,
        "parts": 2,
    }
    assert found["files"][weights_file(saved).name] == weights_file(saved).stat().st_size
    assert found["bytes"] == sum(found["files"].values())


def test_a_manifest_without_aliases_is_read(command, saved):
    def drop(body):
        for model in body["models"]:
            del model["aliases"]

    rewrite(saved, drop)
    out = command.output("checkpoint", "inspect", str(saved), "--json")
    assert json.loads(out)["models"][0]["aliases"] == {}
    assert command("checkpoint", "verify", str(saved))[0] == 0


def test_what_is_no_checkpoint(command, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "checkpoint_0"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    for action, *more in (("inspect",), ("verify",), ("export", "--output", "out")):
        err = command.error("checkpoint", action, str(tmp_path / "none"), *more)
        assert "there is no checkpoint" in err
        beside = command.error("checkpoint", action, str(folder.parent / "checkpoint_1"), *more)
        assert f"checkpoint_1; those beside it: {folder}; name one of them" in beside
        for path, message in (
            (folder / "manifest.json", "expected the folder of a checkpoint, found the file"),
            (tmp_path / "run", f"found checkpoints below it: {folder}; name one of them"),
        ):
            assert message in command.error("checkpoint", action, str(path), *more, code=4)


def test_verify_finds_nothing_wrong(command, saved):
    code, out, err = command("checkpoint", "verify", str(saved))
    assert (code, err) == (0, "")
    assert out.startswith("ok: ")
    assert "5 tensors, each element once" in out


def test_verify_lists_all_that_is_wrong(command, saved):
    weights = weights_file(saved)
    weights.write_bytes(weights.read_bytes()[:-1])
    other = saved / "model-1-weights-00000-of-00001.safetensors"
    content = bytearray(other.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    (saved / "rank-00000.safetensors").unlink()
    err = command.error("checkpoint", "verify", str(saved), code=4)
    lines = err.splitlines()
    assert len(lines) == 3
    assert any("model-0-weights" in line and "bytes in" in line for line in lines)
    assert any("model-1-weights" in line and "expected sha256" in line for line in lines)
    assert any("rank-00000" in line and "found none" in line for line in lines)


def test_verify_sees_a_damaged_manifest_and_a_newer_format(command, saved):
    rewrite(saved, lambda body: body.update(version=9))
    err = command.error("checkpoint", "verify", str(saved), code=4)
    assert "expected format version 1" in err
    (saved / "manifest.json").write_text("{")
    assert "is damaged: expected JSON, found" in command("checkpoint", "verify", str(saved))[2]


def test_verify_sees_parts_that_overlap_and_are_of_the_wrong_kind(command, saved):
    def twice(body):
        first, second = body["models"][0]["tensors"][0]["parts"]
        first["flat"], second["flat"] = [0, 12], [6, 18]
        body["models"][0]["tensors"][1]["parts"][0]["key"] = "none"

    rewrite(saved, twice)
    err = command.error("checkpoint", "verify", str(saved), code=4)
    assert "'embedding.weight': expected each element in one part" in err
    assert "expected 12 elements of F32 as 'embedding.weight'" in err
    assert "expected 6 elements of BF16 as 'none', found nothing" in err


OVERLAPS = [
    ([Part((0, 0), (4, 3)), Part((0, 3), (4, 3))], False),
    ([Part((0, 0), (4, 4)), Part((0, 3), (4, 3))], True),
    ([Part((0, 0), (2, 6)), Part((2, 0), (2, 6)), Part((1, 5), (1, 1))], True),
    ([Part((2, 0), (2, 6)), Part((3, 5), (1, 1))], True),
    ([Part((0, 0), (4, 6), (0, 8)), Part((0, 0), (4, 6), (8, 24))], False),
    ([Part((0, 0), (4, 6), (0, 9)), Part((0, 0), (4, 6), (8, 24))], True),
    ([Part((0, 0), (4, 6), (0, 6)), Part((1, 0), (3, 6))], False),
    ([Part((0, 0), (4, 6), (0, 7)), Part((1, 0), (3, 6))], True),
    ([Part((), ()), Part((), ())], True),
    ([Part((), ())], False),
    ([Part((0,), (0,)), Part((0,), (0,))], False),
]
"""Parts of a tensor, and whether two of them hold the same element."""


def test_overlap_of_parts():
    for parts, overlap in OVERLAPS:
        for order in (parts, parts[::-1]):
            assert (manifest.first_overlap(order) is not None) is overlap, order


def test_export_is_what_loaders_read(command, saved, tmp_path):
    code, out, err = command("checkpoint", "export", str(saved), "--output", "out")
    assert (code, err) == (0, "")
    assert "head.weight is tied to embedding.weight and written once" not in out  # saved once
    assert "tokenizer's files were not copied" in out
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["embedding.weight", "norm.count", "norm.weight"]
    assert torch.equal(found["embedding.weight"], WEIGHT)
    assert found["norm.weight"].dtype == torch.bfloat16
    assert found["norm.count"].item() == 3
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_export_options(command, saved, tmp_path):
    arguments = ["checkpoint", "export", str(saved), "--output", "out", "--dtype", "bf16"]
    assert command(*arguments, "--max-shard-size", "60")[0] == 0
    assert len([name for name in files(tmp_path / "out") if name.startswith("model-")]) == 2
    found = dict(read_export(tmp_path / "out"))
    assert found["embedding.weight"].dtype == torch.bfloat16
    assert found["norm.count"].dtype == torch.int64
    other = (*arguments[:5], "--model", "1", "--verify", "size")
    assert "found model-00001-of-00002.safetensors in out; choose" in command.error(*other)
    assert dict(read_export(tmp_path / "out")).keys() == found.keys()
    assert command(*other, "--overwrite")[0] == 0
    assert dict(read_export(tmp_path / "out"))["bias"].tolist() == [1.0, 1e6]
    assert files(tmp_path / "out") == ["model.safetensors"]


def test_names_that_were_saved_twice_are_written_once(command, tmp_path):
    shards = [whole("a", WEIGHT), whole("b", WEIGHT)]
    Save(tmp_path / "ck", World()).finish(Contents(models=[shards], aliases=[{"b": "a"}]))
    out = command.output("checkpoint", "export", "ck", "--output", "out")
    assert "b is tied to a and written once" in out
    assert list(dict(read_export(tmp_path / "out"))) == ["a"]


def test_export_refuses_what_it_cannot_do(command, saved, tmp_path):
    def refused(*options, code=4):
        words = ("checkpoint", "export", str(saved), "--output", "out", *options)
        err = command.error(*words, code=code)
        assert not (tmp_path / "out").exists() or files(tmp_path / "out") == []
        return err

    assert "expected model 5" in refused("--model", "5")
    assert "file size such as" in refused("--max-shard-size", "3 apples", code=2)
    said = refused("--model", "1", "--dtype", "fp16")
    assert "values of 'bias' to fit torch.float16" in said
    assert "to 1e+06" in said
    weights_file(saved).write_bytes(weights_file(saved).read_bytes()[:-1])
    assert "bytes in" in refused()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_holds_one_tensor_at_a_time(command, tmp_path, monkeypatch, dtype):
    shards = [shard for i in range(6) for shard in pieces(f"w{i}", WEIGHT + i, 5)]
    Save(tmp_path / "ck", World()).finish(Contents(models=[shards]))
    alive, most = [], []
    real = ModelReader.read

    def counted(self, *args, **options):
        gc.collect()
        most.append(sum(ref() is not None for ref in alive))
        tensor = real(self, *args, **options)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(ModelReader, "read", counted)
    command.output("checkpoint", "export", "ck", "--output", "out", "--dtype", dtype)
    assert len(most) == 6
    assert max(most) == 0  # nothing of the earlier ones when the next is read
