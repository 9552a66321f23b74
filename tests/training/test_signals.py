"""Signals that end training: one Ctrl-C may arrive twice, a later one ends at once."""

import os
import signal
import time

import pytest

from sparsering.training import signals
from sparsering.training.ranks import ranks_of_torchrun


def test_a_ctrl_c_that_arrives_twice_is_one():
    with ranks_of_torchrun() as ranks, signals.stop_signal(ranks) as stopped:
        assert stopped() is None
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert stopped() == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_later_one_ends_at_once(monkeypatch):
    monkeypatch.setattr(signals, "_ONE_SIGNAL_S", 0.01)
    with ranks_of_torchrun() as ranks, signals.stop_signal(ranks):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
