"""Walking, moving, cutting and joining nested data."""

import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from drivetrain import nested
from drivetrain.errors import UsageError

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    label: str = "label"


@dataclass
class Output(OrderedDict):
    """As the output classes of models: fields and items are the same."""

    logits: Tensor
    loss: Tensor

    def __post_init__(self):
        for name in ("logits", "loss"):
            self[name] = getattr(self, name)


class Encoding(UserDict):
    """As a tokenizer's output: moves itself, and carries more than its items."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings
        self.moves = []

    def to(self, device, *, non_blocking=False):
        self.moves.append((str(device), non_blocking))
        for key, value in self.data.items():
            self.data[key] = value.to(device)
        return self


class Stubborn:
    """Moves itself, and takes nothing but the device."""

    def __init__(self):
        self.device = None

    def to(self, device):
        self.device = device
        return self


class Lenient(Stubborn):
    """Takes whatever else it is given."""

    def to(self, device, **given):
        self.given = given
        return super().to(device)


def tensor():
    return torch.arange(6.0).view(3, 2)


def add_one(data):
    return nested.recursively_apply(lambda t: t + 1, data)


def test_containers_keep_their_classes_and_what_they_carry():
    data = [(tensor(), "text"), Pair(tensor(), None), {"a": {"b": tensor()}}, Frozen(tensor())]
    result = add_one(data)
    assert [type(item) for item in result] == [tuple, Pair, dict, Frozen]
    for found in (result[0][0], result[1].left, result[2]["a"]["b"], result[3].x):
        torch.testing.assert_close(found, tensor() + 1)
    assert (result[0][1], result[1].right, result[3].label) == ("text", None, "label")
    torch.testing.assert_close(data[0][0], tensor(), msg="the argument changed")

    factory = defaultdict(list, {"a": tensor()})
    assert add_one(factory)["missing"] == []
    ordered = add_one(OrderedDict(b=tensor(), a=tensor()))
    assert (type(ordered), list(ordered)) == (OrderedDict, ["b", "a"])
    encoding = Encoding({"ids": tensor()}, encodings="kept")
    moved = add_one(encoding)
    assert moved.encodings == "kept"
    torch.testing.assert_close(encoding["ids"], tensor(), msg="the argument changed")
    proxy = add_one(types.MappingProxyType({"a": tensor()}))
    assert isinstance(proxy, types.MappingProxyType)

    output = add_one(Output(tensor(), torch.tensor(1.0)))
    assert type(output) is Output
    assert output.logits is output["logits"]
    assert output.loss.item() == 2

    with pytest.raises(TypeError, match="found str"):
        nested.recursively_apply(lambda t: t, [tensor(), "text"], error_on_other_type=True)


def test_send_to_device_moves_everything_but_skipped_keys():
    data = {"a": [tensor()], "p": Pair(tensor(), 1), "f": Frozen(tensor())}
    moved = nested.send_to_device(data, "meta")
    tensors = moved["a"][0], moved["p"].left, moved["f"].x
    assert {each.device.type for each in tensors} == {"meta"}
    assert moved["p"].right == 1

    data = {"a": tensor(), "inner": {"b": tensor(), "a": tensor()}}
    moved = nested.send_to_device(data, "meta", skip_keys="a")
    assert moved["a"].device.type == "cpu"
    assert moved["inner"]["a"].device.type == "cpu"
    assert moved["inner"]["b"].device.type == "meta"

    encoding = Encoding({"ids": tensor()})
    assert nested.send_to_device(encoding, "meta", non_blocking=True) is encoding
    assert encoding.moves == [("meta", True)]
    encoding = Encoding({"ids": tensor(), "x": tensor()})
    kept = nested.send_to_device(encoding, "meta", skip_keys=["x"])
    assert (kept["ids"].device.type, kept["x"].device.type) == ("meta", "cpu")
    assert nested.send_to_device(Stubborn(), "meta", non_blocking=True).device == "meta"
    lenient = nested.send_to_device(Lenient(), "meta", non_blocking=True)
    assert lenient.given == {"non_blocking": True}
    assert nested.send_to_device([Stubborn], "meta") == [Stubborn], "a class is not moved"


def test_sizes_slices_and_dtypes():
    for data, size in (
        ({"scalar": torch.tensor(1.0), "x": tensor()}, 3),
        (["text", (None, tensor())], 3),
        (Frozen(tensor()), 3),
        (torch.tensor(0), None),
        ({"a": "text"}, None),
    ):
        assert nested.find_batch_size(data) == size

    first, second = torch.ones(1), torch.ones(2)
    found = list(nested.tensors_in({"a": [first, "text"], "b": {"c": (second,)}}))
    assert found[0] is first
    assert found[1] is second
    assert len(found) == 2

    cut = nested.slice_tensors({"x": tensor(), "loss": torch.tensor(2.0), "n": 1}, slice(1, 3))
    torch.testing.assert_close(cut["x"], tensor()[1:3])
    assert (cut["loss"].item(), cut["n"]) == (2.0, 1)

    kinds = [torch.bfloat16, torch.float16, torch.float64, torch.int64]
    found = nested.convert_to_fp32([torch.ones(1, dtype=kind) for kind in kinds])
    assert [t.dtype for t in found] == [torch.float32, torch.float32, torch.float64, torch.int64]


def test_concatenate_joins_what_matches():
    item = {"p": Pair(tensor(), [tensor()]), "f": Frozen(tensor())}
    joined = nested.concatenate([{"p": item["p"]}] * 2)
    assert type(joined["p"]) is Pair
    assert joined["p"].right[0].shape == (6, 2)
    wide = nested.concatenate([{"p": item["p"]}] * 2, dim=1)
    assert wide["p"].right[0].shape == (3, 4)
    assert nested.concatenate([[tensor(), "text"]])[1] == "text", "one item may hold anything"

    for items in ([], [[tensor()], [tensor(), tensor()]], [{"a": tensor()}, {"b": tensor()}]):
        with pytest.raises(UsageError, match="expected"):
            nested.concatenate(items)

    with pytest.raises(TypeError, match="found str"):
        nested.concatenate([Frozen(tensor()), Frozen(tensor())])
