"""The parts of README and docs that follow from the code are those that the program writes."""

import generate
from doc_pages import PAGES


def test_generated_parts_are_those_of_the_code(capsys):
    code = generate.main(["--check"])
    assert code == 0, capsys.readouterr().out
    marked = [name for page in PAGES for name, *_ in generate.PART.findall(page.read_text())]
    assert sorted(marked) == sorted(generate.TABLES)


def test_check_names_pages_that_differ_and_the_command(tmp_path, monkeypatch, capsys):
    """A wrong row goes, one that lacks comes; an explanation by hand stays."""
    part = (
        "<!-- generated: exit-codes-of-launch -->\n\n| code | meaning |\n|---|---|\n"
        "| 0 | by hand |\n{}\n<!-- /generated -->\n"
    )
    page = tmp_path / "README.md"
    page.write_text(part.format("| 999 | not ours |\n"))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate.pictures, "pictures", dict)
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == (
        "README.md differs from the code; run: python docs/site/generate.py\n"
    )
    assert "| 999 | not ours |" in page.read_text()
    assert generate.main([]) == 0
    assert "| 0 | by hand |\n| 1 | |" in page.read_text()
    assert "999" not in page.read_text()
    assert generate.main(["--check"]) == 0
