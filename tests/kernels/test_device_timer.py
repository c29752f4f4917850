"""The timer of tuning without a device: in the interpreter, with a clock made up."""

import pytest

from fla_npu.ops.common import device_timer, tune
from fla_npu.ops.common.configs import Config

CALL = {"K": 16, "V": 16, "dtype": "fp16", "fast": False, "heads": 1, "tokens": 16, "cores": 2, "device": "cpu"}


def test_no_device_no_timer():
    key = tune.Key("chunk_gdn", "910B3", 128, 128, "exact", "many", "long")
    assert device_timer.device() is None and device_timer.for_key(key, "bf16", 20) is None


@pytest.mark.parametrize("op", tune.OPS)
def test_measures_what_is_right(op):
    repeats = []

    def clock(call, count):
        call()
        repeats.append(count)
        return 0.002

    measure = device_timer.timer(op, **CALL, clock=clock)
    config = Config(chunk=16, width=16)
    assert measure(config) == measure(config) == 0.002
    # The first call is one to see how long it takes; samples then last about a hundredth of a second.
    assert repeats == [1, 5, 5]


def test_refuses_what_is_wrong(monkeypatch):
    right = device_timer.launch_chunks

    def wrong(*args, **kwargs):
        o, state = right(*args, **kwargs)
        return o, 0.97 * state

    monkeypatch.setattr(device_timer, "launch_chunks", wrong)
    measure = device_timer.timer("chunk_gdn", **CALL, clock=lambda call, count: 1.0)
    with pytest.raises(tune.Failed, match="is wrong"):
        measure(Config(chunk=16, width=16))


def test_what_does_not_run_fails(monkeypatch):
    def refused(*args, **kwargs):
        raise RuntimeError("ub overflow")

    monkeypatch.setattr(device_timer, "launch_chunks", refused)
    measure = device_timer.timer("chunk_gdn", **CALL, clock=lambda call, count: 1.0)
    with pytest.raises(tune.Failed, match="ub overflow"):
        measure(Config(chunk=16, width=16))


def test_seconds_come_from_events():
    class Device:
        now, log = 0.0, []

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = Device.now

            def elapsed_time(self, other):
                return other.at - self.at

        @staticmethod
        def synchronize():
            Device.log.append(Device.now)

    def call():
        Device.now += 3.0

    assert device_timer.seconds_of(call, 4, Device) == pytest.approx(3e-3)
    assert Device.log == [0.0, 12.0]
