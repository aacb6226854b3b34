"""Options of the strategy that contradict each other are errors before anything starts."""

import pytest

from drivetrain.errors import ConfigError
from drivetrain_megatron.config import MegatronConfig

CONTRADICTIONS = [
    ({"tp": 3}, "multiple of tp x pp = 3 x 1 = 3, found 4"),
    ({"tp": 2, "pp": 4}, "multiple of tp x pp = 2 x 4 = 8, found 4"),
    ({"order": "tp,dp"}, "each once, found 'tp,dp'"),
    ({"order": "tp,dp,dp"}, "each once"),
    ({"pp": 2, "chunks": 2}, "schedule: interleaved with chunks: 2, found 1f1b"),
    ({"pp": 2, "schedule": "interleaved"}, "pp: 2 and chunks: 1"),
    ({"schedule": "interleaved", "chunks": 2}, "pp: 1 and chunks: 2"),
    ({"pp": 2, "sequence_parallel": True}, "tp above 1"),
    ({"tp": 2, "trace_dir": "traces"}, "pp above 1"),
]


def test_contradictions():
    for options, message in CONTRADICTIONS:
        with pytest.raises(ConfigError, match=message):
            MegatronConfig(**options).sizes(4)


def test_axes_and_schedules():
    assert list(MegatronConfig(tp=2, pp=2).sizes(8).items()) == [("tp", 2), ("dp", 2), ("pp", 2)]
    found = MegatronConfig(tp=2, order="pp, tp,dp").sizes(4)
    assert list(found.items()) == [("pp", 1), ("tp", 2), ("dp", 2)]

    assert MegatronConfig(pp=2, schedule="interleaved", chunks=2).sizes(2)["pp"] == 2
