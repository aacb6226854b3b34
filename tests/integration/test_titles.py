"""The experiment of titles in miniature: equal under four strategies, resumed, judged, exported."""

import gzip
import importlib
import json
import shutil
import sys
from functools import partial
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.errors import UsageError
from forked_programs import run_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "titles"
MODULES = ("data", "loop", "base", "evaluate", "train")
STRATEGIES = {
    "ddp": {"name": "ddp"},
    "zero3": {"name": "zero3", "keep_below": 0},
    "tp": {"name": "megatron", "tp": 2},
    "pp": {"name": "megatron", "pp": 2},
}
TINY = (
    "--held-out", "8", "--batch", "4", "--length", "32", "--title-length", "8", "--steps", "4",
    "--validate-every", "2", "--log-every", "2", "--pretrain-steps", "60", "--save-every", "40",
    "--vocabulary", "300", "--dim", "32", "--layers", "2", "--lora-rank", "2", "--lr", "0.05",
    "--pretrain-lr", "0.01",
)  # fmt: skip
# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)


def example(*more: str) -> SimpleNamespace:
    """Return the example's modules by name; their names are free again afterwards."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        names = (*MODULES, *more)
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in (*MODULES, *more):
            sys.modules.pop(name, None)


def experiment(titles, strategy, *words):
    """Run the experiment under a strategy."""
    accelerator = Accelerator(
        strategy=dict(strategy),
        config={"report": False},  # one run leaves a report, and the others are quicker
        cpu=True,
        log_with=["jsonl"],
        project_dir=words[words.index("--output") + 1],
        dataloader_config=DataLoaderConfiguration(split_batches=True),
    )
    try:
        return titles.train.run(titles.train.arguments([*TINY, *words]), accelerator)
    finally:
        accelerator.end_training()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of 60 pairs."""
    verbs = ("open", "close", "read", "write", "sort")
    found = product(range(3), verbs, ("file", "list", "map", "row"))
    rows = [
        {"text": f"{verb} the {noun} {i} and give the {noun} back", "title": f"{verb} {noun} {i}"}
        for i, verb, noun in found
    ]
    file = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def alone(pairs, tmp_path_factory):
    """The folder of the experiment in one process, from its command line."""
    folder = tmp_path_factory.mktemp("alone")
    words = (*TINY, "--data", str(pairs), "--output", str(folder / "run"))
    done = run_python(str(EXAMPLE / "train.py"), *words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "ROUGE-L  before" in done.stdout
    assert (folder / "run" / "run" / "report.html").exists()
    return folder / "run"


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", list(STRATEGIES.values()), ids=list(STRATEGIES))
@pytest.mark.ranks(2)
def test_a_strategy_ends_as_one_process(pairs, alone, strategy):
    folder = alone.parent / "-".join(map(str, strategy))
    words = ("--data", str(pairs), "--model", str(alone / "base"), "--output", str(folder))
    found = experiment(example(), strategy, *words)
    expected = json.loads((alone / "result.json").read_text())
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["loss before"] == pytest.approx(expected["loss before"], abs=1e-5)
    assert found["loss"] < found["loss before"] - 0.01
    assert found["scores"] == expected["scores"]
    assert (folder / "samples.md").read_text() == (alone / "samples.md").read_text()
    assert [rank["sent"] > 0 for rank in found["ranks"]] == [True, True]


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_a_run_that_was_killed_goes_on_where_it_was(pairs, alone, monkeypatch):
    """After a checkpoint of pretraining, and after one of fine-tuning; the end is the same."""
    titles = example()
    folder = alone.parent / "killed"
    words = ("--data", str(pairs), "--output", str(folder))
    save = Accelerator.save_state
    saved = count(1)

    def save_and_end(accelerator, *args, **options):
        save(accelerator, *args, **options)
        if next(saved) in (1, 3):  # a checkpoint of pretraining; best and last of fine-tuning
            raise KeyboardInterrupt

    monkeypatch.setattr(Accelerator, "save_state", save_and_end)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            experiment(titles, STRATEGIES["ddp"], *words)
    found = experiment(titles, STRATEGIES["ddp"], *words)
    assert next(saved) == 6
    expected = json.loads((alone / "result.json").read_text())
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["steps"] == expected["steps"] == 4


@pytest.mark.exhaustive
def test_what_a_run_exports(alone):
    """The adapter on its base model, and the merged model, compute alike."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(alone / "base")
    merged = AutoModelForCausalLM.from_pretrained(alone / "merged")
    tokens = torch.arange(5, 15).view(1, 10)
    with torch.no_grad():
        before = base(input_ids=tokens).logits
        after = merged(input_ids=tokens).logits
        adapted = PeftModel.from_pretrained(base, alone / "adapter")(input_ids=tokens).logits
    torch.testing.assert_close(adapted, after)
    assert (after - before).abs().max() > 0.01


@pytest.mark.exhaustive
@pytest.mark.ranks(2)
def test_the_merged_model_has_the_scores_of_the_run(alone):
    words = ("--pairs", str(alone / "pairs.json"), "--length", "32", "--title-length", "8")
    found = example().evaluate.main([str(alone / "merged"), *words, "--batch", "3"])
    expected = json.loads((alone / "result.json").read_text())["scores"]["after"]
    assert found == expected
    assert expected["ROUGE-1"]["value"] > 1  # the titles have words


@pytest.mark.exhaustive
def test_a_missing_library_names_the_extra(tmp_path):
    (tmp_path / "peft.py").write_text("raise ImportError('No module named peft')")
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_python(str(EXAMPLE / "train.py"), folder=tmp_path, env=env)
    assert done.returncode == 1
    assert done.stderr.endswith("needs: pip install -c constraints.txt '.[titles]'\n")
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(("differs", "code"), [(5e-4, 0), (2e-3, 1)])
def test_the_table_of_strategies(alone, tmp_path, monkeypatch, capsys, differs, code):
    """Complete runs are not run again; an exact strategy with another loss is an error."""
    strategies = example("strategies").strategies
    result = json.loads((alone / "result.json").read_text())
    for name in strategies.RUNS:
        folder = tmp_path / strategies.folder_of(name)
        folder.mkdir()
        shutil.copy(alone / "titles.jsonl", folder)
        shift = {"fsdp": differs, "ddp, powersgd": 0.5}.get(name, 0.0)
        found = {**result, "loss": result["loss"] + shift, "ranks": [{"sent": 4096, "memory": 0}]}
        (folder / "result.json").write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["strategies.py", str(alone), "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        strategies.main()
    assert bool(ended.value.code) == bool(code)
    if code:
        assert "['fsdp']" in ended.value.code
    rows = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0].strip("| `") for row in rows] == list(strategies.RUNS)
    cells = rows[-1].split(" | ")
    assert cells[4:7] == ["1", f"{result['loss'] + 0.5:.4f}", "+5e-01"]
    assert "<svg" in (tmp_path / "losses.svg").read_text()
    assert capsys.readouterr().out.count("`ddp, powersgd`") == 1


def test_the_table_needs_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["strategies.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"found no pairs\.json"):
        example("strategies").strategies.main()


@pytest.mark.exhaustive
@pytest.mark.ranks(1)
def test_other_arguments_need_another_folder(pairs, alone):
    words = ("--data", str(pairs), "--output", str(alone), "--lora-rank", "3")
    with pytest.raises(UsageError, match=r"lora_rank = 2, found 3"):
        experiment(example(), STRATEGIES["ddp"], *words)


@pytest.mark.exhaustive
@pytest.mark.ranks(1)
def test_models_that_do_not_fit(alone, tmp_path):
    from transformers import BertConfig, BertLMHeadModel, T5Config

    base = example().base
    with pytest.raises(UsageError, match=r"causal language model in .*nothing, found"):
        base.load_model(tmp_path / "nothing")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    bert = BertConfig(vocab_size=20, intermediate_size=8, **sizes)
    BertLMHeadModel(bert).save_pretrained(tmp_path / "bert")
    T5Config().save_pretrained(tmp_path / "t5")
    with pytest.raises(UsageError, match="see the words after"):
        base.load_model(tmp_path / "bert")
    with pytest.raises(UsageError, match="expected a causal language model"):
        base.load_model(tmp_path / "t5")
    shutil.copytree(alone / "base", tmp_path / "endless")
    settings = tmp_path / "endless" / "tokenizer_config.json"
    kept = json.loads(settings.read_text())
    settings.write_text(json.dumps({**kept, "eos_token": None, "pad_token": None}))
    with pytest.raises(UsageError, match="end of text, and padding, found neither"):
        base.load_tokenizer(tmp_path / "endless")
    settings.write_text(json.dumps({**kept, "pad_token": None}))
    tokenizer = base.load_tokenizer(tmp_path / "endless")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id is not None


# --- data ---


def test_groups_texts_and_titles_are_in_one_part(tmp_path):
    data = example().data
    pairs = [data.Pair(f"text {i}", f"title {i}", f"group {i // 5}") for i in range(200)]
    again = [data.Pair("text  7", "another", "group 90"), data.Pair("new", "Title 8", "group 91")]
    distinct = data.distinct([*pairs, *again])
    assert distinct == pairs
    parts = data.split(distinct, 12)
    assert [len(parts.validation), len(parts.test)] == [12, 12]
    groups = [{pair.group for pair in part} for part in (parts.train, parts.validation, parts.test)]
    assert not groups[0] & groups[1]
    assert not groups[0] & groups[2]
    assert not groups[1] & groups[2]
    large = [data.Pair(f"large {i}", f"l {i}", "large") for i in range(100)]
    held_out = data.split([*pairs, *large], 12)
    assert "large" not in {pair.group for pair in (*held_out.validation, *held_out.test)}


def test_docstrings_are_read_without_an_import(monkeypatch, tmp_path):
    data = example().data
    package = tmp_path / "packed"
    package.mkdir()
    text = "The door must be closed, and nobody may stand behind it."
    other = "The room behind it is dark from then on,\n  until morning."
    for name, content in {
        "__init__": f'"""Opens a door to another room.\n\n{text}\n"""\nraise SystemExit\n',
        "broken": "def (:",
        "latin": '"""Caf\u00e9 is closed today.\n\n',
        "module": "import os\n\n\ndef door(\n    room: int = 0,\n) -> None:  # of wood\n"
        "    '''Closes a door, \"quietly\".\n\n    The room behind it is dark from then on,\n"
        "      until morning.\n    '''\n"
        '    names = """A string with a name.\n\n'
        '    It is no docstring, however long it may be made."""\n',
        "headed": '"""The Doors of the House\n======================\n\n'
        'All of them are open at night, and some by day.\n"""\n',
    }.items():
        (package / f"{name}.py").write_bytes(content.encode("latin-1"))
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    assert list(data.docstrings(["packed"])) == [
        data.Pair(text, "Opens a door to another room.", "packed"),
        data.Pair(other, 'Closes a door, "quietly".', "packed"),
    ]


def test_descriptions_of_debian(tmp_path, monkeypatch):
    data = example().data
    (tmp_path / "host_i18n_Translation-en").write_text(
        "Package: bash-doc\nDescription-md5: 1\nDescription-en: documentation of a shell\n"
        " It has all\n options.\n .\n And more.\n\nPackage: bad\nDescription-md5: 2\n"
    )
    described = data.Pair("It has all options. \n\n And more.", "documentation of a shell", "bash")
    assert list(data.debian("en", tmp_path)) == [described]
    assert list(data.debian("zh_CN", tmp_path)) == []
    text = "Package: dash\nDescription-md5: 1\nDescription-fr: small shell\n It is quick.\n"
    with gzip.open(tmp_path / "host_i18n_Translation-fr.gz", "wt") as file:
        file.write(text)  # as apt compresses it
    if data.APT_HELPER.exists():
        pair = data.Pair("It is quick.", "small shell", "dash")
        assert list(data.debian("fr", tmp_path)) == [pair]
    monkeypatch.setattr(data, "APT_HELPER", tmp_path / "none")
    with pytest.raises(UsageError, match=r"which unpacks .*Translation-fr\.gz, found none"):
        list(data.debian("fr", tmp_path))


def test_files_that_do_not_fit(tmp_path):
    for name, text, message in (
        ("a.jsonl", '{"text": "a", "title": ""}', r"line 1: expected a title, found an empty one"),
        ("a.jsonl", '{"body": "a", "name": "b"}', r"a field title or summary .* found body, name"),
        ("a.jsonl", "[1]", r"line 1: expected a JSON object, found '\[1\]'"),
        ("a.tsv", "abst\ttitle\n\tb", r"line 2: expected a text, found an empty one"),
        ("a.tsv", "abst\ttitle\n\n\n\tb", r"line 4: expected a text, found an empty one"),
        ("a.jsonl", '{"text": "a", "title": null}', r"expected a text as title, found None"),
        ("a.jsonl", '{"text": 3, "title": "b"}', r"line 1: expected a text as text, found 3"),
        ("a.tsv", "abst\ttitle\na\tb", r"expected at least 3 pairs .* found 1 in .*a\.tsv"),
    ):
        data = example().data
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=message):
            data.read_split(str(tmp_path / name), 1, tmp_path / "pairs.json")
        with pytest.raises(UsageError, match="found no nowhere"):
            data.read_split("nowhere.tsv", 1, tmp_path / "pairs.json")


@pytest.mark.exhaustive
def test_labels_are_those_of_titles_and_their_end(alone):
    titles = example()
    tokenizer = titles.base.load_tokenizer(alone / "base")
    pairs = [
        titles.data.Pair("open the file " * 20, "open file", ""),
        titles.data.Pair("a", "b", ""),
    ]
    rows = list(titles.data.Examples(pairs, tokenizer, 32, 8))
    batch = titles.data.training_batch(rows, tokenizer.pad_token_id)
    assert batch["input_ids"].shape == batch["labels"].shape
    assert batch["input_ids"].shape[1] <= 32
    counted = [row[row != titles.data.IGNORED] for row in batch["labels"]]
    end = tokenizer.eos_token_id
    assert [tokenizer.decode(row[:-1]) for row in counted] == [" open file", " b"]
    assert [int(row[-1]) for row in counted] == [end, end]
    prompts = titles.data.prompt_batch(rows, tokenizer.pad_token_id)
    given = prompts["input_ids"][1][prompts["attention_mask"][1] == 1]
    assert tokenizer.decode(given) == "a\n\nTitle:"


# --- scores ---


def test_scores_are_those_of_the_literature():
    scores = partial(example().evaluate.scores, chinese=False)
    perfect = scores(["the cat sat on the mat"] * 3, ["the cat sat on the mat"] * 3)
    assert [score.value for score in perfect.values()] == pytest.approx([100] * 4)
    # Lin (2004): of four words three are in both, in this order; ROUGE-2 has one pair of three.
    one = scores(["police kill the gunman"] * 2, ["police killed the gunman"] * 2)
    found = [one[name].value for name in ("ROUGE-1", "ROUGE-2", "ROUGE-L")]
    assert found == pytest.approx([75, 100 / 3, 75])
    found = scores(["分布式训练的方法", "a"], ["分布式学习的方法", "b"], chinese=True)
    assert found["ROUGE-1"].value == pytest.approx(100 * 6 / 8 / 2)
    assert found["BLEU-4"].low <= found["BLEU-4"].value
    few = scores(["a b c d e", "x"] * 5, ["a b c d e", "y"] * 5)["ROUGE-1"]
    many = scores(["a b c d e", "x"] * 50, ["a b c d e", "y"] * 50)["ROUGE-1"]
    assert few.low < few.value == 50 == many.value < few.high
    assert few.high - few.low > 2 * (many.high - many.low) > 0


def test_files_with_a_byte_order_mark_and_blank_lines_and_in_another_encoding(tmp_path):
    data = example().data
    table, rows = tmp_path / "a.tsv", tmp_path / "a.jsonl"
    table.write_text("\n\nabst\ttitle\n\none\t1\n \ntwo\t2\n\n", encoding="utf-8-sig")
    rows.write_text('{"text": "one", "title": "1"}\n\n', encoding="utf-8-sig")
    pairs = [data.Pair("one", "1", "one"), data.Pair("two", "2", "two")]
    assert list(data.from_file(table)) == pairs
    assert list(data.from_file(rows)) == pairs[:1]
    for path in (table, rows):
        path.write_text("摘要\t题目\n", encoding="gb18030")
        said = f"{path.name}: expected text in the encoding UTF-8.*iconv"
        with pytest.raises(UsageError, match=said):
            list(data.from_file(path))
