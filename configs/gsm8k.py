"""The run of gsm8k.yaml with components as objects, as XTuner's config files have them.

xrl-lite train configs/gsm8k.py model.path=Qwen/Qwen3-0.6B
"""

from xrl_lite.actors import CPUResourcesConfig
from xrl_lite.agent_loop import SingleTurnAgentLoopConfig, TaskSpecConfig
from xrl_lite.config import ModelConfig, RunConfig
from xrl_lite.data import DataConfig, SampleParams, SamplerConfig
from xrl_lite.engine.config import EngineConfig, OptimizerConfig
from xrl_lite.judger import GSM8KJudgerConfig
from xrl_lite.rollout import RolloutConfig
from xrl_lite.trainer import CheckpointConfig, EvaluationConfig, ReportConfig, TrainerConfig

QUESTION_SUFFIX = ' Let\'s think step by step and output the final answer after "####".'

judger_config = GSM8KJudgerConfig(
    judger_name="openai/gsm8k",
    cpu_resources=CPUResourcesConfig(num_workers=2, num_cpus_per_worker=0.25),
)

task_config = TaskSpecConfig(
    task_name="gsm8k",
    sampler_config=SamplerConfig(
        data=DataConfig(dataset="openai/gsm8k", dataset_config="main", split="train", question_suffix=QUESTION_SUFFIX),
        prompt_repeat_k=8,
        max_prompt_tokens=512,
    ),
    agent_loop_config=SingleTurnAgentLoopConfig(sample_params=SampleParams(temperature=1.0, max_tokens=512)),
    judger_config=judger_config,
)

config = RunConfig(
    name="gsm8k",
    model=ModelConfig(path="Qwen/Qwen3-0.6B"),
    task=task_config,
    rollout=RolloutConfig(engine="torch", max_batch_size=64),
    engine=EngineConfig(
        optimizer=OptimizerConfig(learning_rate=1.0e-6), max_tokens_per_row=4096, max_tokens_per_micro_batch=4096
    ),
    trainer=TrainerConfig(num_steps=100, groups_per_step=16),
    evaluation=EvaluationConfig(
        data=DataConfig(
            dataset="openai/gsm8k",
            dataset_config="main",
            split="test",
            num_rows=128,
            question_suffix=QUESTION_SUFFIX,
        ),
        every_steps=20,
        sample_params={"greedy": SampleParams(temperature=0.0, max_tokens=512)},
    ),
    checkpoint=CheckpointConfig(every_steps=20),
    report=ReportConfig(completions_every=5),
)
