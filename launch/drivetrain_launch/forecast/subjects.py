"""The model of a plan: sizes, a configuration of transformers, a function, or a script."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.data.examples import first_rows
from drivetrain.errors import ConfigError
from drivetrain.model.first_batch import Candidate, batches_as_arguments, guessed_inputs
from drivetrain.paper.seen import ROWS, seen_model
from drivetrain.paper.transformer import PaperModel
from drivetrain_launch.forecast.models import (
    CONFIG_FILE,
    FACTORY,
    of_function,
    of_script,
    of_transformers,
)

LONGEST = 4096
"""Tokens of a sample of transformers' models that take more, unless ``--seq`` says otherwise."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan for.

    Attributes:
        model: on paper.
        loader_batch: samples of a batch of the script's loader; 0 where there is none.
    """

    model: PaperModel
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
    return Subject(seen_model(model, _of_transformers(model, seq)))


def subject_of_function(source: str, seq: int | None) -> Subject:
    """Return the model that ``package:factory`` makes.

    Raises:
        ConfigError: there is no such function, it returns no module, or no inputs are known.
    """
    if not FACTORY.fullmatch(source):
        raise ConfigError(f"--model: expected PACKAGE:FUNCTION, found {source!r}")
    model = of_function(source)
    return Subject(seen_model(model, _guesses(model, seq)))


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
    return Subject(seen_model(reached.model, given), batch)


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
        yield Candidate("example_inputs of the model", *_arguments(own))
        return
    for what, guess in guessed_inputs(model):
        if seq is None and _has_tokens(guess):
            problem = "the length of a sequence is not known: give --seq, or a script with a loader"
            yield Candidate(what, problem=problem)
        else:
            long = tree_map(lambda leaf: _of_length(leaf, seq), guess)
            yield Candidate(what, *_arguments(long))


def _has_tokens(guess: Any) -> bool:
    return any(_is_tokens(leaf) for leaf in tree_leaves(guess))


def _is_tokens(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point()


def _of_length(leaf: Any, seq: int | None) -> Any:
    return leaf.new_zeros(leaf.shape[0], seq) if seq and _is_tokens(leaf) else leaf


def _arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, list | tuple) else (given,)), {}
