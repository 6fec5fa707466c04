"""Reading configs: what is refused, and in which words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.build import run_settings
from xrl_lite.algorithms import PolicyLossConfig, register_adv_est
from xrl_lite.config import dump_config, load_config
from xrl_lite.config.check import check_data, check_user_code
from xrl_lite.config.describe import describe
from xrl_lite.config.run_config import RunConfig
from xrl_lite.errors import ConfigError, PluginError
from xrl_lite.judger import JudgerConfig
from xrl_lite.run import build_callback


def write(folder: Path, **changes: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(run_settings(folder, Path("model"), **changes)), encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_unknown_key_is_refused_with_its_path_and_the_closest_name(tmp_path: Path) -> None:
    text = refusal(write(tmp_path), "engine.optimizer.learning_rat=1e-5")
    assert "engine.optimizer.learning_rat: unknown setting. Did you mean 'learning_rate'?" in text


def test_unknown_key_inside_a_judger_is_refused_with_its_path(tmp_path: Path) -> None:
    text = refusal(write(tmp_path), "task.judger_config.request_timout=3")
    assert "task.judger_config.request_timout: unknown setting. Did you mean 'request_timeout'?" in text


def test_wrong_type_is_refused_with_its_path_and_value(tmp_path: Path) -> None:
    text = refusal(write(tmp_path), "trainer.num_steps=many")
    assert "trainer.num_steps:" in text
    assert "'many'" in text


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    text = refusal(write(tmp_path), "trainer.num_steps=0", "rollout.num_replicas=0")
    assert "trainer.num_steps" in text
    assert "rollout.num_replicas" in text


def test_missing_file_names_the_closest(tmp_path: Path) -> None:
    write(tmp_path)
    assert "Did you mean 'config.yaml'?" in refusal(tmp_path / "confg.yaml")


def test_override_without_value_is_refused(tmp_path: Path) -> None:
    assert "a.b=value" in refusal(write(tmp_path), "seed")


def test_override_below_a_value_is_refused(tmp_path: Path) -> None:
    assert "seed holds the value 3" in refusal(write(tmp_path), "seed=3", "seed.inner=1")


def test_broken_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1, 2", encoding="utf-8")
    assert "not valid YAML" in refusal(path)


def test_a2_group_of_one_is_refused(tmp_path: Path) -> None:
    text = refusal(write(tmp_path), "task.sampler_config.prompt_repeat_k=1")
    assert "compares an attempt with its siblings" in text


def test_groups_must_divide_into_mini_batches(tmp_path: Path) -> None:
    text = refusal(write(tmp_path), "trainer.groups_per_step=10", "engine.num_mini_batches=4")
    assert "groups_per_step (10) must be a multiple of engine.num_mini_batches (4)" in text


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("replay_buffer.min_sessions=5", "more than task addition has attempts per prompt"),
        ("task.produce_strategy_config.type=async", "which trainer.mode=sync does not"),
        ("task.produce_strategy_config.type=asink", "Unknown produce strategy 'asink'. Did you mean 'async'?"),
        ("replay_buffer.filter_groups.enable=true", "filter_groups.enable needs filter_groups.metric"),
        ("replay_buffer.custom_sampler.path=my.py", "give both path"),
        ("report.loggers=[tensorbord]", "Did you mean 'tensorboard'?"),
        ("evaluation.num_samples={other: 2}", "names 'other', which is not in sample_params: sampled"),
    ],
)
def test_producing_and_reporting_that_cannot_work_is_refused(tmp_path: Path, override: str, wanted: str) -> None:
    assert wanted in refusal(write(tmp_path), override)


ASYNC = "task.produce_strategy_config={type: async, max_staleness: 1}"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["trainer.mode=synk"], "Unknown trainer mode 'synk'. Did you mean 'sync'?"),
        (["trainer.mode=separate_async"], "write task.produce_strategy_config: {type: async, max_staleness: 1}"),
        (["trainer.sync_weights_interval=0"], "greater than 0"),
        (
            ["trainer.sync_weights_interval=4", "checkpoint.every_steps=6"],
            "checkpoint.every_steps (6) must be a multiple of trainer.sync_weights_interval (4)",
        ),
        (
            ["trainer.sync_weights_interval=4", "evaluation.every_steps=10"],
            "evaluation.every_steps (10) must be a multiple of trainer.sync_weights_interval (4)",
        ),
        (
            ["trainer.mode=colocate_async", ASYNC, "trainer.sync_weights_interval=9"],
            "max_off_policy_threshold (8) must be at least trainer.sync_weights_interval (9)",
        ),
        (
            ["trainer.mode=separate_async", "task.produce_strategy_config.type=async"],
            "it would wait for every update. Set produce_strategy_config.max_staleness to 1 or more",
        ),
        (
            ["trainer.mode=separate_async", ASYNC, "trainer.num_warmup_batches=2"],
            "num_warmup_batches (2) is more than the bound on the age of samples allows, which is 1",
        ),
        (
            ["trainer.mode=separate_async", ASYNC, "rollout.sleep_level=1"],
            "with trainer.mode=separate_async they never sleep",
        ),
        (
            ["trainer.mode=separate_async", ASYNC, "task.produce_strategy_config.should_continue_fn=a:b"],
            "should_continue_fn says when a batch is complete",
        ),
        (["trainer.mode=colocate_async", ASYNC, "trainer.parameter_sync_step=2"], "is for separate_async"),
        (
            ["trainer.mode=separate_async", ASYNC, "trainer.parameter_sync_step=3"],
            "must be a multiple of engine.num_mini_batches times trainer.parameter_sync_step (3)",
        ),
        (["trainer.num_warmup_batches=1"], "num_warmup_batches is for the async modes"),
        (
            ["rollout.sleep_level=2", "trainer.sync_weights_interval=2"],
            "rollout.sleep_level=2 forgets the weights in every step",
        ),
    ],
)
def test_a_mode_that_cannot_work_is_refused(tmp_path: Path, overrides: list[str], wanted: str) -> None:
    assert wanted in refusal(write(tmp_path), *overrides)


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    task = run_settings(tmp_path, Path("model"))["task"]
    text = refusal(write(tmp_path, agent_loop_manager={"tasks": [task]}))
    assert "every task needs a task_name of its own, got addition, addition" in text


def test_several_tasks_are_read_and_their_judgers_checked(tmp_path: Path) -> None:
    task = run_settings(tmp_path, Path("model"))["task"] | {"task_name": "more", "weight": 0.5}
    config = load_config(write(tmp_path, agent_loop_manager={"tasks": [task]}))
    assert [(task.task_name, task.weight) for task in config.tasks] == [("addition", 1.0), ("more", 0.5)]
    data = check_data(config)
    assert len(data.train) == 128
    assert len(data.judger_configs) == 1, "equal judgers are shared"
    other = task | {"judger_config": task["judger_config"] | {"request_timeout": 3}}
    with pytest.raises(ConfigError, match="Two judgers with different settings have the name 'by_length'"):
        check_data(load_config(write(tmp_path, agent_loop_manager={"tasks": [other]})))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"sampler_config": {"prompt_repeat_k": 1}}, "agent_loop_manager.tasks[0].sampler_config.prompt_repeat_k=1"),
        (
            {"agent_loop_config": {"sample_params": {"temperature": 0}}},
            "agent_loop_manager.tasks[0].agent_loop_config.sample_params",
        ),
        (
            {"agent_loop_config": {"sample_params": {"temperature": 0.5}}},
            "got task: 1, agent_loop_manager.tasks[0]: 0.5",
        ),
        (
            {"agent_loop_config": {"sample_params": {"max_tokens": 100_000}}},
            "agent_loop_manager.tasks[0].agent_loop_config.sample_params.max_tokens",
        ),
    ],
)
def test_further_tasks_are_checked_like_the_first(tmp_path: Path, changes: dict[str, Any], place: str) -> None:
    task = run_settings(tmp_path, Path("model"))["task"] | {"task_name": "more"}
    for part, settings in changes.items():
        task[part] = task[part] | settings
    assert place in refusal(write(tmp_path, agent_loop_manager={"tasks": [task]}))


def test_user_code_for_producing_is_loaded_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("number = 3\n")
    path = write(tmp_path)
    with pytest.raises(PluginError, match="has no 'nothing'"):
        check_data(load_config(path, [f"task.produce_strategy_config.is_valid_sample_fn={tmp_path}/mine.py:nothing"]))
    with pytest.raises(ConfigError, match=r"mine.py:number is no function"):
        check_data(load_config(path, [f"task.produce_strategy_config.should_continue_fn={tmp_path}/mine.py:number"]))
    sampler = f"replay_buffer.custom_sampler={{path: {tmp_path}/mine.py, name: number}}"
    with pytest.raises(ConfigError, match="must be a subclass of ReplayBuffer"):
        check_data(load_config(path, [sampler]))
    with pytest.raises(ConfigError, match="must be a class with on_save"):
        check_data(load_config(path, [f"checkpoint.callback={tmp_path}/mine.py:number"]))


@pytest.mark.parametrize("named", ["my_callbacks.Told", "my_callbacks:Told", "{folder}/my_callbacks.py:Told"])
def test_a_checkpoint_callback_is_named_by_its_path(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_callbacks.py").write_text(
        "class Told:\n    def __init__(self, config): self.config = config\n    def on_save(self, **kwargs): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_callbacks", raising=False)
    config = load_config(write(tmp_path), [f"checkpoint.callback={named.format(folder=tmp_path)}"])
    check_user_code(config)
    assert build_callback(config).config is config


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("task.judger_config.type=gsm9k", "Unknown judger 'gsm9k'. Did you mean 'gsm8k'?"),
        ("task.agent_loop_config.type=single_tern", "Unknown agent loop 'single_tern'. Did you mean 'single_turn'?"),
        ("rollout.engine=troch", "Unknown rollout engine 'troch'. Did you mean 'torch'?"),
    ],
)
def test_unknown_component_names_the_closest(tmp_path: Path, override: str, wanted: str) -> None:
    assert wanted in refusal(write(tmp_path), override)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["algorithm.advantage=grop"], "Did you mean 'grpo'?"),
        (["algorithm.policy_loss=gsop"], "Did you mean 'gspo'?"),
        (["algorithm.policy_loss=dro"], "policy_loss dro needs dro_beta above 0"),
        (["algorithm.policy_loss={clip_ratio_lo: 0.1}"], "Did you mean 'clip_ratio_low'?"),
        (
            ["algorithm.policy_loss=gspo", "algorithm.loss_agg_mode=token-mean"],
            "with loss_agg_mode=seq-mean-token-mean",
        ),
        (["algorithm.loss_agg_mode=token_mean"], "'token-mean'"),
        (["algorithm.kl_loss_type=full"], "'low_var_kl'"),
        (["algorithm.distillation={teacher: t, loss_mode: k4}"], "Unknown distillation loss 'k4'"),
        (["critic={path: m}"], "critic is set, but algorithm.advantage='grpo' uses no values"),
        (["trainer.critic_warmup=1"], "trainer.critic_warmup is set, but algorithm.advantage='grpo'"),
        (
            ["algorithm.advantage=gae", "trainer={critic_warmup: 4, num_steps: 4}"],
            "must be below trainer.num_steps (4)",
        ),
        (["algorithm.advantage=gae", "critic.num_mini_batches=7"], "a multiple of critic.num_mini_batches (7)"),
        (["algorithm.advantage=passk"], "algorithm.passk_k (4) must be below"),
        (["engine={max_tokens_per_micro_batch: 6, max_tokens_per_row: 4}"], "may have 7 tokens together, more than"),
        (["algorithm.gdpo_reward_weights=[1, 2]"], "one weight for each of gdpo_reward_keys=None, got 2"),
        (["algorithm.rollout_correction=decoupled_seq"], "Did you mean 'decoupled_seq_is'?"),
        (["algorithm.rollout_correction={rollout_rs: token_k1}"], "needs rollout_rs_threshold"),
        (
            ["algorithm.policy_loss=gspo", "algorithm.rollout_correction=bypass_pg_is"],
            "takes the place of the policy loss, so policy_loss=gspo would be ignored",
        ),
    ],
)
def test_algorithms_that_cannot_be_meant_are_refused(tmp_path: Path, overrides: list[str], wanted: str) -> None:
    assert wanted in refusal(write(tmp_path), *overrides)


def test_an_estimator_of_user_code_is_refused_without_what_it_needs(tmp_path: Path) -> None:
    register_adv_est("test_needs_reference", requires={"ref_log_prob", "rollout_is_weights"})(lambda **_: None)
    text = refusal(write(tmp_path), "algorithm.advantage=test_needs_reference")
    assert "needs ref_log_prob, rollout_is_weights" in text
    assert "Set algorithm.use_kl_in_reward or algorithm.use_kl_loss." in text
    enough = ["algorithm.use_kl_loss=true", "algorithm.rollout_correction=decoupled_token_is"]
    load_config(write(tmp_path), ["algorithm.advantage=test_needs_reference", *enough])


ESTIMATORS = """
from xrl_lite.algorithms import register_adv_est


def by_argument(token_level_rewards, response_mask, values, index=None, **_):
    return values, values


@register_adv_est("test_by_decorator", requires={"values"}, min_group_size=3)
def by_decorator(**_): ...


def needs_nothing(token_level_rewards, response_mask, values=None, **_): ...


def needs_reference(token_level_rewards, response_mask, *, ref_log_prob, **_): ...
"""


def test_an_estimator_of_a_path_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "estimators.py"
    file.write_text(ESTIMATORS, encoding="utf-8")

    def config_with(function: str, *overrides: str) -> RunConfig:
        return load_config(write(tmp_path), [f"algorithm.advantage={file}:{function}", *overrides])

    for function, has_critic in (("by_argument", True), ("by_decorator", True), ("needs_nothing", False)):
        config = config_with(function)
        assert config.has_critic is has_critic
        assert [name for name, _ in config.engines] == ["engine", "critic"][: 1 + has_critic]
    with pytest.raises(ConfigError, match="needs ref_log_prob, which nothing"):
        config_with("needs_reference")
    with pytest.raises(ConfigError, match="Set it to 3 or more"):
        config_with("by_decorator", "task.sampler_config.prompt_repeat_k=2")


def test_estimators_that_need_no_siblings_take_groups_of_one(tmp_path: Path) -> None:
    alone = ["task.sampler_config.prompt_repeat_k=1"]
    for name in ("reinforce_plus_plus", "remax"):
        load_config(write(tmp_path), [*alone, f"algorithm.advantage={name}"])
    for name in ("rloo", "opo", "gdpo", "optimal_token_baseline", "reinforce_plus_plus_baseline"):
        assert "compares an attempt with its siblings" in refusal(
            write(tmp_path), *alone, f"algorithm.advantage={name}"
        )


def test_names_and_mappings_of_algorithms_are_read(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path),
        [
            "algorithm.advantage=rloo",
            "algorithm.policy_loss={loss_mode: vanilla, clip_ratio: 0.1, clip_ratio_high: 0.3}",
            "algorithm.rollout_correction={preset: decoupled_token_icepop, rollout_is_threshold: [0.5, 2]}",
            "algorithm.loss_agg_mode=seq-mean-token-sum-norm",
        ],
    )
    loss, correction = config.algorithm.policy_loss, config.algorithm.rollout_correction
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.1, 0.3)
    assert correction is not None
    assert correction.is_bounds == (0.5, 2.0)
    assert config.resolved_algorithm.loss_scale_factor == 6.0  # the longest response of these settings
    assert RunConfig.model_validate(yaml.safe_load(dump_config(config))) == config


LOSS = "algorithm.policy_loss"


@pytest.mark.parametrize(
    ("given", "sides", "dumped"),
    [
        ({}, (0.2, 0.2), {"clip_ratio": 0.2}),
        ({"clip_ratio": 0.3}, (0.3, 0.3), {"clip_ratio": 0.3}),
        ({"clip_ratio_low": 0.1}, (0.1, 0.2), {"clip_ratio": 0.2, "clip_ratio_low": 0.1}),
        ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, (0.1, 0.3), {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}),
        ({"clip_ratio": 0.3, "clip_ratio_low": None}, (0.3, 0.3), {"clip_ratio": 0.3}),
        ({"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, (0.2, 0.28), None),
        ({"clip_ratio": 0.2, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, (3e-4, 4e-4), None),
    ],
)
def test_a_dump_has_those_clip_ratios_that_the_others_follow_from(
    tmp_path: Path, given: dict[str, Any], sides: tuple[float, float], dumped: dict[str, float] | None
) -> None:
    path = write(tmp_path, algorithm={"policy_loss": given})
    loss = load_config(path).algorithm.policy_loss
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == sides
    values = loss.model_dump(mode="json")
    names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    assert {name: values[name] for name in names if name in values} == (dumped or given)
    assert PolicyLossConfig.model_validate(values) == loss
    if dumped is not None:
        path.write_text(dump_config(load_config(path)))
        changed = load_config(path, [f"{LOSS}.clip_ratio_low=0.15"]).algorithm.policy_loss
        assert (changed.clip_ratio_low, changed.clip_ratio_high) == (0.15, sides[1])


@pytest.mark.parametrize("is_python", [False, True])
def test_a_clip_ratio_that_neither_side_uses_is_refused(tmp_path: Path, is_python: bool) -> None:
    path = write(tmp_path, algorithm={"policy_loss": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}})
    if is_python:
        source = tmp_path / "config.py"
        source.write_text(
            "from pathlib import Path\n"
            "from xrl_lite.config import load_config\n"
            f"config = load_config(Path({str(path)!r}))\n"
        )
        path = source
    text = refusal(path, f"{LOSS}.clip_ratio=0.5")
    assert "clip_ratio=0.5 has no effect beside clip_ratio_low=0.2 and clip_ratio_high=0.28" in text
    loss = load_config(path, [f"{LOSS}.clip_ratio_low=0.1"]).algorithm.policy_loss
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.1, 0.28)
    not_given = [f"{LOSS}.clip_ratio_low=null", f"{LOSS}.clip_ratio_high=null"]
    loss = load_config(path, [f"{LOSS}.clip_ratio=0.5", *not_given]).algorithm.policy_loss
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.5, 0.5)


def test_python_config_takes_overrides(tmp_path: Path) -> None:
    path = Path(__file__).resolve().parents[3] / "configs" / "gsm8k.py"
    config = load_config(path, ["trainer.num_steps=2", "task.sampler_config.prompt_repeat_k=4"])
    assert config.trainer.num_steps == 2
    assert config.task.sampler_config.prompt_repeat_k == 4
    assert "Did you mean 'num_steps'?" in refusal(path, "trainer.num_step=2")


@pytest.mark.parametrize(
    "override", ["seed=3", "engine.optimizer.learning_rate=0.001", "task.judger_config.extra_info.k=1"]
)
def test_overrides_keep_what_a_python_config_changed_in_place(tmp_path: Path, override: str) -> None:
    source = tmp_path / "config.py"
    source.write_text(
        "from pathlib import Path\n"
        "from tests.build import run_config\n"
        "from xrl_lite.judger import GEO3KJudgerConfig\n"
        "config = run_config(Path(__file__).parent, Path('model'), **{'task.judger_config': GEO3KJudgerConfig()})\n"
        "config.task.judger_config.extra_info['format_score'] = 0.5\n"
        "config.engine.optimizer.options['eps'] = 1e-6\n"
    )
    changed = load_config(source, [override])
    assert isinstance(changed.task.judger_config, JudgerConfig)
    assert changed.task.judger_config.extra_info["format_score"] == 0.5
    assert changed.engine.optimizer.options == {"eps": 1e-6}


def test_an_override_of_the_clip_ratio_of_a_python_config_is_for_both_sides(tmp_path: Path) -> None:
    source = tmp_path / "config.py"
    source.write_text(
        "from pathlib import Path\n"
        "from tests.build import run_config\n"
        "config = run_config(Path(__file__).parent, Path('model'), algorithm={'policy_loss': {'clip_ratio': 0.3}})\n"
    )
    loss = load_config(source, [f"{LOSS}.clip_ratio=0.5"]).algorithm.policy_loss
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.5, 0.5)


CODE_IN_A_CONFIG = """
from functools import partial
from pathlib import Path
from tests.build import run_config
from xrl_lite.judger import JudgerConfig

class Mine(JudgerConfig):
    pass

class Scorer:
    def __call__(self, response, label, extra_info):
        return {{"score": 0.5}}

def mine(response, label, extra_info):
    return {{"score": 1.0}}

def verl(data_source, solution_str, ground_truth, extra_info=None, f=None):
    return 1.0

scorer, by_lambda = Scorer(), lambda response, label, extra_info: {{"score": 0.0}}
judger = {judger}
config = run_config(Path(__file__).parent, Path("model"), **{{"task.judger_config": judger}})
"""


def dumped_judger(folder: Path, judger: str) -> tuple[Path, dict[str, Any]]:
    """Return the dump of a .py config with a judger, and what it holds of that."""
    source, dumped = folder / "mine.py", folder / "dumped.yaml"
    source.write_text(CODE_IN_A_CONFIG.format(judger=judger))
    dumped.write_text(dump_config(load_config(source)))
    return dumped, yaml.safe_load(dumped.read_text())["task"]["judger_config"]


@pytest.mark.parametrize("name", ["mine", "scorer", "by_lambda"])
def test_code_of_a_python_config_is_dumped_as_the_path_to_it(tmp_path: Path, name: str) -> None:
    dumped, judger = dumped_judger(tmp_path, f'Mine(judger_name="m", reward_handler={name})')
    assert (judger["type"], judger["reward_handler"]) == (f"{tmp_path}/mine.py:Mine", f"{tmp_path}/mine.py:{name}")
    again = load_config(dumped).task.judger_config
    assert isinstance(again, JudgerConfig)
    assert (type(again).__name__, again.reward_handler) == ("Mine", f"{tmp_path}/mine.py:{name}")


@pytest.mark.parametrize(
    ("judger", "place", "kind", "cure"),
    [
        (
            '"m", reward_handler=partial(mine)',
            "reward_handler",
            "partial (mine)",
            "reward_handler={folder}/mine.py:mine",
        ),
        ('"m", reward_handler=Scorer()', "reward_handler", "Scorer (Scorer)", "reward_handler={folder}/mine.py:mine"),
        ('"m", reward_handler=mine, extra_info={"a": 2.0, "b": [{"c"}]}', "extra_info.b.0", "set", "extra_info.b=[c]"),
        (
            '"m", reward_handler=verl, signature="verl", reward_kwargs={"f": mine}',
            "reward_kwargs.f",
            "function",
            "reward_kwargs={{}}",
        ),
    ],
)
def test_what_a_dump_cannot_hold_is_refused_until_it_is_given_again(
    tmp_path: Path, judger: str, place: str, kind: str, cure: str
) -> None:
    dumped, held = dumped_judger(tmp_path, f"JudgerConfig(judger_name={judger})")
    assert held["extra_info"].get("a") == (2.0 if "extra_info" in judger else None)
    assert f"task.judger_config: {place} is not in this file: it was of type {kind}" in refusal(dumped)
    load_config(dumped, [f"task.judger_config.{cure.format(folder=tmp_path)}"])


def test_every_setting_is_described() -> None:
    settings = list(describe(RunConfig))
    assert {"seed", "trainer.num_steps", "engine.optimizer.learning_rate"} <= {setting.key for setting in settings}
    assert all(setting.description for setting in settings)
