"""The JSON form of a trajectory: nothing is lost and no float is rounded."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.types import Rollout, Trajectory, Turn

numbers = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=3)


def tuples(values):
    return st.lists(values, max_size=5).map(tuple)


segments = st.builds(
    Rollout,
    tokens=tuples(st.integers(0, 2**40)),
    mask=tuples(st.integers(0, 1)),
    logprobs=st.none() | tuples(numbers),
    policy_versions=tuples(st.integers(-1, 2**40)),
    temperature=numbers,
    scores=st.dictionaries(st.text(), numbers, max_size=3),
    stop_reason=st.none() | st.text(),
    processed_logprobs=st.none() | tuples(numbers),
    error=st.none() | st.text(),
    zero_advantage=st.booleans(),
)
trajectories = st.builds(
    Trajectory,
    text=st.text(),
    rollout=st.builds(
        lambda last, earlier: replace(last, earlier=earlier), segments, tuples(segments)
    ),
    prompt=st.text(),
    history=tuples(st.builds(Turn, st.text(), st.text())),
    step_count=st.integers(0, 9),
    metadata=json_objects,
    group_id=st.text(),
    out_of_room=st.booleans(),
    messages=tuples(json_objects),
)


@given(trajectories)
def test_a_trajectory_comes_back_from_json_as_it_was(trajectory):
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


@pytest.mark.parametrize(
    ("change", "named"),
    [({"reward": 1.0}, "unknown keys.*reward"), ({"tokens": None}, "missing keys.*tokens")],
)
def test_from_json_names_the_key_that_does_not_fit(change, named):
    data = Rollout((1,), (1,), (-0.5,), (0,), 1.0, {}).to_json()
    key, value = next(iter(change.items()))
    if value is None:
        del data[key]
    else:
        data[key] = value
    with pytest.raises(ValueError, match=named):
        Rollout.from_json(data)
