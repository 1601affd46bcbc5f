"""Checkpoints: whole or absent, the best one kept, resumed with the configuration of the day."""

from __future__ import annotations

import json
import math
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from seerl.checkpoint.store import CheckpointStore, Trained, checkpoint_steps, load, newest_checkpoint
from seerl.config import load_config
from seerl.config.schema import FsdpConfig, ModelConfig
from seerl.errors import UserError
from seerl.policy.model import load_model
from seerl.run import build_run
from tests.runs import arguments, metrics, seerl


def test_model_only_checkpoints_are_resumed_as_weights_alone_and_said_so(
    tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    settings = {"trainer.max_steps": 2, "trainer.save_model_only": "true"}
    assert seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **settings)).returncode == 0
    more = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **{**settings, "trainer.max_steps": 3}))
    assert more.returncode == 0, more.stderr
    assert "weights only" in more.stdout + more.stderr
    assert sorted(metrics(tmp_path / "run")) == [1, 2, 3]


def test_a_full_disk_while_saving_is_one_message_and_leaves_nothing_half_written(
    tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    """A limit on file sizes stands in for the full disk: the write fails in the same place."""
    args = arguments(
        tmp_path, tiny_qwen2_5_vl, **{"trainer.max_steps": 1, "trainer.val_before_train": "false"}
    )
    limit = 1 << 20  # bytes; the checkpoint takes about five times as much

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = seerl("train", *args, preexec_fn=small_files)
    assert done.returncode == 2, done.stderr
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "run").glob("*global_step_*"))


@pytest.mark.parametrize("damage", ["truncated", "no_metadata", "broken_json", "empty_json"])
def test_a_damaged_checkpoint_is_one_message(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path, damage: str
) -> None:
    checkpoint = tmp_path / "global_step_6"
    shutil.copytree(finished / "run" / "global_step_6", checkpoint)
    state = checkpoint / "state"
    if damage == "truncated":
        for file in state.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:5000])
    elif damage == "no_metadata":
        (state / ".metadata").unlink()
    else:
        (checkpoint / "trainer_state.json").write_text('{"step": 1, ' if damage == "broken_json" else "{}")
    resume = {"trainer.load_checkpoint_path": checkpoint, "trainer.max_steps": 7}
    done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **resume))
    assert done.returncode == 2, done.stderr
    assert "damaged" in done.stderr
    assert "Traceback" not in done.stderr
    exported = seerl("export", str(checkpoint), str(tmp_path / "out"))
    assert exported.returncode == 2, exported.stderr
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(finished: Path, tiny_qwen2: Path) -> None:
    model = load_model(ModelConfig(model_path=str(tiny_qwen2)), FsdpConfig(), torch.device("cpu"))
    other = Trained(module=model.module, optimizer=torch.optim.AdamW(model.module.parameters()))
    with pytest.raises(UserError, match="is of another model"):
        load(finished / "run" / "global_step_6", other)


def test_a_broken_tracker_file_costs_no_checkpoint(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    (tmp_path / "copy" / "run" / "checkpoint_tracker.json").write_text("{")
    done = seerl("train", *arguments(tmp_path / "copy", tiny_qwen2_5_vl, **{"trainer.max_steps": 7}))
    assert done.returncode == 0, done.stderr
    assert "trainer.max_steps: 6 -> 7" in done.stderr
    assert (tmp_path / "copy" / "run" / "global_step_7").is_dir()


STATE_OF_NOTHING = {"data": {}, "kl": {}, "trackers": {}}


class OneLayer:
    """A store of checkpoints of one small layer."""

    def __init__(self, folder: Path, limit: int = -1) -> None:
        self.module = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=0.1, betas=(0.5, 0.6), weight_decay=0.7
        )
        self.store = CheckpointStore(folder, limit=limit, write_model_files=lambda _: None, config_yaml="")

    @property
    def trained(self) -> Trained:
        return Trained(module=self.module, optimizer=self.optimizer)

    def save(self, step: int, score: float | None = None) -> Path:
        path = self.store.save(step, self.trained, STATE_OF_NOTHING | {"optimizer_steps": step})
        if score is not None:
            self.store.note_score(step, score)
        return path


def test_the_best_is_kept_and_known_to_a_store_opened_later(tmp_path: Path) -> None:
    first = OneLayer(tmp_path, limit=1)
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.5), (4, None)):
        first.save(step, score)
    assert checkpoint_steps(tmp_path) == [2, 4]
    later = OneLayer(tmp_path, limit=1)
    later.save(5, 0.9)  # as good, and later: the first one stays
    assert (later.store.best(), checkpoint_steps(tmp_path)) == ((2, 0.9), [2, 5])
    later.save(6, 0.95)
    assert (later.store.best(), checkpoint_steps(tmp_path)) == ((6, 0.95), [6])


def test_a_best_checkpoint_that_was_removed_by_hand_no_longer_counts(tmp_path: Path) -> None:
    layer = OneLayer(tmp_path)
    shutil.rmtree(layer.save(1, 0.9))
    layer.save(2, 0.1)
    assert layer.store.best() == (2, 0.1)


def test_the_validation_at_the_end_makes_the_last_checkpoint_the_best(finished: Path) -> None:
    tracker = json.loads((finished / "run" / "checkpoint_tracker.json").read_text())
    lines = [json.loads(line) for line in (finished / "run" / "metrics.jsonl").read_text().splitlines()]
    [score] = [x["val/reward_score"] for x in lines if "val/reward_score" in x and x["step"] == 6]
    assert tracker == {
        "last_global_step": 6,
        "last_validated_step": 6,
        "best_global_step": 6,
        "best_score": score,
    }


def test_the_best_survives_a_resume_from_weights_alone(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    settings = {"trainer.save_model_only": "true", "trainer.save_limit": 1, "trainer.max_steps": 1}
    assert seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **settings)).returncode == 0
    tracker = tmp_path / "run" / "checkpoint_tracker.json"
    best = {**json.loads(tracker.read_text()), "best_score": 100.0}
    tracker.write_text(json.dumps(best))
    settings["trainer.max_steps"] = 2
    assert seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **settings)).returncode == 0
    assert checkpoint_steps(tmp_path / "run") == [1, 2]
    assert json.loads(tracker.read_text()) == {**best, "last_global_step": 2, "last_validated_step": 2}


def test_a_step_saved_again_has_no_score_until_it_is_validated(tmp_path: Path) -> None:
    layer = OneLayer(tmp_path)
    layer.save(1, 0.2)
    layer.save(2, 0.9)
    layer.save(2)  # after going back to step 1: other weights
    assert layer.store.best() is None
    layer.save(3, 0.5)
    assert layer.store.best() == (3, 0.5)


def test_the_last_checkpoint_is_the_one_saved_last(tmp_path: Path) -> None:
    layer = OneLayer(tmp_path)
    for step in (1, 9, 2):  # after going back to step 1
        layer.save(step)
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_2"
    shutil.rmtree(tmp_path / "global_step_2")
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_9"


def test_a_replacement_that_was_killed_half_way_leaves_the_former(tmp_path: Path) -> None:
    OneLayer(tmp_path).save(3).rename(tmp_path / ".global_step_3.old")
    (tmp_path / ".global_step_3.partial").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_3"


def test_a_tracker_file_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".checkpoint_tracker.json.partial").mkdir()
    OneLayer(tmp_path).save(1, 0.5)
    assert checkpoint_steps(tmp_path) == [1]
    assert "checkpoint_tracker.json could not be written" in caplog.text


def test_a_failed_replacement_leaves_the_checkpoint_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = OneLayer(tmp_path)
    final = layer.save(1)
    before = sorted((p.name, p.read_bytes()) for p in final.rglob("*") if p.is_file())
    rename = Path.rename

    def no_space(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    with torch.no_grad():
        layer.module.weight.zero_()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", no_space)
        with pytest.raises(UserError, match=r"disk is full.*The last whole one: .*global_step_1"):
            layer.save(1)
    assert sorted((p.name, p.read_bytes()) for p in final.rglob("*") if p.is_file()) == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".global")] == []
    layer.save(1)
    assert sorted((p.name, p.read_bytes()) for p in final.rglob("*") if p.is_file()) != before


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".global_step_7.partial" / "state").mkdir(parents=True)
    OneLayer(tmp_path).save(8)
    assert [p.name for p in tmp_path.glob(".global_step*")] == []


def test_moments_are_restored_and_settings_are_the_configured_ones(tmp_path: Path) -> None:
    one = OneLayer(tmp_path)
    one.module(torch.ones(1, 2)).sum().backward()
    one.optimizer.step()
    path = one.save(1)
    other = OneLayer(tmp_path)
    configured = {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0}
    other.optimizer.param_groups[0].update(configured)
    load(path, other.trained)
    [group] = other.optimizer.param_groups
    assert {name: group[name] for name in configured} == configured
    assert torch.equal(other.module.weight, one.module.weight)
    state = other.optimizer.state[other.module.weight]
    assert torch.equal(state["exp_avg"], one.optimizer.state[one.module.weight]["exp_avg"])


def test_a_resumed_run_learns_at_the_rate_of_its_command(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    shutil.copytree(finished, tmp_path / "copy")
    change = {
        "trainer.max_steps": 8,
        "worker.actor.optim.lr": "5e-4",
        "worker.actor.optim.lr_scheduler_type": "cosine",
    }
    done = seerl("train", *arguments(tmp_path / "copy", tiny_qwen2_5_vl, **change))
    assert done.returncode == 0, done.stderr
    logged = metrics(tmp_path / "copy" / "run")
    at = [5e-4 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in (6, 7)]
    assert [logged[7]["actor/lr"], logged[8]["actor/lr"]] == pytest.approx(at)


@pytest.mark.parametrize(
    "change", [{"step": None}, {"data": []}, {"trackers": [1]}, {"data": {}}, {"optimizer_steps": "6"}]
)
def test_wrong_values_in_a_checkpoint_are_damage(
    finished: Path, tmp_path: Path, tiny_qwen2_5_vl: Path, change: dict
) -> None:
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    state = copy / "run" / "global_step_6" / "trainer_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), **change}))
    with pytest.raises(UserError, match="damaged"):
        build_run(load_config(arguments(copy, tiny_qwen2_5_vl, **{"trainer.max_steps": 7})).config)


@pytest.mark.parametrize("score", ["NaN", "1" * 401, '"high"', "[" * 100_000])
def test_a_best_score_that_is_none_counts_for_nothing(tmp_path: Path, score: str) -> None:
    layer = OneLayer(tmp_path)
    layer.save(1)
    (tmp_path / "checkpoint_tracker.json").write_text(f'{{"best_global_step": 1, "best_score": {score}}}')
    layer.save(2, 0.1)
    assert layer.store.best() == (2, 0.1)


def test_an_interrupt_while_reading_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = OneLayer(tmp_path)
    path = layer.save(1)

    def interrupted(*_: object, **__: object) -> None:
        raise dcp.api.CheckpointException("interrupted", {0: (KeyboardInterrupt(), None)})  # type: ignore[dict-item]

    monkeypatch.setattr(dcp, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(path, layer.trained)


def test_settings_of_generation_that_transformers_would_not_write_are_kept(
    tmp_path: Path, tiny_qwen2_5_vl: Path
) -> None:
    model = Path(shutil.copytree(tiny_qwen2_5_vl, tmp_path / "model"))
    file = model / "generation_config.json"
    settings = {**json.loads(file.read_text()), "temperature": 0.9, "top_p": 0.6, "do_sample": False}
    file.write_text(json.dumps(settings))
    done = seerl("train", *arguments(tmp_path, model, **{"trainer.max_steps": 1, "data.val_files": ""}))
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "run/global_step_1/huggingface/generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"]) == (0.9, 0.6)


def test_a_validation_without_a_score_is_no_best(tmp_path: Path, tiny_qwen2_5_vl: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "def main(reward_inputs):\n"
        "    if '100' in reward_inputs[0]['prompt']:\n        raise ValueError('validation')\n"
        "    return [{'overall': -1.0 - x['response_length']} for x in reward_inputs]\n"
    )
    changes = {
        "worker.reward.reward_function": tmp_path / "picky.py",
        "worker.reward.on_error": "skip",
        "trainer.max_steps": 1,
    }
    done = seerl("train", *arguments(tmp_path, tiny_qwen2_5_vl, **changes))
    assert done.returncode == 0, done.stderr
    assert "no answer of the validation could be scored" in done.stderr
    assert json.loads((tmp_path / "run" / "checkpoint_tracker.json").read_text()) == {"last_global_step": 1}
