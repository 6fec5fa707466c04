"""What the driver draws after a resume is what it would have drawn."""

from __future__ import annotations

import json
import random

import numpy as np

from xrl_lite.trainer.randomness import random_state, set_random_state


def draw() -> list[float]:
    return [random.gauss(0, 1), random.random(), *np.random.normal(size=3).tolist()]


def test_random_numbers_go_on_where_they_were_saved() -> None:
    draw()  # leaves one half of a pair of normal numbers behind
    saved = json.dumps(random_state())
    wanted = [draw(), draw()]
    set_random_state(json.loads(saved))
    assert [draw(), draw()] == wanted
