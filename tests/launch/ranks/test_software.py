"""The facts that hosts compare: versions and the script."""

import platform

from drivetrain_launch.ranks.preflight import differences, script_digest, software_facts


def test_digest_follows_the_content_of_the_script(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("print(1)")
    second.write_text("print(1)")
    digest = script_digest((str(first), "--lr", "1"))
    assert len(digest) == 12
    assert digest == script_digest(("--as-accelerate", str(second)))
    second.write_text("print(2)")
    assert digest != script_digest((str(second),))
    assert script_digest(()) == script_digest((str(tmp_path / "none.py"),)) == ""


def test_digest_of_a_module_that_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("raise SystemExit")
    assert script_digest(("-m", "no_such_module_anywhere")) == ""
    names = {"one": "one.py", "pack": "pack/__main__.py", "pack.two": "pack/two.py"}
    for name, file in names.items():
        (tmp_path / file).write_text("raise SystemExit('imported')")
        digest = script_digest(("-m", name))
        assert len(digest) == 12, name
        (tmp_path / file).write_text("another text")
        assert script_digest(("-m", name)) != digest, name


def test_difference_names_all_hosts_with_each_value(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    facts = software_facts((str(script),))
    assert list(facts) == [
        "drivetrain's version", "torch's version", "Python's version", "the script"
    ]  # fmt: skip
    assert all(facts.values())
    assert facts["Python's version"] == platform.python_version().rpartition(".")[0]
    hosts = {f"host {i} (n{i})": facts for i in range(4)}
    assert differences(hosts) == ""
    hosts["host 2 (n2)"] = facts | {"torch's version": "2.0.0"}
    usual = facts["torch's version"]
    assert differences(hosts) == (
        f"the hosts differ in torch's version: {usual!r} on "
        "host 0 (n0), host 1 (n1), host 3 (n3); '2.0.0' on host 2 (n2); install the same versions "
        "on every host, and start the run again"
    )
    del hosts["host 2 (n2)"]
    hosts["host 3 (n3)"] = facts | {"the script": "0" * 12}
    assert "copy the same file to every host" in differences(hosts)
