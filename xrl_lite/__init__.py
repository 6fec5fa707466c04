"""RL post-training of language models on one machine, without Ray.

Importing the package runs nothing and loads neither torch nor transformers. Start reading at `xrl_lite.run`.
"""

__version__ = "0.1.0"
