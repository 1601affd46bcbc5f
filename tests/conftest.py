"""Fixtures that several parts share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_qwen2_5_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2.5-VL with weights."""
    from tests.tiny_models import make_tiny_qwen2_5_vl

    return make_tiny_qwen2_5_vl(tmp_path_factory.mktemp("models") / "tiny-qwen2.5-vl")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny text-only Qwen2 with weights."""
    from tests.tiny_models import make_tiny_qwen2

    return make_tiny_qwen2(tmp_path_factory.mktemp("models") / "tiny-qwen2")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2_5_vl: Path) -> Path:
    """A whole run of six steps that was never interrupted, saved every second step."""
    from tests.runs import arguments, seerl

    folder = tmp_path_factory.mktemp("finished")
    done = seerl(
        "train", *arguments(folder, tiny_qwen2_5_vl, **{"trainer.max_steps": 6, "trainer.save_freq": 2})
    )
    assert done.returncode == 0, done.stderr
    return folder
