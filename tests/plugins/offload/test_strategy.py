"""The strategy ``offload`` is another one with a section set."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.config import Layer, NestedStrategy, resolve
from drivetrain.cost import ModelSpec
from drivetrain.errors import ConfigError, UnknownPluginError
from drivetrain.parallel.options import OffloadOptions
from drivetrain.registry import stores, strategies
from drivetrain.store import TensorStore
from drivetrain.strategy import find_strategy
from drivetrain_fsdp.fsdp import Fsdp
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.state import data_parallel
from drivetrain_offload.options import NvmeConfig, OffloadConfig
from drivetrain_offload.strategy import Offload, open_stores
from drivetrain_zero.options import Zero2Config, Zero3Config
from drivetrain_zero.zero import Zero2, Zero3
from linked_trainings import model_of, sgd, spread

ON_CPU = OffloadOptions(optimizer="cpu")


def resolved(**options):
    layer = Layer({"strategy": {"name": "offload", **options}})
    return resolve(layer, find_config=strategies().find_config)


def found(**options):
    made = resolved(**options)
    return find_strategy(made.strategy, made.strategy_config)


def test_options_go_where_they_belong():
    """Without any it is zero2 with state in host memory; any strategy with the section may be."""
    assert strategies().load("offload") is Offload
    assert find_strategy("offload") == (Zero2, Zero2Config(offload=ON_CPU))
    assert found() == (Zero2, Zero2Config(offload=ON_CPU))
    assert found(data_parallel={"bucket_mib": 3}) == (
        Zero2,
        Zero2Config(bucket_mib=3, offload=ON_CPU),
    )
    for given in ("fsdp", {"name": "fsdp"}):
        assert found(data_parallel=given) == (Fsdp, replace(Fsdp.Config(), offload=ON_CPU))
    options = {"optimizer": "nvme", "params": "nvme", "path": "/mnt", "delayed": True}
    options["store_options"] = {"threads": 3}
    kind, config = found(**options, data_parallel={"name": "zero3", "keep_below": 7})
    assert (kind, config) == (Zero3, Zero3Config(keep_below=7, offload=OffloadOptions(**options)))


def test_what_is_shown_can_be_read_again():
    made = resolved(data_parallel={"name": "zero3"}, ratio=0.5)
    again = resolve(Layer(made.to_dict()), find_config=strategies().find_config)
    assert again.strategy_config == made.strategy_config
    assert made.to_dict()["strategy"]["data_parallel"]["name"] == "zero3"


def test_wrong_options():
    section = {"name": "zero2", "offload": {"optimizer": "cpu"}}
    for options, message in (
        ({"optimizer": ""}, r"strategy\.optimizer: expected a store.*take the strategy zero2"),
        ({"data_parallel": section}, r"strategy\.data_parallel\.offload: expected nothing"),
        ({"data_parallel": {"bucket": 3}}, "did you mean 'bucket_mib'"),
        ({"ratio": 2.0}, "expected at most 1"),
        ({"params": "cpu"}, r"divides parameters.*offload\.params: cpu, found one that keeps"),
        ({"data_parallel": "ddp"}, "section offload, found 'ddp'.* for example zero2"),
        ({"data_parallel": "offload"}, "section offload, found 'offload'.* for example zero2"),
    ):
        with pytest.raises(ConfigError, match=message):
            found(**options)
    with pytest.raises(UnknownPluginError, match="'zero22'.*did you mean"):
        found(data_parallel="zero22")
    with pytest.raises(UnknownPluginError, match="'zero22'"):
        find_strategy("offload", OffloadConfig(data_parallel=NestedStrategy("zero22")))


def test_it_is_composed_in_other_strategies():
    config = MegatronConfig(data_parallel=NestedStrategy("offload"))
    assert data_parallel(config) == (Zero2, Zero2Config(offload=ON_CPU))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("delayed", [False, True])
def test_shards_beside_whole_values_are_counted(monkeypatch, delayed):
    """Owners keep their share where gathered values are approximate."""
    spread(monkeypatch)
    stores = {"offload": {"optimizer": "cpu", "delayed": delayed}}
    for strategy, links in (
        ({"name": "zero2"}, {"far": {"parameters": "int8"}}),
        ({"name": "zero2"}, {}),
        ({"name": "fsdp", "sharding": "grad"}, {}),
    ):
        config = {"strategy": {**strategy, **stores}, "links": links}
        accelerator, model = Accelerator(config=config, cpu=True), model_of()
        spec = ModelSpec.of(model, states=1)
        model, _ = accelerator.prepare(model, sgd(model))
        taken = accelerator.strategy_of(model)
        flats = [flat for unit in taken.placement.units for flat in unit.flats]
        whole = [flat for flat in flats if not flat.sharded]
        beside = [flat.shard.tensor.nbytes for flat in whole if flat.shard.separate]
        kept = sum(flat.owned * flat.layout.master.itemsize for flat in flats) if delayed else 0
        promised = type(taken).cost(taken.config, spec, taken.run).held
        assert promised.get("masters", 0) == sum(beside) + kept, strategy


# --- what every store owes, whatever it keeps tensors on, found by name ---


DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip
SHAPES = ((), (3, 0, 2), (1,), (1023,), (1024,), (1025,), (7, 11, 13), (3, 70_001))


@pytest.fixture(params=["cpu", "nvme"])
def store(request, tmp_path):
    kind = stores().load(request.param)
    made = (
        kind(NvmeConfig(path=str(tmp_path), staging_mib=1)) if request.param == "nvme" else kind()
    )
    yield made
    made.close()


def sample(shape=(5,), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 2**7, shape, generator=generator, dtype=torch.uint8)
    return numbers.to(torch.float32).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def same(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    plain = torch.float32 if found.dtype.itemsize == 1 else found.dtype
    assert torch.equal(found.to(plain), expected.to(plain))


def test_what_was_put_is_fetched(store):
    """Of every dtype and shape, before and after it was flushed; views and parameters too."""
    assert isinstance(store, TensorStore)
    given = {
        f"{dtype} {shape}": sample(shape, dtype, seed)
        for dtype in DTYPES
        for seed, shape in enumerate(SHAPES)
    }
    weight = torch.nn.Parameter(sample((40, 60)))
    given |= {"t": weight.t(), "s": weight[::3, 1::2]}
    for key, tensor in given.items():
        store.put(key, tensor)
    for flush in (False, True):
        if flush:
            store.flush()
        for key, tensor in given.items():
            found = store.fetch(key)
            same(found, tensor.detach())
            assert found.device == store.device
            assert not found.requires_grad


def test_the_last_put_counts_and_is_a_copy(store):
    for seed in range(20):
        store.put("k", given := sample((70_000,), seed=seed))
        store.put("other", sample((3,), seed=seed))
    given.fill_(-1)
    same(store.fetch("k"), sample((70_000,), seed=19))
    for shape, dtype in [((9,), torch.int64), ((90_000,), torch.float64), ((2, 2), torch.bool)]:
        store.put("k", sample(shape, dtype))
        same(store.fetch("k"), sample(shape, dtype))
    same(store.fetch("other"), sample((3,), seed=19))
    with pytest.raises(KeyError, match="gone"):
        store.fetch("gone")
    with pytest.raises(KeyError, match="gone"):
        store.prefetch(["k", "gone"])
    store.close()
    store.close()
    with pytest.raises(KeyError):
        store.fetch("k")


def test_prefetch_and_inference_mode_change_nothing(store):
    for seed in range(4):
        store.put(str(seed), sample((5000,), seed=seed))
    store.prefetch(["0", "1", "2", "1"])
    store.put("1", sample((5000,), seed=11))
    for key, seed in (("0", 0), ("1", 11), ("2", 2), ("3", 3), ("0", 0)):
        same(store.fetch(key), sample((5000,), seed=seed))
    with torch.inference_mode():
        store.put("k", sample())
    store.put("k", sample(seed=1))
    same(store.fetch("k"), sample(seed=1))
    store.fetch("k").add_(1)


def test_a_store_without_a_stepper_keeps_no_optimizer_state(monkeypatch):
    kinds = SimpleNamespace(load=lambda name: object)
    monkeypatch.setattr("drivetrain_offload.strategy.stores", lambda: kinds)
    with pytest.raises(ConfigError, match="'shelf', which keeps tensors only"):
        open_stores(OffloadOptions(optimizer="shelf"))
