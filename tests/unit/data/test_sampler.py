"""The sampler: groups, epochs, and going on exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrl_lite.data import Row, Sampler, each_row_once
from xrl_lite.data.sampler import naming_rows
from xrl_lite.errors import DataError


def make_rows(count: int) -> list[Row]:
    return [
        Row(index=n, prompt=[{"role": "user", "content": "x" * (n + 1)}], ground_truth=str(n)) for n in range(count)
    ]


def encode(row: Row) -> list[int]:
    return [1] * len(row.prompt[0]["content"])


def rows_of(sampler: Sampler, count: int) -> list[int]:
    return [sampler.sample()[0].extra_fields["row"] for _ in range(count)]


def test_a_group_has_one_prompt_and_ids_that_count_up() -> None:
    sampler = Sampler(make_rows(3), encode=encode, group_size=2, task_name="t")
    groups = [sampler.sample() for _ in range(3)]
    assert [state.group_id for group in groups for state in group] == [0, 0, 1, 1, 2, 2]
    assert [state.rollout_id for group in groups for state in group] == [0, 1, 2, 3, 4, 5]
    assert all(group[0].prompt_ids == group[1].prompt_ids for group in groups)
    assert groups[0][0].task_name == "t"


def test_a_row_that_cannot_be_encoded_is_named_with_its_task() -> None:
    def refuse(row: Row) -> list[int]:
        raise TypeError("no such role")

    sampler = Sampler(make_rows(1), encode=naming_rows(refuse, task_name="math"), group_size=1)
    with pytest.raises(DataError, match=r"Task math: no tokens .* of row 0, \[\{'role'.*: no such role"):
        sampler.sample()


def test_what_an_attempt_does_to_nested_values_reaches_neither_siblings_nor_later_epochs() -> None:
    prompt = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    info = {"tools_kwargs": {"search": {"create_kwargs": {"k": 3}}}}
    sampler = Sampler(
        [Row(index=0, prompt=prompt, ground_truth=["1", "2"], extra_info=info)], encode=lambda _: [1], group_size=2
    )
    one, sibling = sampler.sample()
    one.extra_fields["tools_kwargs"]["search"]["create_kwargs"].clear()
    one.message[0]["content"].clear()
    assert one.reward_model is not None
    one.reward_model["ground_truth"].clear()
    for state in (sibling, *sampler.sample()):
        assert state.extra_fields["tools_kwargs"] == {"search": {"create_kwargs": {"k": 3}}}
        assert state.message == [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        assert state.reward_model == {"ground_truth": ["1", "2"]}


def test_states_of_a_group_share_nothing_that_changes() -> None:
    one, other = Sampler(make_rows(1), encode=encode, group_size=2).sample()
    one.extra_fields["mine"] = True
    assert other.extra_fields == {"row": 0}


@given(st.integers(1, 7), st.integers(0, 30), st.integers(0, 5), st.booleans())
def test_a_restored_sampler_goes_on_exactly(num_rows: int, before: int, seed: int, shuffle: bool) -> None:
    rows = make_rows(num_rows)

    def fresh() -> Sampler:
        return Sampler(rows, encode=encode, group_size=1, seed=seed, shuffle=shuffle)

    sampler, restored = fresh(), fresh()
    rows_of(sampler, before)
    restored.load_state_dict(sampler.state_dict())
    assert [state.model_dump() for _ in range(12) for state in sampler.sample()] == [
        state.model_dump() for _ in range(12) for state in restored.sample()
    ]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"rows": make_rows(5)}, "num_rows was 4 and is 5"),
        ({"rows": make_rows(5)[1:]}, "there are 4 rows as before, but not the same ones"),
        ({"rows": make_rows(4)[::-1]}, "in another order"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"shuffle": False}, "shuffle was True and is False"),
    ],
)
def test_a_position_in_other_rows_is_refused(change: dict[str, Any], difference: str) -> None:
    settings: dict[str, Any] = {"rows": make_rows(4), "seed": 0, "shuffle": True}
    began = Sampler(**settings, encode=encode, group_size=1, task_name="t")
    other = Sampler(**(settings | change), encode=encode, group_size=1, task_name="t")
    with pytest.raises(DataError, match=f"Task t cannot go on with other data: .*{difference}"):
        other.load_state_dict(began.state_dict())


def test_the_state_can_be_kept_as_json_whatever_a_row_holds() -> None:
    row = Row(index=0, prompt=[{"role": "user", "content": [{"image": b"1"}]}], ground_truth={2: "\ud83d"})
    sampler, restored = (Sampler([row], encode=lambda _: [1], group_size=1) for _ in range(2))
    restored.load_state_dict(json.loads(json.dumps(sampler.state_dict())))


def test_each_epoch_draws_every_row_once_in_its_own_order() -> None:
    sampler = Sampler(make_rows(20), encode=encode, group_size=1, seed=3)
    first, second = rows_of(sampler, 20), rows_of(sampler, 20)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_long_prompts_are_left_out() -> None:
    sampler = Sampler(make_rows(4), encode=encode, group_size=1, shuffle=False, max_prompt_tokens=2)
    assert rows_of(sampler, 4) == [0, 1, 0, 1]


def test_only_long_prompts_is_an_error_not_an_endless_search() -> None:
    sampler = Sampler(make_rows(4)[2:], encode=encode, group_size=1, max_prompt_tokens=2)
    with pytest.raises(DataError, match="All 2 prompts are longer than max_prompt_tokens=2"):
        sampler.sample()


def test_evaluation_runs_every_row_in_order() -> None:
    groups = list(each_row_once(make_rows(3), encode=encode, task_name="eval"))
    assert [group[0].extra_fields["row"] for group in groups] == [0, 1, 2]
