"""Files of the ranks' output: a run keeps those of the run before it."""

from drivetrain_launch.ranks.engine import Output


def test_a_second_run_keeps_the_logs_of_the_first(tmp_path):
    for text in (b"first", b"second", b"third"):
        output = Output(tmp_path)
        stdout, _ = output.streams(1)
        stdout.write(text)
        output.finish()
    found = {path.name: path.read_bytes() for path in tmp_path.glob("*stdout*")}
    assert found == {
        "rank-1.stdout.log": b"third",
        "rank-1.stdout.1.log": b"first",
        "rank-1.stdout.2.log": b"second",
    }


def test_lines_in_another_encoding_are_shown(capsys):
    output = Output(None)
    _, stderr = output.streams(1)
    stderr.write(b"\xe9t\xe9\nlast")
    output.follow()
    output.finish()
    assert capsys.readouterr().err == "[rank1]: \ufffdt\ufffd\n[rank1]: last\n"
