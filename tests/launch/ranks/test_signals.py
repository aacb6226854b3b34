"""Signals to the launcher: which are kept, and which count once."""

import signal
import time

import pytest

from drivetrain_launch.ranks.failure import Signals, Stopped


def test_a_notice_that_comes_twice_counts_once_and_ctrl_c_each_time(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    with Signals() as signals:
        signals.record(True)
        for number in (signal.SIGUSR1, signal.SIGINT) * 2:
            signal.raise_signal(number)
        assert signals.take() == [signal.SIGUSR1, signal.SIGINT, signal.SIGINT]
        assert signals.take() == []
        signals.record(False)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
