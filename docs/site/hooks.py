"""Hooks of the site's builder: pages that are not committed, and links from names to the reference.

README, CHANGELOG and CONTRIBUTING become pages; the reference is made from the code.
"""

import re
import sys
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))  # the builder loads this file by its path

import reference  # noqa: E402

LEFT_ALONE = re.compile(
    r"(<pre.*?</pre>|<a\b.*?</a>|<autoref\b.*?</autoref>|<h[1-6]\b.*?</h[1-6]>)", re.DOTALL
)
CODE = re.compile(r"<code>(?:drivetrain\.)?((?:accelerator\.)?\w+)(\([^<]*\))?</code>")
SPECIFIC = re.compile(r"[A-Z]|_|\.")
"""A name of this kind means the public name; ``load`` or ``gather`` alone may be any other's."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from other files."""
    pages = reference.pages()
    pages["index.md"] = _moved("README.md")
    pages["changelog.md"] = _moved("CHANGELOG.md")
    pages["contributing.md"] = _moved("CONTRIBUTING.md")
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Write pipes of code in tables, lists in lists and prompts as Python-Markdown expects them."""
    nested = re.sub(r"^ {3}- ", "    - ", markdown, flags=re.MULTILINE)
    nested = re.sub(r"^```\n(?=\$ )", "```console\n", nested, flags=re.MULTILINE)
    return re.sub(
        r"^\|.*\|$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
        nested,
        flags=re.MULTILINE,
    )


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link each public name in running text to its place in the reference."""
    member = "accelerator." if page.file.src_uri == "reference/accelerator.md" else ""
    parts = LEFT_ALONE.split(html)
    parts[::2] = [CODE.sub(lambda code: _linked(code, member), text) for text in parts[::2]]
    return "".join(parts)


def _linked(code: re.Match[str], member: str) -> str:
    name = code[1]
    path = _identifiers().get(name) if SPECIFIC.search(name) else None
    path = path or _identifiers().get(f"{member}{name}" if member else "")
    if path is None:
        return code[0]
    return f'<autoref optional identifier="{escape(path)}">{code[0]}</autoref>'


def _moved(name: str) -> str:
    """Return a page of the root, with its links as they are from the folder of the docs."""
    text = (ROOT / name).read_text().replace("](docs/", "](")
    return text.replace("](CONTRIBUTING.md)", "](contributing.md)")


@cache
def _identifiers() -> dict[str, str]:
    return reference.identifiers()
