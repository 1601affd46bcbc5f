"""The stream of prompts: every row in its turn, resumable to the row, whatever rows and workers do."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seerl.data.loader import PromptLoader, ValidationSet
from seerl.data.prompts import load_processor
from seerl.data.workers import WorkerDied
from seerl.errors import UserError
from tests.data_helpers import config, model, png, stored, write_images_parquet, write_jsonl

ROWS = 22


@pytest.fixture(scope="module")
def vision(tiny_qwen2_5_vl: Path) -> dict[str, Any]:
    processor, tokenizer = load_processor(model(tiny_qwen2_5_vl))
    return {"processor": processor, "tokenizer": tokenizer}


@pytest.fixture(scope="module")
def text_only(tiny_qwen2: Path) -> dict[str, Any]:
    processor, tokenizer = load_processor(model(tiny_qwen2))
    return {"processor": processor, "tokenizer": tokenizer}


def image_rows(count: int = ROWS) -> list[dict[str, Any]]:
    """Every third row is text alone; all have the same question."""
    return [
        {"prompt": "What?", "images": None if n % 2 else [], "answer": str(n)}
        if n % 3 == 0
        else {"prompt": "<image>What?", "images": [stored(png((56 + n, 40), (n, 0, 0)))], "answer": str(n)}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_images_parquet(tmp_path_factory.mktemp("mixed") / "train.parquet", image_rows())


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows 2, 5 and 11 are bad in ways that only their preparation shows, row 7 in its text."""
    rows = image_rows()
    whole = png((64, 64))
    for number in (2, 5, 11):
        rows[number] = {"prompt": "<image>What?", "images": [stored(whole[: len(whole) - 40])], "answer": ""}
    rows[7]["prompt"] = "<image><image>What?"
    return write_images_parquet(tmp_path_factory.mktemp("broken") / "train.parquet", rows)


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    loaders: list[Any] = []
    yield loaders
    for loader in loaders:
        loader.close()


def uids(prompts: Any) -> list[str]:
    return [prompt.uid for prompt in prompts]


def test_an_epoch_has_the_whole_batches_of_its_rows_and_no_row_twice(
    mixed: str, vision: dict[str, Any]
) -> None:
    loader = PromptLoader(config(train_files=mixed), **vision, workers=0)
    assert loader.steps_per_epoch == ROWS // 4
    for epoch in range(3):
        seen = [prompt for _ in range(loader.steps_per_epoch) for prompt in next(loader)]
        assert loader.epoch == epoch
        assert len({prompt.row_id for prompt in seen}) == len(seen) == 20
        assert uids(seen) == [f"{prompt.row_id}#{epoch}" for prompt in seen]
    assert seen[0].row_id.startswith("train.parquet:")


def test_text_and_image_rows_train_together(mixed: str, vision: dict[str, Any]) -> None:
    prompts = PromptLoader(config(train_files=mixed, shuffle=False), **vision, workers=0).take(6)
    assert [prompt.media is None for prompt in prompts] == [True, False, False, True, False, False]
    assert [prompt.ground_truth for prompt in prompts] == list("012345")
    assert prompts[1].media is not None
    assert prompts[1].media.images[0].size == (57, 40)


def test_workers_change_nothing(mixed: str, vision: dict[str, Any], closing: list[Any]) -> None:
    here = PromptLoader(config(train_files=mixed), **vision, workers=0)
    there = PromptLoader(config(train_files=mixed), **vision, workers=2)
    closing.append(there)
    for ours, theirs in zip(here.take(30), there.take(30), strict=True):
        assert ours.uid == theirs.uid
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert (ours.media is None) == (theirs.media is None)
        if ours.media is not None and theirs.media is not None:
            assert ours.media.images[0].tobytes() == theirs.media.images[0].tobytes()
            for name, value in ours.media.features.items():
                assert torch.equal(value, theirs.media.features[name])
                assert not theirs.media.features[name].is_shared()  # or each would hold a file open


def test_workers_run_one_thread_and_end_with_the_loader(mixed: str, vision: dict[str, Any]) -> None:
    before = set(psutil.Process().children())
    loader = PromptLoader(config(train_files=mixed), **vision, workers=1)
    loader.take(1)
    (worker,) = set(psutil.Process().children()) - before
    assert worker.num_threads() <= 4  # its own, and its queue's; not one per CPU and more
    loader.close()
    worker.wait(timeout=10)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_a_run_stopped_anywhere_goes_on_with_the_same_rows(
    broken: str, vision: dict[str, Any], takes: list[int], data: st.DataObject
) -> None:
    settings_ = config(train_files=broken, filter_overlong_prompts=False)
    whole = PromptLoader(settings_, **vision, with_features=False, workers=0)
    expected = [uids(whole.take(count)) for count in takes]
    resumed: list[list[str]] = []
    state = None
    for count in takes:
        if state is None or data.draw(st.booleans(), label="stop here"):
            loader = PromptLoader(settings_, **vision, with_features=False, workers=0)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        resumed.append(uids(loader.take(count)))
        state = loader.state_dict()
    assert resumed == expected
    assert state == whole.state_dict()


def test_resuming_at_the_boundary_and_twice_with_workers(
    mixed: str, vision: dict[str, Any], closing: list[Any]
) -> None:
    def loader(state: dict[str, Any] | None = None) -> PromptLoader:
        made = PromptLoader(config(train_files=mixed), **vision, workers=1)
        closing.append(made)
        if state is not None:
            made.load_state_dict(state)
        return made

    expected = [uids(batch) for batch, _ in zip(loader(), range(12), strict=False)]
    for stop in (5, 7):  # after the last batch of the first epoch; within the second
        first = loader()
        head = [uids(next(first)) for _ in range(stop)]
        second = loader(first.state_dict())
        middle = [uids(next(second)) for _ in range(2)]
        third = loader(second.state_dict())
        tail = [uids(next(third)) for _ in range(12 - stop - 2)]
        assert head + middle + tail == expected
    second.load_state_dict(first.state_dict())  # also back, in a loader that has run ahead
    assert uids(next(second)) == middle[0]


def test_a_checkpoint_of_other_data_is_refused(mixed: str, broken: str, vision: dict[str, Any]) -> None:
    state = PromptLoader(config(train_files=mixed, seed=3), **vision, workers=0).state_dict()
    with pytest.raises(UserError, match=r"rows 22 then, 21 now; seed 3 then, 1 now"):
        PromptLoader(config(train_files=broken), **vision, workers=0).load_state_dict(state)


def test_bad_rows_are_replaced_counted_and_listed_once(
    broken: str, vision: dict[str, Any], tmp_path: Path
) -> None:
    settings_ = config(train_files=broken, filter_overlong_prompts=False)
    loader = PromptLoader(settings_, **vision, run_folder=tmp_path, workers=0)
    seen = [prompt.row_id for _ in range(10) for prompt in next(loader)]
    bad = {f"train.parquet:{number}" for number in (2, 5, 7, 11)}
    assert not bad & set(seen)
    assert set(seen) == {f"train.parquet:{number}" for number in range(ROWS)} - bad
    assert set(loader.bad_rows.reasons) == bad
    again = PromptLoader(settings_, **vision, run_folder=tmp_path, workers=0)  # as a resumed run does
    again.take(20)
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert sorted(entry["row_id"] for entry in listed) == sorted(bad)
    reasons = {entry["row_id"]: entry["reason"] for entry in listed}
    assert "2 places for images (<image>), but the row has 1 images" in reasons["train.parquet:7"]
    assert "cannot be decoded" in reasons["train.parquet:2"]


def test_with_the_filter_bad_texts_and_files_are_found_before_training(
    broken: str, vision: dict[str, Any], tmp_path: Path
) -> None:
    PromptLoader(config(train_files=broken), **vision, run_folder=tmp_path, workers=0)
    (entry,) = map(json.loads, (tmp_path / "bad_rows.jsonl").read_text().splitlines())
    assert entry["row_id"] == "train.parquet:7"


@pytest.mark.parametrize("workers", [0, 1])
def test_raise_stops_with_the_row_and_the_reason(
    workers: int, broken: str, vision: dict[str, Any], closing: list[Any]
) -> None:
    with pytest.raises(UserError, match=r"train\.parquet:7: the prompt has 2 places"):
        PromptLoader(config(train_files=broken, on_bad_row="raise"), **vision, workers=workers)
    settings_ = config(train_files=broken, on_bad_row="raise", filter_overlong_prompts=False, shuffle=False)
    loader = PromptLoader(settings_, **vision, workers=workers)
    closing.append(loader)
    with pytest.raises(UserError, match=r"train\.parquet:2: .*cannot be decoded"):
        loader.take(20)


def test_overlong_prompts_are_dropped_before_training_or_refused_at_use_but_never_cut(
    vision: dict[str, Any], tmp_path: Path
) -> None:
    rows = image_rows(12)
    rows[4] = {
        "prompt": "<image>What?",
        "images": [stored(png((280, 280)))],
        "answer": "",
    }  # 100 image tokens
    rows[5] = {
        "prompt": "<image><image>What?",
        "images": [stored(png((140, 140)))] * 2,
        "answer": "",
    }  # 25 each
    rows[6] = {"prompt": "word " * 60, "images": None, "answer": ""}
    path = write_images_parquet(tmp_path / "train.parquet", rows)
    for filtering in (True, False):
        folder = tmp_path / str(filtering)
        settings_ = config(train_files=path, max_prompt_length=50, filter_overlong_prompts=filtering)
        loader = PromptLoader(settings_, **vision, run_folder=folder, workers=0)
        assert loader.steps_per_epoch == (2 if filtering else 3)
        prompts = loader.take(16)
        assert max(prompt.token_ids.size for prompt in prompts) <= 50
        listed = [json.loads(line) for line in (folder / "bad_rows.jsonl").read_text().splitlines()]
        assert {entry["row_id"] for entry in listed} == {f"train.parquet:{n}" for n in (4, 5, 6)}
        assert all("more than data.max_prompt_length=50" in entry["reason"] for entry in listed)
    # the filter is asked for: under `raise` it still only leaves rows out
    PromptLoader(config(train_files=path, max_prompt_length=50, on_bad_row="raise"), **vision, workers=0)


def test_the_filter_in_workers_finds_the_same(vision: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": "word " * (n % 40), "images": None, "answer": ""} for n in range(1, 300)]
    path = write_images_parquet(tmp_path / "train.parquet", rows)
    found = []
    for workers in (1, 16):
        settings_ = config(train_files=path, max_prompt_length=60, filter_overlong_prompts_workers=workers)
        loader = PromptLoader(settings_, **vision, workers=0)
        found.append((len(loader.bad_rows), loader.state_dict()["rows"]))
    assert found[0] == found[1]
    assert 0 < found[0][0] < 299


def test_nothing_usable_and_less_than_a_batch_are_said(vision: dict[str, Any], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"p{n}", "answer": n} for n in range(3)])
    with pytest.raises(UserError, match=r"3 usable rows \(of 3\).*rollout_batch_size=4"):
        PromptLoader(config(train_files=path), **vision, workers=0)
    with pytest.raises(UserError, match=r"none of 3 rows can be used. The first, a\.jsonl:0: the prompt has"):
        PromptLoader(config(train_files=path, max_prompt_length=2), **vision, workers=0)
    loader = PromptLoader(
        config(train_files=path, max_prompt_length=2, rollout_batch_size=2, filter_overlong_prompts=False),
        **vision,
        workers=0,
    )
    with pytest.raises(UserError, match="no row can be used"):
        loader.take(1)


def test_a_text_model_with_image_rows_is_refused(mixed: str, text_only: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"train\.parquet:1: the row has images, but the model"):
        PromptLoader(config(train_files=mixed), **text_only)
    loader = PromptLoader(config(train_files=mixed, filter_overlong_prompts=False), **text_only, workers=0)
    with pytest.raises(UserError, match="reads text alone"):
        loader.take(8)


def test_a_missing_column_lists_those_there_are(mixed: str, vision: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"no column 'problem' \(data\.prompt_key\)\. It has: prompt, images, answer\."
    ):
        PromptLoader(config(train_files=mixed, prompt_key="problem"), **vision)


def test_a_killed_worker_is_an_error_and_not_a_hang(
    mixed: str, vision: dict[str, Any], closing: list[Any]
) -> None:
    before = set(psutil.Process().children())
    loader = PromptLoader(config(train_files=mixed), **vision, workers=1)
    closing.append(loader)
    loader.take(1)
    (worker,) = set(psutil.Process().children()) - before
    os.kill(worker.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match="want of memory"):
        loader.take(1000)
    assert time.monotonic() - started < 30
    with pytest.raises(WorkerDied):
        loader.take(1000)


def test_an_error_in_our_own_code_is_not_taken_for_a_bad_row(
    mixed: str, vision: dict[str, Any], closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistaken(*_: Any) -> None:
        raise KeyError("a programming error")

    monkeypatch.setattr("seerl.data.prompts.PromptBuilder.build", mistaken)
    for workers in (0, 1):
        loader = PromptLoader(config(train_files=mixed), **vision, workers=workers)
        closing.append(loader)
        with pytest.raises(KeyError, match="a programming error"):
            loader.take(4)


def test_repeated_rows_of_a_mix_have_uids_of_their_own(
    mixed: str, vision: dict[str, Any], tmp_path: Path
) -> None:
    small = write_jsonl(
        tmp_path / "small.jsonl", [{"prompt": f"p{n}", "answer": n, "kind": "s"} for n in range(2)]
    )
    loader = PromptLoader(config(train_files=f"{mixed}*1,{small}*1"), **vision, workers=0)
    prompts = loader.take(24)
    assert len(set(uids(prompts))) == 24
    ours = [prompt for prompt in prompts if prompt.row_id.startswith("small")]
    assert len(ours) == 12
    assert ours[0].columns == {"kind": "s"}


def test_validation_takes_every_row_once_in_file_order(
    mixed: str, vision: dict[str, Any], closing: list[Any]
) -> None:
    for workers in (0, 1):
        validation = ValidationSet(config(val_files=mixed, val_batch_size=5), **vision, workers=workers)
        closing.append(validation)
        for _ in range(2):
            batches = list(validation)
            assert [len(batch) for batch in batches] == [5, 5, 5, 5, 2]
            assert [p.row_id for b in batches for p in b] == [f"train.parquet:{n}" for n in range(ROWS)]
        next(iter(validation))  # left in the middle
        assert next(iter(validation))[0].row_id == "train.parquet:0"
    (everything,) = ValidationSet(config(val_files=mixed), **vision, workers=0)
    assert len(everything) == ROWS


def test_validation_leaves_bad_rows_out(broken: str, vision: dict[str, Any]) -> None:
    validation = ValidationSet(config(val_files=broken), **vision, workers=0)
    (everything,) = validation
    assert len(everything) == ROWS - 4
    assert len(validation.bad_rows) == 4
    with pytest.raises(UserError, match="has a weight"):
        ValidationSet(config(val_files=f"{broken}*2"), **vision)


def test_an_interrupted_take_loses_no_row(
    mixed: str, vision: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = uids(PromptLoader(config(train_files=mixed), **vision, workers=0).take(12))
    loader = PromptLoader(config(train_files=mixed), **vision, workers=0)
    loader.take(4)
    state, ordinary, calls = loader.state_dict(), loader._next_prompt, iter(range(100))

    def interrupted() -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return ordinary()

    monkeypatch.setattr(loader, "_next_prompt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loader.take(4)
    assert loader.state_dict() == state
    assert uids(loader.take(1)) == expected[4:5]
    resumed = PromptLoader(config(train_files=mixed), **vision, workers=0)
    resumed.load_state_dict(loader.state_dict())
    assert uids(loader.take(7)) == uids(resumed.take(7)) == expected[5:]


def test_the_most_images_of_a_row_is_known(vision: dict[str, Any], tmp_path: Path) -> None:
    rows = [{"prompt": "<image>" * n + "?", "images": [stored(png())] * n, "answer": ""} for n in range(4)]
    path = write_images_parquet(tmp_path / "a.parquet", rows)
    for filtering in (True, False):
        settings_ = config(train_files=path, filter_overlong_prompts=filtering)
        assert PromptLoader(settings_, **vision, workers=0).max_images == 3
    text = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "a"}] * 4)
    settings_ = config(train_files=text, filter_overlong_prompts=False)
    assert PromptLoader(settings_, **vision, workers=0).max_images == 0
