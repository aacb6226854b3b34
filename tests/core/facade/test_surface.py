"""The public surface, frozen: it changes only together with surface.txt and options.txt."""

import inspect
import re
from enum import Enum
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import drivetrain
import reference
from drivetrain import Accelerator, registry
from drivetrain.config.schema import RunConfig

SURFACE = Path(__file__).with_name("surface.txt")
"""A line for each public method with its defaults, each property and each attribute of the
Accelerator, and for what else is called under a public name."""

OPTIONS = SURFACE.with_name("options.txt")
"""A line for each option of a run, and of strategies, stores and methods for slow links: its type,
default, least and largest value."""


def test_methods_properties_and_attributes_are_the_frozen_ones():
    names = ["__init__", *(name for name in dir(Accelerator) if not name.startswith("_"))]
    found = {f"{name}{shape(name)}" for name in names}
    found |= {f"{name}: attribute" for name in vars(Accelerator(cpu=True)) if name[0] != "_"}
    for name in set(drivetrain.__all__) - {"Accelerator", "__version__"}:
        each = getattr(drivetrain, name)
        if not (isinstance(each, type) and issubclass(each, Enum | Exception)):
            found.add(f"drivetrain.{name}{signature(each)}")
    assert found == set(SURFACE.read_text(encoding="utf-8").splitlines())
    assert list(drivetrain.__all__) == sorted(drivetrain.__all__)


def test_options_have_the_frozen_defaults_and_limits():
    kinds = {
        f"{name}.": installed.outline(name).Config
        for installed in (registry.strategies(), registry.stores(), registry.compressors())
        for name in installed.names
    }
    found = [
        f"{key}: {inspect.formatannotation(one.type)} = {one.default}, "
        f"{one.minimum} to {one.maximum}"
        for prefix, kind in {"": RunConfig, **kinds}.items()
        for key, one in reference.knobs(kind, prefix)
    ]
    assert found == OPTIONS.read_text(encoding="utf-8").splitlines()


def test_verbs_go_through_the_verbs_that_a_subclass_overrides(tmp_path):
    accelerator = Overriding(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(2, 2)))
    model, *_ = accelerator.prepare(model, optimizer, scheduler, loader)
    assert accelerator.called() == ["prepare_data_loader", "prepare_optimizer", "prepare_scheduler"]
    accelerator.pipeline_step(model, torch.ones(2, 2), loss_fn=lambda outputs, _: outputs.sum())
    assert accelerator.called() == ["backward"]
    accelerator.save_state(tmp_path / "saved")
    assert accelerator.called() == ["wait_for_checkpoint"]
    accelerator.load_state(tmp_path / "saved")
    assert accelerator.called() == ["wait_for_checkpoint", "wait_for_everyone"]
    with accelerator.main_process_first():
        assert accelerator.called() == []
    assert accelerator.called() == ["wait_for_everyone"]
    accelerator.clear()
    accelerator.end_training()
    assert accelerator.called() == ["free_memory", "free_memory"]


def shape(name: str) -> str:
    """Return the arguments of a method without their types, or whether a property can be set."""
    member = inspect.getattr_static(Accelerator, name)
    if isinstance(member, property):
        return ": property, settable" if member.fset else ": property"
    return signature(member, bound=1)


def signature(function: object, bound: int = 0) -> str:
    """Return the arguments without their types, and without the first ones that are bound."""
    arguments = [*inspect.signature(function).parameters.values()][bound:]
    found = inspect.Signature([each.replace(annotation=each.empty) for each in arguments])
    return re.sub(" at 0x[0-9a-f]+", "", str(found))


class Overriding(Accelerator):
    """Notes the verbs that other verbs call."""

    _called: tuple[str, ...] = ()

    def called(self) -> list[str]:
        called, self._called = list(self._called), ()
        return called


def _noting(name):
    def verb(self, *args, **options):
        self._called = (*self._called, name)
        return getattr(Accelerator, name)(self, *args, **options)

    return verb


NOTED = """
backward free_memory prepare_data_loader prepare_optimizer prepare_scheduler wait_for_checkpoint
wait_for_everyone
"""
for _name in NOTED.split():
    setattr(Overriding, _name, _noting(_name))
