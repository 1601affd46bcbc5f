"""The pages on algorithms name everything there is, and their configuration lines are real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from seerl.algorithms.advantages import ADVANTAGES
from seerl.algorithms.correction import CORRECTIONS
from seerl.algorithms.kl import KL_ESTIMATORS
from seerl.algorithms.losses import LOSSES
from seerl.config import load_config

DOCS = Path(__file__).parent.parent / "docs"
ENGLISH = (DOCS / "algorithms.md").read_text(encoding="utf-8")
CHINESE = (DOCS / "algorithms.zh-CN.md").read_text(encoding="utf-8")
LINE = re.compile(r"(?:algorithm|worker)\.[a-z_.]+=[^\s`]+(?: (?:algorithm|worker)\.[a-z_.]+=[^\s`]+)*")


def test_every_algorithm_has_its_row_in_both_languages() -> None:
    for page in (ENGLISH, CHINESE):
        for name in (*ADVANTAGES, *LOSSES, *KL_ESTIMATORS, *CORRECTIONS):
            assert re.search(rf"^\| .*`{name}`", page, re.MULTILINE), name


def test_both_languages_give_the_same_configurations() -> None:
    assert LINE.findall(ENGLISH) == LINE.findall(CHINESE)


@pytest.mark.parametrize("line", sorted(set(LINE.findall(ENGLISH))))
def test_configuration_lines_load(line: str) -> None:
    load_config(shlex.split(line))


def test_every_advantage_and_loss_has_a_configuration_line() -> None:
    lines = " ".join(LINE.findall(ENGLISH)) + " "
    for name in ADVANTAGES:
        assert f"algorithm.adv_estimator={name} " in lines
    for name in LOSSES:
        assert f"worker.actor.loss_type={name} " in lines
