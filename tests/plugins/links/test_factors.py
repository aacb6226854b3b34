"""Which elements are a matrix of low rank, and what is kept of one."""

import torch

from drivetrain.collectives.stretch import ParameterRow, Stretch
from drivetrain_links.powersgd import FactorPlan, _write_sum


def test_a_piece_of_a_matrix_has_whole_rows_and_elements_that_go_as_they_are():
    whole = Stretch.of(64 * 60, torch.float32, [ParameterRow("weight", (64, 60), 0, 0)])
    plan = FactorPlan([[whole.cut(70, 3005)]], rank=4)
    (matrix,) = plan.matrices
    assert (matrix.rows, matrix.columns, matrix.span.first) == (48, 60, 120)
    assert [tuple(each) for each in plan.plain[0]] == [(0, 0, 50), (0, 2930, 2935)]


def test_a_host_keeps_its_share_of_what_a_sum_lacks():
    generator = torch.Generator().manual_seed(5)
    gradient, error = (torch.randn(8, 6, generator=generator) for _ in range(2))
    p, q = (torch.randn(size, 2, generator=generator) for size in (8, 6))
    due = gradient + error
    _write_sum(gradient, error, p, q, 4)
    torch.testing.assert_close(gradient, p @ q.T)
    torch.testing.assert_close(error, due - p @ q.T / 4)
