"""Exported folders load in transformers, and are whole or not there."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForImageTextToText, AutoProcessor

from seerl.checkpoint.export import export
from seerl.checkpoint.store import STATE
from seerl.errors import UserError
from tests.runs import seerl


def test_export_is_a_folder_that_transformers_loads_with_the_trained_weights(
    finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    done = seerl("export", str(finished / "run"), str(out))
    assert done.returncode == 0, done.stderr
    model = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    assert AutoProcessor.from_pretrained(out).tokenizer.eos_token == "<|im_end|>"
    trained = {name: torch.zeros_like(t) for name, t in model.state_dict().items()}
    dcp.load({"model": trained}, checkpoint_id=finished / "run" / "global_step_6" / STATE, no_dist=True)
    for name, tensor in trained.items():
        torch.testing.assert_close(model.state_dict()[name], tensor, msg=name)
    again = seerl("export", str(finished / "run"), str(out))
    assert again.returncode == 2
    assert "not empty" in again.stderr


@pytest.mark.parametrize("there", ["empty", "link", "current"])
def test_an_empty_folder_may_be_given_in_any_form(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    monkeypatch.chdir(target)
    out = {"empty": target, "link": tmp_path / "link", "current": Path()}[there]
    export(finished / "run", out)
    assert {"model.safetensors", "config.json", "generation_config.json"} <= set(os.listdir(target))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_generation_settings_are_those_of_the_model(finished: Path, tmp_path: Path) -> None:
    export(finished / "run", tmp_path / "out")
    stored = finished / "run" / "global_step_6" / "huggingface" / "generation_config.json"
    name = "generation_config.json"
    assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(stored.read_text())


@pytest.mark.parametrize("damage", ["gone", "[]", "{", '{"model_type": "nobody"}'])
def test_a_damaged_model_configuration_is_one_message(finished: Path, tmp_path: Path, damage: str) -> None:
    checkpoint = Path(shutil.copytree(finished / "run" / "global_step_6", tmp_path / "global_step_6"))
    if damage == "gone":
        shutil.rmtree(checkpoint / "huggingface")
    else:
        (checkpoint / "huggingface" / "config.json").write_text(damage)
    with pytest.raises(UserError, match="huggingface is damaged"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(finished: Path, tmp_path: Path) -> None:
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = seerl("export", str(finished / "run"), str(tmp_path / "out"), preexec_fn=small_files)
    assert done.returncode == 2, done.stderr
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
