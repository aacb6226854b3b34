"""The models of ``drivetrain estimate`` and ``drivetrain plan``, without values where possible.

They come from sizes, a configuration of transformers, a function, or a script.
"""

import importlib
import inspect
import json
import re
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.data.examples import first_rows
from drivetrain.errors import ConfigError, in_words
from drivetrain.hardware.sizes import parameter_count
from drivetrain.model.first_batch import Candidate, batches_as_arguments, guessed_inputs
from drivetrain.simulator.traced import ROWS, traced_model
from drivetrain.simulator.transformer import SimulatedModel

CONFIG_FILE = "config.json"
MATRIX = (1000, 1000)
"""The smallest layer of a model of which only the number of parameters is known."""

MOST_LAYERS = 200
"""Layers of such a model; those of larger models have more rows."""

LONGEST = 4096
"""Tokens of a sample of transformers' models that take more, unless ``--seq`` says otherwise."""

FACTORY = re.compile(r"([\w.]+):(\w+)")
"""``module:function``."""

_META = torch.device("meta")


class _Prepared(BaseException):
    """A script has reached ``prepare``; no handler of the script may catch it."""


class Reached(NamedTuple):
    """The objects with which a script has reached ``prepare``.

    Attributes:
        model: the first module.
        loaders: of the same call.
    """

    model: nn.Module
    loaders: Sequence[DataLoader[Any]]


def model_of(source: str, arguments: Sequence[str] = ()) -> ModelSpec:
    """Return the facts of a model.

    Args:
        source: a folder or a ``config.json`` of transformers, a script, ``module:function`` of a
            function that returns a model, or a number of parameters such as 7B.
        arguments: of the script.

    Raises:
        ConfigError: the source is nothing of this kind, or has no model.
    """
    path = Path(source)
    if path.is_dir():
        path /= CONFIG_FILE
    if arguments and path.suffix != ".py":
        raise ConfigError(
            f"found arguments after {source!r}: {' '.join(arguments)}; only a script has arguments"
        )
    if path.suffix == ".json" and path.is_file():
        return ModelSpec.of(of_transformers(path))
    if path.suffix == ".py" and path.is_file():
        return ModelSpec.of(of_script(path, arguments).model)
    if count := parameter_count(source):
        return of_size(count)
    if FACTORY.fullmatch(source):
        return ModelSpec.of(of_function(source))
    hub = re.fullmatch(r"[\w-]+(?:/[\w.-]+)?", source)
    more = f", or, as nothing is downloaded, give the config.json of {source}" if hub else ""
    raise ConfigError(
        "expected a config.json of transformers or its folder, a script, MODULE:FUNCTION or a "
        f"number of parameters such as 7B, found {source!r}; check the path{more}"
    )


def of_size(parameters: int) -> ModelSpec:
    """Describe a model of which only the number of parameters is known: layers of one shape."""
    rows, columns = MATRIX
    rows = max(rows, parameters // (MOST_LAYERS * columns))
    whole, rest = divmod(parameters, rows * columns)
    shapes = [(rows, columns)] * whole + ([(rest, 1)] if rest else [])
    return ModelSpec(
        tuple(
            TensorSpec(f"layers.{index}.weight", shape, torch.float32, True)
            for index, shape in enumerate(shapes)
        )
    )


def of_transformers(path: Path) -> nn.Module:
    """Return the model of a configuration of transformers, on the meta device.

    Raises:
        ConfigError: transformers is missing, or cannot build it.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{path}: expected transformers to be installed, found {error}; pip install "
            "transformers"
        ) from error
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected a configuration of transformers: {in_words(error)}; give the "
            "config.json of a model"
        ) from error
    kind = facts.pop("model_type", None)
    if kind is None:
        raise ConfigError(
            f"{path}: expected a configuration of transformers with a model_type, found "
            f"{', '.join(list(facts)[:5])}"
        )
    try:
        config = transformers.AutoConfig.for_model(kind, **facts)
        (name,) = (config.architectures or [""])[:1]
        architecture = getattr(transformers, name, None)
        make: Any = transformers.AutoModel.from_config if architecture is None else architecture
        with _META:
            return _module(make(config), str(path))
    except Exception as error:
        raise ConfigError(
            f"{path}: transformers cannot build this model: {error}; check the file, or give the "
            "number of parameters"
        ) from error


def of_function(source: str) -> nn.Module:
    """Return the model that ``module:function`` makes, on the meta device.

    Raises:
        ConfigError: there is no such function, or it returns no module.
    """
    module, _, name = source.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot find {module}:{name}: {error}; check the name") from error
    with _META:
        return _module(function(), source)


def of_script(path: Path, arguments: Sequence[str]) -> Reached:
    """Run a script as one process until it prepares a model; its output goes to standard error.

    Raises:
        ConfigError: it ends, or fails, before.
    """
    found: list[Reached] = []
    prepare = Accelerator.prepare

    def note(accelerator: Accelerator, *objects: Any, **settings: Any) -> Any:
        models = [each for each in objects if isinstance(each, nn.Module)]
        if not models:
            return prepare(accelerator, *objects, **settings)
        found.append(Reached(models[0], [o for o in objects if isinstance(o, DataLoader)]))
        raise _Prepared

    before = sys.argv
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    setattr(Accelerator, prepare.__name__, note)
    try:
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(path), run_name="__main__")
    except _Prepared:
        return found[0]
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
        line = line or next((f.lineno for f in reversed(frames) if f.filename == str(path)), "?")
        raise ConfigError(
            f"{path}:{line}: expected accelerator.prepare(model), found before it "
            f"{type(error).__name__}: {error}; give the arguments that the "
            "script needs, correct it, or give the number of parameters"
        ) from error
    finally:
        setattr(Accelerator, prepare.__name__, prepare)
        sys.argv = before
    raise ConfigError(f"{path}: expected accelerator.prepare(model), found a script without it")


def _module(found: Any, source: str) -> nn.Module:
    if not isinstance(found, nn.Module):
        raise ConfigError(f"{source}: expected a torch.nn.Module, found {type(found).__name__}")
    return found


# --- simulated, for a plan ---


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan for.

    Attributes:
        model: simulated.
        loader_batch: samples of a batch of the script's loader; 0 where there is none.
    """

    model: SimulatedModel
    loader_batch: int = 0


def subject_of_config(source: str, seq: int | None) -> Subject:
    """Return the model of a ``config.json`` of transformers, or of its folder.

    Raises:
        ConfigError: there is no such file, or transformers cannot build the model.
    """
    path = Path(source) / CONFIG_FILE if Path(source).is_dir() else Path(source)
    if not path.is_file():
        raise ConfigError(f"--hf: expected a config.json of transformers, found no file {source!r}")
    model = of_transformers(path)
    return Subject(traced_model(model, _of_transformers(model, seq)))


def subject_of_function(source: str, seq: int | None) -> Subject:
    """Return the model that ``module:function`` makes.

    Raises:
        ConfigError: there is no such function, it returns no module, or no inputs are known.
    """
    if not FACTORY.fullmatch(source):
        raise ConfigError(f"--model: expected MODULE:FUNCTION, found {source!r}")
    model = of_function(source)
    return Subject(traced_model(model, _guesses(model, seq)))


def subject_of_script(source: str, arguments: Sequence[str]) -> Subject:
    """Return the model with which a script reaches ``prepare``, as its first batch shows it.

    Raises:
        ConfigError: there is no such file, or the script never reaches ``prepare``.
    """
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"expected a script, found no file {source!r}; check the path")
    reached = of_script(path, arguments)
    examples = [first_rows(loader) for loader in reached.loaders]
    candidates = [*batches_as_arguments(reached.model, examples, cuts=False)]
    batch = next((loader.batch_size or 0 for loader in reached.loaders), 0)
    given = (*candidates, *_guesses(reached.model, None))
    return Subject(traced_model(reached.model, given), batch)


def _of_transformers(model: nn.Module, seq: int | None) -> Iterator[Candidate]:
    """Yield tokens by the names of transformers, with labels where the model takes them."""
    config: Any = getattr(model, "config", None)
    names = inspect.signature(type(model).forward).parameters
    length = seq or min(getattr(config, "max_position_embeddings", LONGEST), LONGEST)
    if "input_ids" in names:
        tokens = torch.zeros(ROWS[0], length, dtype=torch.long)
        plain: dict[str, Any] = {"input_ids": tokens}
        if "use_cache" in names:
            plain["use_cache"] = False
        if "labels" in names:
            yield Candidate(f"{length} tokens with labels", (), {**plain, "labels": tokens})
        yield Candidate(f"{length} tokens", (), plain)
    yield from _guesses(model, seq)


def _guesses(model: nn.Module, seq: int | None) -> Iterator[Candidate]:
    """Yield the inputs that the model itself names, then guesses; sequences are of length seq."""
    own = vars(model).get("example_inputs")
    if own is not None:
        yield Candidate.of("example_inputs of the model", own)
        return
    for guess in guessed_inputs(model):
        given = guess.args, dict(guess.kwargs)
        if seq is None and any(map(_is_tokens, tree_leaves(given))):
            problem = "the length of a sequence is not known: give --seq, or a script with a loader"
            yield Candidate(guess.what, problem=problem)
        else:
            yield Candidate(guess.what, *tree_map(lambda leaf: _of_length(leaf, seq), given))


def _is_tokens(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point()


def _of_length(leaf: Any, seq: int | None) -> Any:
    return leaf.new_zeros(leaf.shape[0], seq) if seq and _is_tokens(leaf) else leaf
