"""Plain values and single objects survive exactly; all else is refused; reading runs no code."""

import json
import math
import os
import pickle
from collections import Counter, OrderedDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint.encoding import encode, load, save
from drivetrain.checkpoint.manifest import decode
from drivetrain.errors import CheckpointError

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tensor", "$tuple", "$x"]), inner, max_size=2)
    ),
    max_leaves=12,
)


def there_and_back(value):
    tensors = {}
    text = json.dumps(encode(value, "state", tensors), allow_nan=False)
    return decode(json.loads(text), tensors)


def types(value):
    if isinstance(value, (list, tuple)):
        return type(value), [types(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(type(key), types(item)) for key, item in value.items()]
    return type(value)


@settings(max_examples=150, deadline=None)
@given(values)
def test_round_trip_with_types(value):
    found = there_and_back(value)
    assert found == value
    assert types(found) == types(value)


def test_nan_infinities_and_dtypes_survive():
    found = there_and_back([math.nan, math.inf, -math.inf, -0.0, torch.ones(2).bfloat16()])
    assert math.isnan(found[0])
    assert found[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, found[3]) == -1
    assert found[4].dtype == torch.bfloat16


def test_counters_stay_ordered_dicts_become_dicts_and_like_paths_stay_apart():
    assert type(there_and_back(Counter({3: 2}))) is Counter
    value = [OrderedDict(a=1), defaultdict(list, b=[2]), torch.Size([3])]
    assert there_and_back(value) == [{"a": 1}, {"b": [2]}, (3,)]
    one, two, three = map(torch.tensor, (1, 2, 3))
    found = there_and_back({"a.b.c": one, "a": {"b.c": two}, "a.b": {"c": three}})
    assert found == {"a.b.c": one, "a": {"b.c": two}, "a.b": {"c": three}}


Pair = namedtuple("Pair", "a b")


def test_other_objects_are_refused_by_path():
    for value, culprit in {
        len: "builtins.builtin_function_or_method",
        Pair(1, 2): "Pair",
        b"bytes": "builtins.bytes",
        1j: "builtins.complex",
        frozenset({1}): "builtins.frozenset",
        torch.float32: "torch.dtype",
    }.items():
        with pytest.raises(CheckpointError, match=r"objects\[0\]\.inner\[1\] is a .*" + culprit):
            encode([{"inner": [0, value]}], "objects", {})
    inside = []
    inside.append(inside)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(inside, "state", {})
    for key in (None, 1.5, True, (1,)):
        with pytest.raises(CheckpointError, match="keys of a dict in a checkpoint must be str or"):
            encode({key: 1}, "state", {})


def test_unknown_or_broken_tags_are_refused():
    for body in ({"$code": 1}, {"$tensor": "gone"}, {"$dict": 3}, {"$float": "x"}):
        with pytest.raises(CheckpointError, match="expected a known tag"):
            decode(body, {})


def test_round_trip(tmp_path):
    for safe, name in ((True, "f.safetensors"), (False, "f.pt")):
        path = tmp_path / name
        save({"a": torch.ones(2, 3).T, "b": torch.tensor(1)}, path, safe_serialization=safe)
        save({"a": torch.ones(2, 3).T, "b": torch.tensor(2)}, path, safe_serialization=safe)
        found = load(path)
        assert found["a"].shape == (3, 2)
        assert found["b"].item() == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_safetensors_hold_only_tensors(tmp_path):
    for obj in ([torch.ones(1)], {"a": 1}, {1: torch.ones(1)}):
        with pytest.raises(CheckpointError, match="for safe_serialization, found"):
            save(obj, tmp_path / "f", safe_serialization=True)
    assert list(tmp_path.iterdir()) == []


def test_failing_save_keeps_the_old_file(tmp_path):
    save([1], tmp_path / "f")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        save(lambda: 1, tmp_path / "f")
    assert load(tmp_path / "f") == [1]
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save([1], tmp_path / "none" / "f")


class Evil:
    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def test_loading_runs_no_code(tmp_path):
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil(tmp_path / "canary1")))
    torch.save(Evil(tmp_path / "canary2"), tmp_path / "evil2.pt")
    for name in ("evil.pt", "evil2.pt"):
        with pytest.raises(CheckpointError, match="never loaded because that runs code"):
            load(tmp_path / name)
    assert not list(tmp_path.glob("canary*"))


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(CheckpointError, match="there is no file"):
        load(tmp_path / "none")
    for name in ("f.pt", "f.safetensors"):
        (tmp_path / name).write_bytes(b"\xff" * 100)
        with pytest.raises(CheckpointError, match=name):
            load(tmp_path / name)
