"""The pytest plugin: ``@pytest.mark.ranks(n, timeout=300)`` runs the body of a test on n ranks.

Each rank is a process that lives for the whole run; a test gets a fresh gloo process group between
them, torchrun's variables, one thread, and seeds of 0; ``ranks(1)`` gets no group. Fixtures and
parameters are made once, in the pytest process, and copied to the ranks by pickle. The test fails
when any rank fails, ends, hangs, or leaves something behind; the report shows each rank's traceback
(the first failure first), output, and for a rank that did not come back its Python stacks. The
Accelerators that a test makes are freed when all ranks have ended it.
"""

import pickle
import sys
from typing import Any, NamedTuple

import pytest
from _pytest.config import parse_warning_filter

from drivetrain.testing.messages import RankOutcome, RankTest, WarningFilter

_POOL = pytest.StashKey[Any]()
_MARK = "ranks"
_START_ALLOWANCE_S = 400.0


class _Ranks(NamedTuple):
    """The arguments of the mark."""

    n: int
    timeout: float = 300.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the setting."""
    parser.addini(
        "ranks_preload",
        "modules that the processes of ranks have imported when they start, such as transformers",
        type="linelist",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers",
        "ranks(n, timeout=300): run the body on n processes, ranks of one gloo process group; "
        "timeout in seconds",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the marks, and keep pytest-timeout from ending the run before a rank's own timeout."""
    for item in items:
        ranks = _ranks_of(item)
        if ranks is not None and config.pluginmanager.hasplugin("timeout"):
            allowed = ranks.timeout + _START_ALLOWANCE_S
            item.add_marker(pytest.mark.timeout(allowed), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on ranks; leave every other test to pytest."""
    ranks = _ranks_of(pyfuncitem)
    if ranks is None:
        return None
    arguments = _pickled_arguments(pyfuncitem)
    pool = _pool(pyfuncitem.config)
    outcomes = pool.run(_jobs(pyfuncitem, ranks, arguments, pool), ranks.timeout)
    for title, text in pool.output().items():
        pyfuncitem.add_report_section("call", title, text)
    _report(outcomes)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes."""
    if _POOL in config.stash:
        config.stash[_POOL].close()
        del config.stash[_POOL]


def _pool(config: pytest.Config) -> Any:
    # Imported and started by the first test that needs it: other runs never load it.
    from drivetrain.testing.pool import RankPool

    if _POOL not in config.stash:
        config.stash[_POOL] = RankPool(config.getini("ranks_preload"))
    return config.stash[_POOL]


def _ranks_of(item: pytest.Item) -> _Ranks | None:
    mark = item.get_closest_marker(_MARK)
    if mark is None:
        return None
    try:
        (n,) = mark.args  # a second number could as well be meant as another world
        ranks = _Ranks(n, **mark.kwargs)
    except (TypeError, ValueError):
        raise pytest.UsageError(
            f"{item.nodeid}: expected ranks(n, timeout=300), found {mark.args} {mark.kwargs}"
        ) from None
    if type(ranks.n) is not int or ranks.n < 1 or ranks.timeout <= 0:
        raise pytest.UsageError(
            f"{item.nodeid}: expected ranks(n, timeout) with n >= 1 and timeout > 0, "
            f"found {tuple(ranks)}"
        )
    if not isinstance(item, pytest.Function):
        raise pytest.UsageError(f"{item.nodeid}: only a function or method can run on ranks")
    return ranks


def _jobs(
    item: pytest.Function, ranks: _Ranks, arguments: dict[str, bytes], pool: Any
) -> list[RankTest]:
    rendezvous = pool.rendezvous()
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return [
        RankTest(
            path=str(item.path),
            module=item.module.__name__,
            owner=tuple(classes),
            function=item.originalname,
            arguments=arguments,
            rank=rank,
            size=ranks.n,
            store_port=pool.store_port,
            rendezvous=rendezvous,
            timeout_s=ranks.timeout,
            filters=_filters(item),
            search_path=tuple(sys.path),
        )
        for rank in range(ranks.n)
    ]


def _pickled_arguments(item: pytest.Function) -> dict[str, bytes]:
    names = item._fixtureinfo.argnames
    arguments = {}
    for name in names:
        value = item.funcargs[name]
        try:
            arguments[name] = pickle.dumps(value)
        except Exception as error:
            pytest.fail(
                f"the fixture or parameter {name!r} ({type(value).__name__}) cannot be pickled "
                f"and sent to the ranks: {error}; make it inside the body, or pass something "
                "plain to make it from",
                pytrace=False,
            )
    return arguments


def _filters(item: pytest.Function) -> tuple[WarningFilter, ...]:
    """Return the warning filters of the configuration, the command line and the test's marks."""
    config = item.config
    rules = [parse_warning_filter(rule, escape=False) for rule in config.getini("filterwarnings")]
    given = config.known_args_namespace.pythonwarnings or []
    rules += [parse_warning_filter(rule, escape=True) for rule in given]
    for mark in reversed(list(item.iter_markers("filterwarnings"))):
        rules += [parse_warning_filter(rule, escape=False) for rule in mark.args]
    return tuple(rules)


def _report(outcomes: list[RankOutcome]) -> None:
    """End the test in the pytest process as it ended on the ranks."""
    failures = [outcome for outcome in outcomes if outcome.is_failure]
    if failures:
        pytest.fail("\n\n".join(map(_described, failures)), pytrace=False)
    for outcome in outcomes:
        if outcome.kind == "skipped":
            raise pytest.skip.Exception(outcome.headline, _use_item_location=True)
        if outcome.kind == "xfailed":
            pytest.xfail(outcome.headline)


def _described(failure: RankOutcome) -> str:
    return f"rank {failure.rank} {failure.kind}: {failure.headline}\n{failure.details}".rstrip()
