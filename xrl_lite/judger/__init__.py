"""Judgers: everything that turns a response into a reward. Needs no torch.

Start with `JudgerConfig(reward_handler=...)` and its ``build()``; `base` has the interface, `outcome` what can happen
to a judgement, `adapters` the signatures of reward functions from other systems, `choice` the table of ready judgers.
"""

from typing import TYPE_CHECKING

from xrl_lite.lazy import lazy_exports

if TYPE_CHECKING:
    from xrl_lite.judger.adapters import (
        ADAPTERS,
        ArealReward,
        OpenRlhfReward,
        RewardAdapter,
        TrlChatReward,
        TrlReward,
        VerlBatchReward,
        VerlReward,
        XtunerReward,
    )
    from xrl_lite.judger.base import (
        BaseJudger,
        Judger,
        JudgerOutput,
        JudgerOutputBatch,
        JudgerPayload,
        JudgerPayloadBatch,
    )
    from xrl_lite.judger.build import build_judger
    from xrl_lite.judger.choice import JUDGERS, AnyJudgerConfig
    from xrl_lite.judger.composed import ComposedJudger
    from xrl_lite.judger.config import ComposedJudgerConfig, JudgerConfig, JudgerConfigLike
    from xrl_lite.judger.http import HttpScorer
    from xrl_lite.judger.ledger import judger_metrics
    from xrl_lite.judger.merge import JudgerMergeFn, weighted_merge
    from xrl_lite.judger.native import NativeJudger
    from xrl_lite.judger.outcome import (
        JudgementPolicy,
        JudgementTimeoutError,
        JudgerInputError,
        JudgerMisuseError,
        Outcome,
        RewardValueError,
        SkipSampleError,
        UnsupportedCallError,
    )
    from xrl_lite.judger.pool import JudgerPool
    from xrl_lite.judger.presets.code import CodeJudger, CodeJudgerConfig
    from xrl_lite.judger.presets.compass_verifier_v2 import CompassVerifierV2, CompassVerifierV2Config
    from xrl_lite.judger.presets.dapo_math import DapoMathJudgerConfig
    from xrl_lite.judger.presets.exact_match import ExactMatchJudgerConfig
    from xrl_lite.judger.presets.geo3k import GEO3KJudgerConfig
    from xrl_lite.judger.presets.gsm8k import GSM8KJudgerConfig
    from xrl_lite.judger.presets.llm_judge import LlmJudger, LlmJudgerConfig
    from xrl_lite.judger.presets.math import MathJudgerConfig
    from xrl_lite.judger.presets.reward_model import (
        ClassifyJudger,
        ClassifyJudgerConfig,
        RewardModelJudger,
        RewardModelJudgerConfig,
    )
    from xrl_lite.judger.presets.search_qa import SearchQAJudgerConfig
    from xrl_lite.judger.presets.verl import VerlJudgerConfig, default_compute_score
    from xrl_lite.judger.proof import SelfTestResult, self_test
    from xrl_lite.judger.rate_limit import RateLimit
    from xrl_lite.judger.remote import JudgerActor, RayJudger, RayJudgerProxy, RemoteJudger

__all__ = [
    "ADAPTERS",
    "JUDGERS",
    "AnyJudgerConfig",
    "ArealReward",
    "BaseJudger",
    "ClassifyJudger",
    "ClassifyJudgerConfig",
    "CodeJudger",
    "CodeJudgerConfig",
    "CompassVerifierV2",
    "CompassVerifierV2Config",
    "ComposedJudger",
    "ComposedJudgerConfig",
    "DapoMathJudgerConfig",
    "ExactMatchJudgerConfig",
    "GEO3KJudgerConfig",
    "GSM8KJudgerConfig",
    "HttpScorer",
    "JudgementPolicy",
    "JudgementTimeoutError",
    "Judger",
    "JudgerActor",
    "JudgerConfig",
    "JudgerConfigLike",
    "JudgerInputError",
    "JudgerMergeFn",
    "JudgerMisuseError",
    "JudgerOutput",
    "JudgerOutputBatch",
    "JudgerPayload",
    "JudgerPayloadBatch",
    "JudgerPool",
    "LlmJudger",
    "LlmJudgerConfig",
    "MathJudgerConfig",
    "NativeJudger",
    "OpenRlhfReward",
    "Outcome",
    "RateLimit",
    "RayJudger",
    "RayJudgerProxy",
    "RemoteJudger",
    "RewardAdapter",
    "RewardModelJudger",
    "RewardModelJudgerConfig",
    "RewardValueError",
    "SearchQAJudgerConfig",
    "SelfTestResult",
    "SkipSampleError",
    "TrlChatReward",
    "TrlReward",
    "UnsupportedCallError",
    "VerlBatchReward",
    "VerlJudgerConfig",
    "VerlReward",
    "XtunerReward",
    "build_judger",
    "default_compute_score",
    "judger_metrics",
    "self_test",
    "weighted_merge",
]

__getattr__, __dir__ = lazy_exports(__name__, __file__)
