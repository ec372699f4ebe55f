"""Laws of tables of times."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError, PlanError
from basisprune.layer_times import ChannelTimes, LayerShape, NetworkTimes, TimeTable

CONV = LayerShape("conv", (1, 1), (1, 1), (8, 8))
DEPTHWISE = LayerShape("depthwise", (3, 3), (1, 1), (8, 8))


def table(block: int = 16) -> TimeTable:
    conv = ChannelTimes(CONV, (16, 32, 64), (16, 64), ((1.0, 4.0), (2.0, 8.0), (4.0, 16.0)))
    return TimeTable("onnxruntime", "a device", {"onnxruntime": "1"}, 1, 1, block, (conv, per_channel()))


def per_channel() -> ChannelTimes:
    return ChannelTimes(DEPTHWISE, (16, 48), (1,), ((1.0,), (3.0,)))


def test_a_table_survives_json_and_tells_what_was_measured():
    again = TimeTable.from_json(table().to_json())
    assert again == table()
    for times in again.shapes:
        for inputs, row in zip(times.inputs, times.seconds, strict=True):
            counts = zip(times.outputs if times.shape == CONV else (inputs,), row, strict=True)
            assert all(again.seconds(times.shape, inputs, outputs) == seconds for outputs, seconds in counts)


def test_channels_beyond_the_last_full_block_cost_a_whole_one_and_none_cost_nothing():
    known = table()
    assert known.seconds(CONV, 17, 33) == known.seconds(CONV, 32, 48) == 6.0
    assert known.seconds(CONV, 0, 16) == known.seconds(CONV, 16, 0) == known.seconds(DEPTHWISE, 0, 0) == 0.0
    assert known.seconds(DEPTHWISE, np.array([16, 20, 48, 96]), 7).tolist() == [1.0, 2.0, 3.0, 6.0]


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), min_size=1))
def test_of_more_channels_no_fewer_seconds_are_told_where_the_measured_ones_rise(counts):
    inputs, outputs = np.array(counts, dtype=np.float64).T
    known = table()
    seconds = known.seconds(CONV, inputs, outputs)
    assert (known.seconds(CONV, inputs + 16, outputs) >= seconds).all()
    assert (known.seconds(CONV, inputs, outputs + 1) >= seconds).all()


def test_layers_are_timed_once_for_each_call_and_unknown_shapes_are_named():
    network = NetworkTimes(table(), {"twice": (CONV, CONV)})
    assert float(network.seconds("twice", 16, 16)) == 2.0
    assert float(network.seconds("another", 16, 16)) == 0.0
    other = replace(CONV, size=(7, 7))
    assert (CONV in table(), other in table()) == (True, False)
    with pytest.raises(PlanError, match="profile the device for this network"):
        table().seconds(other, 16, 16)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("runtime", "tensorrt", "allowed is onnxruntime"),
        ("block", 0, "at least 1"),
        ("threads", -1, "at least 1"),
    ],
)
def test_impossible_settings_are_refused(key, value, fault):
    with pytest.raises(ConfigError, match=fault):
        replace(table(), **{key: value})


def test_damaged_times_are_refused_with_the_layer_that_they_are_of():
    bad = [
        replace(per_channel(), seconds=((1.0,),)),
        replace(per_channel(), seconds=((1.0,), (float("nan"),))),
        replace(per_channel(), inputs=(48, 16)),
    ]
    for times in bad:
        with pytest.raises(ConfigError, match="3x3 depthwise conv, on maps of 8x8"):
            replace(table(), shapes=(times,))
    with pytest.raises(ConfigError, match="given twice"):
        replace(table(), shapes=(per_channel(), per_channel()))
    text = json.loads(table().to_json())
    del text["shapes"][0]["inputs"]
    with pytest.raises(PlanError, match=r"shapes\.0\.inputs"):
        TimeTable.from_json(json.dumps(text))


def test_shapes_say_what_they_are():
    shape = LayerShape("conv", (1, 3), (1, 2), (8, 4), 2, (2, 2))
    assert str(shape) == "1x3 conv in 2 groups, stride 1x2, dilation 2, on maps of 8x4"
    assert str(LayerShape("norm", (1, 1), (1, 1), (8, 4))) == "norm on maps of 8x4"


def test_a_table_takes_no_more_memory_than_its_file():
    shapes = [replace(CONV, size=(8, side)) for side in range(1, 65)]
    times = tuple(ChannelTimes(shape, (1, 10**6), (1, 10**6), ((1.0, 2.0), (3.0, 4.0))) for shape in shapes)
    known = TimeTable("onnxruntime", "a device", {}, 1, 1, 1, times)
    tracemalloc.start()
    try:
        assert all(known.seconds(shape, 10**6, 10**6) == 4.0 for shape in shapes)
        assert float(known.seconds(shapes[0], 500_000, 10**6)) == pytest.approx(3.0, rel=1e-5)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
