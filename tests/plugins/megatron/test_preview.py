"""The dry run of the command: what a cell sends besides is said not to be counted."""

from drivetrain_launch.cli import run


def preview(capsys, ranks, **options):
    settings = [f"strategy.{name}={value}" for name, value in options.items()]
    chosen = [text for setting in settings for text in ("--set", setting)]
    arguments = ["--cpu", "--nproc-per-node", str(ranks), "--strategy", "megatron", *chosen]
    assert run(["launch", *arguments, "--dry-run", "no-such-script.py"]) == 0
    rows = (line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
    found = {row[0]: row[-1].strip() for row in rows}
    return {name: value for name, value in found.items() if name.startswith("sent")}


def test_a_cell_alone_has_no_total(capsys):
    rows = preview(capsys, 4, tp=2, pp=2)
    assert rows == {
        "sent per step: activations over tp": "not counted: depends on the batch",
        "sent per step: activations over pp": "not counted: depends on the batch",
    }


def test_gradients_between_cells_are_counted(capsys):
    rows = preview(capsys, 4, tp=2)
    total = rows.pop("sent per step: total of what is counted")
    assert rows.pop("sent per step: activations over tp").startswith("not counted")
    assert list(rows.values()) == [total]
    assert float(total.removesuffix(" GiB")) > 1


ALONE = [1, 2]


def test_one_rank_per_cell_is_counted_whole(capsys):
    for ranks in ALONE:
        assert "sent per step: total" in preview(capsys, ranks)
