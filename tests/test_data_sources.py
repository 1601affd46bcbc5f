"""Data sets are found, read as they are stored, mixed as asked, and refused with one clear message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seerl.data.order import EpochOrder
from seerl.data.sources import Entry, Source, load_sources, parse_entries, require_columns
from seerl.errors import UserError
from tests.data_helpers import png, stored, write_images_parquet, write_jsonl

ROWS = [{"prompt": f"question {n}", "answer": n} for n in range(5)]


def open_one(files: str) -> Source:
    (source,) = load_sources(files, "data.train_files")
    return source


def refused(files: str | list[str]) -> str:
    with pytest.raises(UserError) as caught:
        load_sources(files, "data.train_files")
    message = str(caught.value)
    assert message.startswith("data.train_files")
    assert "\n" not in message
    return message


def write(path: Path) -> str:
    table = datasets.Dataset.from_list(ROWS)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table.to_parquet(str(path))
    elif path.suffix == ".csv":
        table.to_csv(str(path))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".arrow":
        table.save_to_disk(str(path.parent / "saved"))
        os.replace(path.parent / "saved" / "data-00000-of-00001.arrow", path)
    else:
        write_jsonl(path, ROWS)
    return str(path)


@pytest.mark.parametrize("suffix", ["parquet", "json", "jsonl", "csv", "arrow"])
def test_every_kind_of_file_gives_its_rows_and_their_ids(suffix: str, tmp_path: Path) -> None:
    source = open_one(write(tmp_path / f"train.{suffix}"))
    assert [source.row(n) for n in range(len(source))] == ROWS
    assert source.row_id(3) == f"train.{suffix}:3"


def test_a_folder_is_read_file_by_file_without_its_hidden_files(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_bytes(b"\0\1")
    (tmp_path / "._part-0.jsonl").write_bytes(b"\0\1")
    (tmp_path / "README.md").write_text("# about")
    write(tmp_path / "part-0.jsonl")
    write(tmp_path / "part-1.jsonl")
    source = open_one(str(tmp_path))
    assert len(source) == 10
    assert [source.row_id(n) for n in (4, 5)] == ["part-0.jsonl:4", "part-1.jsonl:0"]


def test_a_folder_in_the_hubs_layout_has_its_splits(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00001.parquet")
    write(tmp_path / "data" / "test-00000-of-00001.parquet")
    assert open_one(f"{tmp_path}@test").row_id(0) == "data/test-00000-of-00001.parquet:0"
    assert open_one(str(tmp_path)).row_id(0) == "data/train-00000-of-00001.parquet:0"
    assert "It has: test, train." in refused(f"{tmp_path}@validation")


def test_what_save_to_disk_made_is_read(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(tmp_path / "several"))
    assert len(open_one(str(tmp_path / "one"))) == 5
    assert len(open_one(f"{tmp_path / 'several'}@test")) == 1
    assert "It has: test, train." in refused(f"{tmp_path / 'several'}@dev")


def test_at_signs_commas_and_stars_of_existing_paths_belong_to_them(tmp_path: Path) -> None:
    odd = tmp_path / "me@host, a*2" / "v@1"
    path = write(odd / "rows@train.jsonl")
    for files in (path, f"{path}@train", f"{odd}@train", str(odd)):
        assert len(load_sources([files], "data.train_files")[0]) == 5, files
    assert parse_entries(path, "k") == [Entry(path=path)]
    assert parse_entries([f"{path}@train*0.5"], "k") == [Entry(path=path, split="train", weight=0.5)]


def test_entries_of_a_list() -> None:
    assert parse_entries("a/b@train[:10]*2, c/d@test ,e/f", "k") == [
        Entry(path="a/b", split="train[:10]", weight=2.0),
        Entry(path="c/d", split="test"),
        Entry(path="e/f"),
    ]


def test_a_slice_keeps_the_rows_numbers(tmp_path: Path) -> None:
    source = open_one(f"{write(tmp_path / 'a.jsonl')}@train[2:4]")
    assert [source.row_id(n) for n in range(len(source))] == ["a.jsonl:2", "a.jsonl:3"]
    assert source.row(0) == ROWS[2]


def test_answers_of_any_json_type_come_back_as_they_were(tmp_path: Path) -> None:
    answers = [1, "x", [1, "two"], {"k": None}, None, 1.5, True, [], {"deep": {"er": [{}]}}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "answer": answer} for answer in answers])
    source = open_one(path)
    assert [source.row(n)["answer"] for n in range(len(source))] == answers


def test_a_broken_picture_is_handed_on_undecoded(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "images": [stored(b"no picture"), stored(png())], "answer": "a"}]
    source = open_one(write_images_parquet(tmp_path / "a.parquet", rows))
    assert [image["bytes"] for image in source.row(0)["images"]] == [b"no picture", png()]


def test_what_is_missing_or_empty_is_said(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p"\nnot json')
    (tmp_path / "notes.txt").write_text("hello")
    datasets.Dataset.from_dict({"prompt": [], "answer": []}).to_parquet(str(tmp_path / "rows.parquet"))
    assert "does not exist" in refused(str(tmp_path / "gone.parquet"))
    assert "is empty" in refused("")
    assert "0 bytes" in refused(str(tmp_path / "none.jsonl"))
    assert "holds no .parquet" in refused(str(tmp_path / "empty"))
    assert "cannot be read as json" in refused(str(tmp_path / "bad.jsonl"))
    assert "is not a .parquet" in refused(str(tmp_path / "notes.txt"))
    assert "has no rows" in refused(str(tmp_path / "rows.parquet"))


def test_a_missing_column_is_said_with_those_there_are(tmp_path: Path) -> None:
    sources = load_sources(write(tmp_path / "a.jsonl"), "data.train_files")
    with pytest.raises(
        UserError, match=r"a\.jsonl has no column 'problem' \(data\.prompt_key\)\. It has: prompt, answer\."
    ):
        require_columns(sources, {"data.prompt_key": "problem"})


def test_a_hub_that_cannot_be_reached_is_one_message() -> None:
    code = (
        "from seerl.data.sources import load_sources\n"
        "from seerl.errors import UserError\n"
        "try: load_sources('hiyouga/geometry3k@test', 'data.val_files')\n"
        "except UserError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert run.stdout.count("\n") == 1
    assert run.stdout.startswith("data.val_files: hiyouga/geometry3k (split test) is not a local path")
    assert "give the path of its file or folder" in run.stdout


def test_modelscope_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match="pip install"):
        load_sources("org/name", "data.train_files")


def parts(*sizes: int) -> list[np.ndarray]:
    starts = np.cumsum([0, *sizes])
    return [np.arange(starts[n], starts[n + 1]) for n in range(len(sizes))]


@given(st.integers(0, 1000), st.integers(0, 5), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_an_epoch_takes_every_row_once_and_depends_on_seed_and_epoch_alone(
    seed: int, epoch: int, sizes: list[int]
) -> None:
    first = EpochOrder(parts(*sizes), [None] * len(sizes), seed, shuffle=True)
    second = EpochOrder(parts(*sizes), [None] * len(sizes), seed, shuffle=True)
    second.epoch(epoch + 1)
    rows, repeats = first.epoch(epoch)
    assert rows.tolist() == second.epoch(epoch)[0].tolist()
    assert sorted(rows.tolist()) == list(range(sum(sizes)))
    assert not repeats.any()


def test_epochs_and_seeds_differ_and_unshuffled_is_file_order() -> None:
    orders = {
        tuple(EpochOrder(parts(50), [None], seed, True).epoch(epoch)[0])
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    assert EpochOrder(parts(3, 2), [None, None], 1, False).epoch(7)[0].tolist() == [0, 1, 2, 3, 4]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([None, 0.5, 1.0, 3.0])), min_size=2, max_size=4),
    st.integers(0, 3),
)
def test_weights_set_the_share_of_each_source(entries: list[tuple[int, float | None]], epoch: int) -> None:
    sizes, weights = [size for size, _ in entries], [weight for _, weight in entries]
    if all(weight is None for weight in weights):
        return
    order = EpochOrder(parts(*sizes), weights, 1, shuffle=True)
    rows, repeats = order.epoch(epoch)
    assert len(rows) == len(order) == sum(sizes)
    total = sum(1.0 if weight is None else weight for weight in weights)
    for part, weight in zip(parts(*sizes), weights, strict=True):
        count = int(np.isin(rows, part).sum())
        assert abs(count - sum(sizes) * (1.0 if weight is None else weight) / total) < 1
        times = Counter(rows[np.isin(rows, part)].tolist())
        if count:
            assert max(times.values()) - (min(times.values()) if len(times) == len(part) else 0) <= 1
    assert len(set(zip(rows.tolist(), repeats.tolist(), strict=True))) == len(rows)
