"""A reward function is found by FILE:NAME, its form is read from it, and it gets what its form promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from seerl.config.schema import Config
from seerl.errors import UserError
from seerl.reward.loading import check_reward
from tests.reward_helpers import group_of, overalls, score_all, scorer_of, write

FORMS = {
    "batch": """
        def main(reward_inputs, bonus=0):
            return [{"overall": len(x["response"]) + bonus} for x in reward_inputs]
        """,
    "sequential by type": """
        REWARD_TYPE = "sequential"
        def main(x, bonus=0): return {"overall": len(x["response"]) + bonus}
        """,
    "sequential by name": """
        def main(reward_input, bonus=0): return {"overall": len(reward_input["response"]) + bonus}
        """,
    "earlier batch": """
        def main(predicts, ground_truths, bonus=0):
            return [{"overall": len(p) + bonus} for p, _ in zip(predicts, ground_truths, strict=True)]
        """,
    "earlier function": """
        def main(predict_str, ground_truth, bonus=0): return {"overall": len(predict_str) + bonus}
        """,
    "TRL": """
        def main(prompts, completions, bonus=0): return [float(len(c) + bonus) for c in completions]
        """,
    "TRL with columns": """
        def main(completions, level, ground_truth, **rest):
            return [len(c) + x for c, x, _ in zip(completions, level, ground_truth, strict=True)]
        """,
    "async batch": """
        async def main(reward_inputs, bonus=0): return [len(x["response"]) + bonus for x in reward_inputs]
        """,
    "async sequential": """
        async def main(reward_input, bonus=0): return {"overall": len(reward_input["response"]) + bonus}
        """,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_recognised_and_gets_its_keyword_arguments(tmp_path: Path, form: str) -> None:
    group = group_of("a", "bbb", columns={"level": 1})
    with scorer_of(write(tmp_path, FORMS[form]), reward_function_kwargs={"bonus": 1}) as scorer:
        assert overalls(scorer, group) == [2.0, 4.0]


def test_async_calls_of_a_group_run_together(tmp_path: Path) -> None:
    code = """
    import asyncio
    async def main(reward_input):
        await asyncio.sleep(1.0)
        return 1.0
    """
    with scorer_of(write(tmp_path, code), timeout_s=4) as scorer:
        assert overalls(scorer, group_of(*"abcdefgh")) == [1.0] * 8


def test_numpy_tensor_and_bool_values_become_floats_and_texts_are_left_out(tmp_path: Path) -> None:
    code = """
    import decimal
    import numpy as np
    def main(reward_inputs):
        values = [np.float32(0.5), np.array([2]), True, decimal.Decimal("0.25"), 3]
        return tuple({"overall": v, "accuracy": v, "said": "x", "nothing": None} for v in values)
    """
    with scorer_of(write(tmp_path, code)) as scorer:
        [scored] = score_all(scorer, group_of(*"abcde"))
    assert scored is not None
    assert [s.overall for s in scored.scores] == [0.5, 2.0, 1.0, 0.25, 3.0]
    assert all(type(s.overall) is float for s in scored.scores)
    assert dict(scored.scores[0].parts) == {"accuracy": 0.5}


def test_the_function_sees_images_prompt_columns_and_length(tmp_path: Path) -> None:
    code = """
    def main(reward_input):
        [image] = reward_input["images"]
        assert image.size == (6, 4) and image.getpixel((0, 0)) == (255, 0, 0)
        assert reward_input["prompt"] == "What is 2 + 2?" and reward_input["uid"] == "row-0@0"
        assert reward_input["finish_reason"] == "stop" and reward_input["ground_truth"] == ["4", "four"]
        assert reward_input["extra"] == {"question": "?"}
        return reward_input["response_length"]
    """
    group = group_of(
        "abc", truth=["4", "four"], columns={"question": "?"}, image=Image.new("RGB", (6, 4), "red")
    )
    with scorer_of(write(tmp_path, code), on_error="raise") as scorer:
        assert overalls(scorer, group) == [3.0]


def test_several_rewards_are_summed_by_weight_and_each_is_logged(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        def length(reward_inputs, unit): return [len(x["response"]) / unit for x in reward_inputs]
        def vowels(prompts, completions):
            return [float("a" in c) if c != "skip" else None for c in completions]
        """,
    )
    rewards = [
        {"function": f"{path}:length", "kwargs": {"unit": 2}},
        {"function": f"{path}:vowels", "weight": -0.5, "name": "a"},
    ]
    with scorer_of(rewards) as scorer:
        [scored] = score_all(scorer, group_of("ab", "skip"))
    assert scored is not None
    assert [(s.overall, dict(s.parts)) for s in scored.scores] == [
        (0.5, {"length": 1.0, "a": 1.0}),
        (2.0, {"length": 2.0}),
    ]


def test_a_sample_no_reward_applies_to_has_no_score(tmp_path: Path) -> None:
    path = write(tmp_path, "def main(prompts, completions): return [None, 1.0]")
    with scorer_of(path, on_error="skip") as scorer:
        assert overalls(scorer, group_of("a", "b")) == [1.0]


def test_a_file_may_import_its_neighbour_but_does_not_hide_the_standard_library(tmp_path: Path) -> None:
    write(tmp_path, "VALUE = 7", "neighbour.py")
    write(tmp_path, "raise RuntimeError('not me')", "colorsys.py")
    path = write(
        tmp_path, "import colorsys\nfrom neighbour import VALUE\ndef main(x): return [VALUE] * len(x)"
    )
    with scorer_of(path) as scorer:
        assert overalls(scorer, group_of("a")) == [7.0]


MISTAKES = {
    "def other(reward_inputs): return []": r"no function 'main'; it defines other",
    "import nothing_of_this_name": r"ModuleNotFoundError: No module named 'nothing_of_this_name'",
    "def main(reward_inputs, needed): return []": r"needed",
    "REWARD_TYPE = 'bach'\ndef main(x): return []": r"REWARD_TYPE='bach'.*'batch' or 'sequential'",
    "def main(: pass": r"syntax error",
    "import os\nos._exit(3)": r"ended the process",
}


@pytest.mark.parametrize("code", MISTAKES)
def test_check_says_what_is_wrong_with_a_file_before_a_run(tmp_path: Path, code: str) -> None:
    config = _config(write(tmp_path, code))
    [problem] = check_reward(config)
    assert re.search(MISTAKES[code], problem)


def test_a_mistake_in_the_file_stops_a_run_with_the_same_words(tmp_path: Path) -> None:
    path = write(tmp_path, "def other(reward_inputs): return []")
    with scorer_of(path) as scorer, pytest.raises(UserError, match="it defines other"):
        score_all(scorer, group_of("x"))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (None, "is not set: give FILE:NAME"),
        ("maths", "neither FILE.py:NAME nor a built-in reward .*math, r1v"),
        ("/nowhere/reward.py:main", "there is no file /nowhere/reward.py"),
        ([{"function": "math"}, {"function": "math"}], "two entries are called 'math'"),
        ([{"reward": "math"}], r"reward_function\[0\].reward is not known: an entry has function, weight"),
        ([{"function": "math", "weight": "heavy"}], r"\[0\].weight='heavy'"),
        ([{"weight": 1}], r"\[0\].function is missing"),
    ],
)
def test_what_names_no_reward_is_refused_with_what_is_allowed(reward: object, message: str) -> None:
    [problem] = check_reward(_config(reward))
    with pytest.raises(UserError, match=message):
        raise UserError(problem)


def test_a_sound_reward_has_no_errors() -> None:
    assert check_reward(_config("math")) == []
    assert check_reward(_config("examples/reward_function/r1v.py:compute_score")) == []


def test_arguments_the_function_does_not_take_are_refused() -> None:
    [problem] = check_reward(_config("math", {"format_wieght": 0.5}))
    assert "unexpected keyword argument 'format_wieght'" in problem


def _config(reward: object, kwargs: dict[str, object] | None = None) -> Config:
    section = {"reward_function": reward, "reward_function_kwargs": kwargs or {}}
    return Config.model_validate({"worker": {"reward": section}})
