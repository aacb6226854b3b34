"""Pairs of a long text and its title: where they come from, and how they become batches.

Every source gives pairs that belong to groups, such as the package of a docstring. Training and
test share no group, no text and no title.
"""

import json
import re
import subprocess
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from inspect import cleandoc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError

APT_LISTS = Path("/var/lib/apt/lists")
"""Where apt keeps the translations of its package descriptions."""
APT_HELPER = Path("/usr/lib/apt/apt-helper")
PACKED = (".lz4", ".gz", ".xz", ".bz2", ".zst")
"""Endings of lists that apt has compressed."""
DOCSTRING = re.compile(
    r"""(?:\A|:[ \t]*(?:\#[^\n]*)?\n)   # the file begins, or a line ends with a colon
        \s*[rR]?(?P<quotes>\"{3}|'{3})(?P<text>.+?)(?P=quotes)""",
    re.DOTALL | re.VERBOSE,
)
"""Where a docstring stands: a pattern reads 200 MB of sources in a tenth of a parser's time."""
UNDERLINE = re.compile(r"(?P<mark>[-=~^*+#])(?P=mark){3,}$")
"""The end of a paragraph that is an underlined heading, and so no sentence about the code."""
TEXT_FIELDS = ("text", "body", "abstract", "abst", "content", "description")
TITLE_FIELDS = ("title", "summary", "synopsis")
IGNORED = -100
"""The label of a token that the loss does not count."""
LARGE_GROUP = 0.1
"""Groups with a larger share of all pairs are trained on: a test set should have many groups."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A text, its title, and the group that the split keeps together."""

    text: str
    title: str
    group: str


@dataclass(frozen=True, slots=True)
class Split:
    """The pairs for training, for early stopping, and for the scores."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


# --- sources ---


def docstrings(packages: Sequence[str] = ()) -> Iterator[Pair]:
    """Yield body and summary of each docstring of the installed packages, which are not imported.

    A summary is a first paragraph that fits into a line and is no underlined heading. Chosen
    packages are given by name.
    """
    root = Path(sysconfig.get_path("purelib"))
    roots = [Path(folder) for folder in {root, Path(torch.__file__).parents[1]}]
    for site in sorted(roots):
        names = packages or sorted(path.name for path in site.iterdir())
        for name in names:
            for file in sorted((site / name).rglob("*.py")):
                for text in _docstrings_of(file):
                    title, _, body = text.strip().partition("\n\n")
                    title = " ".join(title.split())
                    fits = 15 <= len(title) <= 120 and title.count(". ") == 0
                    if fits and len(body) >= 40 and not UNDERLINE.search(title):
                        yield Pair(body.strip(), title, name)


def _docstrings_of(file: Path) -> Iterator[str]:
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return iter(())  # dangling links, and modules in encodings of their own
    return (cleandoc(found["text"]) for found in DOCSTRING.finditer(source))


def debian(language: str, lists: Path = APT_LISTS) -> Iterator[Pair]:
    """Yield long description and synopsis of each package in apt's lists of one language.

    apt keeps lists as text, or compressed, as in images for containers.
    """
    entry = re.compile(rf"^Description-{language}: (.+)\n((?: .*\n?)+)", re.MULTILINE)
    name = re.compile(r"^Package: (.+)$", re.MULTILINE)
    for file in sorted(lists.glob(f"*_i18n_Translation-{language}*")):
        for stanza in _unpacked(file).split("\n\n"):
            described, package = entry.search(stanza), name.search(stanza)
            if described and package:
                lines = [line.strip() for line in described[2].splitlines()]
                text = " ".join("\n\n" if line == "." else line for line in lines)
                yield Pair(text, described[1].strip(), package[1].split("-")[0])


def _unpacked(file: Path) -> str:
    """Return the text of a list of apt, which apt itself unpacks."""
    if file.suffix not in PACKED:
        return file.read_text(encoding="utf-8")
    if not APT_HELPER.exists():
        raise UsageError(f"expected {APT_HELPER}, which unpacks {file}, found none; install apt")
    command = [str(APT_HELPER), "cat-file", str(file)]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode()  # noqa: S603 - no shell


def from_file(file: Path) -> Iterator[Pair]:
    """Yield the pairs of a JSON lines file or of a TSV file with a header, such as CSL's.

    The file is UTF-8, perhaps with a byte order mark. Blank lines are skipped.

    Raises:
        UsageError: no such file, another encoding, no fields for text and title, or a line in which
            one of them is missing or no text.
    """
    if not file.is_file():
        raise UsageError(f"expected a file of pairs, found no {file}")
    for number, row in _rows(file):
        where = f"{file}, line {number}"
        text, title = (_field(row, names, where) for names in (TEXT_FIELDS, TITLE_FIELDS))
        if not text or not title:
            missing = "text" if title else "title"
            raise UsageError(f"{where}: expected a {missing}, found an empty one; remove the line")
        yield Pair(text, title, text)


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = ((number, line) for number, line in enumerate(_lines(file), 1) if line.strip())
    if file.suffix != ".tsv":
        for number, line in lines:
            yield number, _object(line, f"{file}, line {number}")
        return
    _, header = next(lines, (1, ""))
    names = header.rstrip("\n").split("\t")
    for number, line in lines:
        yield number, dict(zip(names, line.rstrip("\n").split("\t"), strict=False))


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file, without a byte order mark."""
    with file.open(encoding="utf-8-sig") as lines:
        try:
            yield from lines
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{file}: expected text in the encoding UTF-8, found the bytes "
                f"{error.object[error.start : error.start + 4]!r}; convert it first, for example "
                f"with 'iconv -f GB18030 -t UTF-8'"
            ) from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: expected a JSON object, found {line[:60]!r}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: expected a JSON object, found {line[:60]!r}")
    return row


def _field(row: dict[str, Any], names: Sequence[str], where: str) -> str:
    for name in names:
        if name in row:
            if not isinstance(row[name], str):
                raise UsageError(
                    f"{where}: expected a text as {name}, found {row[name]!r}; remove the line"
                )
            return row[name].strip()
    raise UsageError(
        f"{where}: expected a field {' or '.join(names)}, found {', '.join(row) or 'none'}"
    )


SOURCES: dict[str, tuple[Callable[[], Iterator[Pair]], str]] = {
    "docstrings": (docstrings, "the packages of this interpreter"),
    "debian": (partial(debian, "en"), f"{APT_LISTS}/*_i18n_Translation-en"),
    "debian-zh": (partial(debian, "zh_CN"), f"{APT_LISTS}/*_i18n_Translation-zh_CN"),
}
"""For each name of ``--data`` the pairs, and where they are looked for."""


# --- the split ---


def read_split(data: str, held_out: int, cache: Path) -> Split:
    """Return the split of a source, from a file after the first time.

    Args:
        data: a name of ``SOURCES``, or a file.
        held_out: pairs of the validation set, and of the test set.
        cache: a JSON file.

    Raises:
        UsageError: too few pairs; the message says where they were looked for.
    """
    if cache.exists():
        kept = json.loads(cache.read_text())
        return Split(**{name: [Pair(**pair) for pair in pairs] for name, pairs in kept.items()})
    source, place = SOURCES.get(data, (partial(from_file, Path(data)), data))
    found = distinct(source())
    if len(found) < 3 * held_out:
        raise UsageError(
            f"expected at least {3 * held_out} pairs for {held_out} of validation and as many of "
            f"test, found {len(found)} in {place}; take other --data ({', '.join(SOURCES)} or a "
            "file), or a smaller --held-out"
        )
    made = split(found, held_out)
    cache.parent.mkdir(parents=True, exist_ok=True)
    draft = cache.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(made), ensure_ascii=False))
    draft.rename(cache)
    return made


def distinct(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs whose text and whose title come for the first time."""
    seen: set[str] = set()
    kept = []
    for pair in pairs:
        keys = {"text " + " ".join(pair.text.split()), "title " + pair.title.lower()}
        if not keys & seen:
            kept.append(pair)
        seen |= keys
    return kept


def split(pairs: Sequence[Pair], held_out: int) -> Split:
    """Divide pairs by group, in the order of the groups' hashes: test, validation, training."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.group].append(pair)
    parts: dict[str, list[Pair]] = {"test": [], "validation": [], "train": []}
    for name in sorted(groups, key=_hash):
        small = len(groups[name]) <= LARGE_GROUP * len(pairs)
        open_parts = [part for part in ("test", "validation") if len(parts[part]) < held_out]
        parts[open_parts[0] if small and open_parts else "train"] += groups[name]
    for part, members in parts.items():
        members.sort(key=lambda pair: _hash(pair.text))
        parts[part] = members if part == "train" else members[:held_out]
    if not all(parts.values()):
        sizes = Counter(pair.group for pair in pairs).most_common(3)
        raise UsageError(
            f"expected groups for training, validation and test, found {len(groups)} groups; the "
            f"largest are {sizes}"
        )
    return Split(**parts)


def _hash(text: str) -> bytes:
    return sha256(text.encode()).digest()


def is_chinese(pairs: Sequence[Pair]) -> bool:
    """Whether most titles have Chinese characters; scores then count characters."""
    chinese = [pair for pair in pairs if re.search(r"[\u4e00-\u9fff]", pair.title)]
    return 2 * len(chinese) > len(pairs)


# --- batches ---


class Examples:
    """Pairs as tokens: text, the words "Title:", and the title with an end."""

    def __init__(self, pairs: Sequence[Pair], tokenizer: Any, length: int, titles: int) -> None:
        self.pairs = pairs
        self._tokenizer = tokenizer
        self._length, self._titles = length, titles
        self._cue = tokenizer("\n\nTitle:", add_special_tokens=False)["input_ids"]
        self._made: dict[int, tuple[list[int], list[int]]] = {}

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> tuple[int, list[int], list[int]]:
        """Return a pair's number, the tokens of its prompt, and those of its title."""
        if i not in self._made:
            pair = self.pairs[i]
            text, title = (
                self._tokenizer(words, add_special_tokens=False)["input_ids"]
                for words in (pair.text[: 20 * self._length], " " + pair.title)
            )
            title = [*title[: self._titles - 1], self._tokenizer.eos_token_id]
            room = self._length - self._titles - len(self._cue)
            self._made[i] = [*text[:room], *self._cue], title
        return i, *self._made[i]


def training_batch(rows: Sequence[tuple[int, list[int], list[int]]], pad: int) -> dict[str, Tensor]:
    """Return prompts and titles, padded at their end; labels count the titles alone."""
    return {
        "input_ids": _padded([[*prompt, *title] for _, prompt, title in rows], pad),
        "attention_mask": _padded([[1] * len([*prompt, *title]) for _, prompt, title in rows], 0),
        "labels": _padded([[IGNORED] * len(p) + title for _, p, title in rows], IGNORED),
    }


def prompt_batch(rows: Sequence[tuple[int, list[int], list[int]]], pad: int) -> dict[str, Tensor]:
    """Return prompts padded at their start, as generation needs them, and the pairs' numbers."""
    flipped = [prompt[::-1] for _, prompt, _ in rows]
    return {
        "input_ids": _padded(flipped, pad).flip(1),
        "attention_mask": _padded([[1] * len(prompt) for prompt in flipped], 0).flip(1),
        "number": torch.tensor([number for number, _, _ in rows]),
    }


def _padded(rows: Sequence[list[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def windows(pairs: Sequence[Pair], tokenizer: Any, length: int) -> Tensor:
    """Return the pairs' texts, each after its title, packed into rows of ``length`` tokens."""
    end = tokenizer.eos_token_id
    texts = [f"{pair.title}\n\n{pair.text[: 20 * length]}" for pair in pairs]
    tokens = [token for ids in tokenizer(texts)["input_ids"] for token in (*ids, end)]
    rows = len(tokens) // length
    if not rows:
        raise UsageError(f"expected at least {length} tokens of text, found {len(tokens)}")
    return torch.tensor(tokens[: rows * length]).view(rows, length)
