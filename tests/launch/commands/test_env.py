"""``drivetrain env``: the facts of this machine, and no secret among them."""

import json
import sys

import torch

import drivetrain
from drivetrain_launch.commands.env import shown_variables
from recorded_runs import write_run


def test_env_describes_the_machine(command):
    facts = json.loads(command.output("env", "--json"))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["drivetrain"] == drivetrain.__version__
    assert "toy" in facts["plugins"]["drivetrain.strategies"]
    assert facts["versions"]["numpy"][0].isdecimal()
    assert facts["machine"]["cores"] >= 1
    assert facts["machine"]["processor"]
    assert facts["machine"]["memory for this process"].endswith("iB")
    assert command.output("env").startswith("### versions\n\n- drivetrain: ")


def test_env_shows_known_variables_and_no_secret(command, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    _, out, _ = command("env")
    assert "- NCCL_DEBUG: INFO" in out
    assert "canary" not in out
    words = ["API_KEY", "AUTH", "BEARER", "CREDENTIALS", "DSN", "PASS", "PW", "SECRET", "TOKEN"]
    secrets = {f"DRIVETRAIN_{word}": "x" for word in words}
    shown = {f"{family}_A": "z" for family in ("DRIVETRAIN", "GLOO", "NCCL", "OMP", "TORCH")}
    assert shown_variables({**secrets, "PATH": "y", **shown}) == shown


# --- ``drivetrain report``: the summary, the page, comparisons, and folders without a run ---


def test_the_summary_and_the_page_of_a_run(command, tmp_path):
    write_run(tmp_path / "a", range(1, 9))
    out = command.output("report", str(tmp_path / "a"))
    assert out.startswith("a: ended\n")
    rows = {" ".join(line.split()) for line in out.splitlines()}
    assert {"steps 8", "samples per second 80 all ranks, median"} <= rows
    assert "waiting dp 40 ms 0 us" in rows
    assert out.endswith(f"wrote {tmp_path / 'a' / 'run' / 'report.html'}\n")
    assert (tmp_path / "a" / "run" / "report.html").is_file()


def test_runs_are_compared(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "x" / "same", range(1, 9))
    write_run(tmp_path / "y" / "same", range(1, 9), facts={"accumulation": 4})
    out = command.output("report", "x/same", "y/same")
    rows = [line.split() for line in out.splitlines()]
    assert ["key", "x/same", "y/same"] in rows
    assert ["accumulation", "1", "4"] in rows
    assert "x/same" in (tmp_path / "comparison" / "report.html").read_text(encoding="utf-8")
    out = command.output("report", "--no-page", "x/same", "x/same/run")
    assert "Commands, configurations and environments are the same." in out
    assert "wrote" not in out


def test_other_folders_are_errors_in_one_line(command, tmp_path):
    err = command.error("report", str(tmp_path / "none"))
    assert err == f"error: expected the folder of a run, found none at {tmp_path / 'none'}; " \
        "check the path\n"  # fmt: skip
    err = command.error("report", str(tmp_path))
    assert "expected the records of a run" in err
    write_run(tmp_path, range(1, 4))
    (tmp_path / "file").write_text("", encoding="utf-8")
    code, _, err = command("report", str(tmp_path), "--output", str(tmp_path / "file"))
    assert (code, "name another folder with --output" in err) == (2, True)


def test_without_the_extra_the_summary_is_printed(command, tmp_path, monkeypatch):
    write_run(tmp_path, range(1, 4))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = command("report", str(tmp_path))
    assert code == 0
    assert "steps" in out
    assert "found no matplotlib; pip install 'drivetrain[report]'" in err
