"""Files of the ranks' output: a run keeps those of the run before it."""

from drivetrain_launch.ranks.output import Output


def test_a_second_run_keeps_the_logs_of_the_first(tmp_path):
    for text in (b"first", b"second", b"third"):
        output = Output(tmp_path)
        streams = output.streams(1)
        streams.stdout.write(text)
        output.finish()
    found = {path.name: path.read_bytes() for path in tmp_path.glob("*stdout*")}
    assert found == {
        "rank-1.stdout.log": b"third",
        "rank-1.stdout.1.log": b"first",
        "rank-1.stdout.2.log": b"second",
    }
