"""The parts of README and docs that follow from the code are those that the program writes."""

import generate
from doc_pages import PAGES


def test_generated_parts_are_those_of_the_code(capsys):
    code = generate.main(["--check"])
    assert code == 0, capsys.readouterr().out
    marked = [name for page in PAGES for name, *_ in generate.PART.findall(page.read_text())]
    assert sorted(marked) == sorted(generate.TABLES)


def test_check_names_pages_that_differ_and_the_command(tmp_path, monkeypatch, capsys):
    """A wrong cell is found and put right; an explanation by hand stays, and no row is lost."""
    part = (
        "<!-- generated: options-of-local -->\n\n| option | default | |\n|---|---|---|\n"
        "| `every` | {} | by hand |\n\n<!-- /generated -->\n"
    )
    page = tmp_path / "README.md"
    page.write_text(part.format(29))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate.pictures, "pictures", dict)
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == (
        "README.md differs from the code; run: python docs/site/generate.py\n"
    )
    assert page.read_text() == part.format(29)
    assert generate.main([]) == 0
    assert "| `every` | 30 | by hand |\n| `workers` | hosts | what takes" in page.read_text()
    assert generate.main(["--check"]) == 0
