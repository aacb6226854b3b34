"""A cell on paper: what its ranks and its stages get of a model, and the divisions to try."""

from drivetrain.paper.transformer import GptShape
from drivetrain_megatron.paper.step import CellOnPaper, cut_into_stages, divided

SHAPE = GptShape(layers=6, hidden=64, heads=8, seq=16, vocab=128)


def test_stages_in_the_middle_have_the_blocks_left_over():
    units = SHAPE.units(1, "none", fused=True)
    counts = [len(stage) for stage in cut_into_stages(units, 4)]
    assert counts == [1 + 1, 2, 2, 1 + 1]  # embedding and head lie on the first and the last one


def test_inputs_of_recomputed_blocks_are_divided_with_the_tokens_alone():
    block = SHAPE.units(1, "full", fused=True)[1]
    assert block.kept > 0
    assert divided(block, 4, by_tokens=False).kept == block.kept
    assert divided(block, 4, by_tokens=True).kept == block.kept / 4


def test_divisions_to_try_stay_inside_of_hosts_and_divide_the_model():
    found = list(CellOnPaper.layouts(blocks=12, heads=8, ranks=16, per_host=4))
    assert {each["tp"] for each in found} == {1, 2, 4}
    assert {each["schedule"] for each in found} == {"1f1b", "interleaved"}
    for each in found:
        assert 16 % (each["tp"] * each["pp"]) == 12 % (each["pp"] * each["chunks"]) == 0
