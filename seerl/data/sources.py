"""Where rows come from: hub data sets, local files and folders, several of them in one mix.

Rows are read as they are stored: pictures are not decoded here, so a broken one is one bad row and not a
crash.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seerl.data.bad_rows import BadRow
from seerl.errors import UserError

if TYPE_CHECKING:
    import datasets

READERS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".arrow": "arrow",
}
_SPLIT = re.compile(r"(?P<name>\w[\w.-]*)(?P<slice>\[[^\]]*\])?")
_WEIGHT = re.compile(r"(?P<entry>.+)\*(?P<weight>\d+(\.\d+)?)")
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of `data.train_files`: what to read and its share in the mix."""

    path: str
    split: str = "train"
    weight: float | None = None


class Source:
    """The rows of one entry. `segments` are (name, first row) of the files they lie in, ascending."""

    def __init__(
        self, dataset: datasets.Dataset, segments: Sequence[tuple[str, int]], weight: float | None
    ) -> None:
        from datasets import Features

        self.weight = weight
        self.columns: list[str] = list(dataset.column_names)
        self._features = Features({name: _undecoded(feature) for name, feature in dataset.features.items()})
        self._dataset = dataset.with_format("arrow")
        self._names = [name for name, _ in segments]
        self._starts = [start for _, start in segments]

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> dict[str, Any]:
        """The row's columns; pictures as `{bytes, path}` where the data set holds them so. BadRow if its text
        cannot be read."""
        try:
            stored: dict[str, Any] = self._dataset[index : index + 1].to_pylist()[0]
        except UnicodeDecodeError as error:
            raise BadRow(f"its text is not UTF-8 ({error.reason} at byte {error.start})") from error
        return self._features.decode_example(stored)

    def longest_list(self, column: str) -> int:
        """The most entries of a list in the column; 1 if it holds single values, 0 if there is none."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if column not in self.columns:
            return 0
        values = self._dataset.with_format("arrow")[column][:]
        if not isinstance(values, (pa.Array, pa.ChunkedArray)) or not pa.types.is_list(values.type):
            return 1
        return pc.max(pc.list_value_length(values)).as_py() or 0

    def row_id(self, index: int) -> str:
        """Names the row to a person: `train.parquet:17`."""
        segment = bisect_right(self._starts, index) - 1
        return f"{self._names[segment]}:{index - self._starts[segment]}"


def parse_entries(files: str | Sequence[str], key: str) -> list[Entry]:
    """The entries of a comma list or a list. A comma, `@` or `*` in the name of an existing path
    belongs to it. Raises UserError naming `key` if there is no entry.
    """
    texts = [files] if isinstance(files, str) and os.path.exists(files) else None
    if texts is None:
        texts = _split_outside_brackets(files) if isinstance(files, str) else [str(text) for text in files]
    entries = [_parse_entry(text.strip()) for text in texts if text.strip()]
    if not entries:
        raise UserError(
            f"{key} is empty: give `org/name@split`, a parquet, json, jsonl, csv or arrow file, or a folder."
        )
    return entries


def load_sources(files: str | Sequence[str], key: str) -> list[Source]:
    """Opens every entry; raises UserError for what is missing, empty or of an unknown kind."""
    return [_load(entry, key) for entry in parse_entries(files, key)]


def require_columns(sources: Sequence[Source], columns: dict[str, str]) -> None:
    """`columns` maps configuration keys to column names; raises UserError if a source lacks one."""
    for source in sources:
        for key, column in columns.items():
            if column not in source.columns:
                have = ", ".join(source.columns)
                raise UserError(f"{source.row_id(0)[:-2]} has no column {column!r} ({key}). It has: {have}.")


def _split_outside_brackets(text: str) -> list[str]:
    return re.split(r",(?![^\[]*\])", text)


def _parse_entry(text: str) -> Entry:
    weight = None
    if not os.path.exists(text) and (match := _WEIGHT.fullmatch(text)):
        text, weight = match["entry"], float(match["weight"])
        if weight == 0:
            raise UserError(f"{text}: a weight must be above 0; leave the entry out instead.")
    if not os.path.exists(text):
        path, at, split = text.rpartition("@")
        if at and _SPLIT.fullmatch(split) and (os.path.exists(path) or not os.path.splitext(split)[1]):
            return Entry(path=path, split=split, weight=weight)
    return Entry(path=text, weight=weight)


def _load(entry: Entry, key: str) -> Source:
    path = Path(entry.path).expanduser()
    match = _SPLIT.fullmatch(entry.split)
    assert match is not None
    if path.is_file():
        dataset, segments = _load_files(path, [path], match["name"], key)
    elif path.is_dir():
        dataset, segments = _load_folder(path, match["name"], key)
    else:
        dataset = _load_hub(entry, key)
        segments = [(f"{entry.path}@{entry.split}", 0)]
    if match["slice"] and path.exists():
        dataset, segments = _slice(dataset, segments, entry, key)
    if len(dataset) == 0:
        raise UserError(f"{key}: {entry.path} (split {entry.split}) has no rows.")
    return Source(dataset, segments, entry.weight)


def _load_folder(folder: Path, split: str, key: str) -> tuple[datasets.Dataset, list[tuple[str, int]]]:
    from datasets import load_from_disk

    if (folder / "dataset_dict.json").is_file():
        if not (folder / split).is_dir():
            have = ", ".join(sorted(child.name for child in folder.iterdir() if child.is_dir()))
            raise UserError(f"{key}: {folder} has no split {split!r}. It has: {have}.")
        folder = folder / split
    if (folder / "state.json").is_file():  # made by datasets' save_to_disk
        return load_from_disk(str(folder)), [(folder.name, 0)]
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in READERS
        and file.is_file()
        and not any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)
    )
    if not files:
        raise UserError(f"{key}: the folder {folder} holds no {', '.join(READERS)} file.")
    return _load_files(folder, files, split, key)


def _load_files(
    root: Path, files: list[Path], split: str, key: str
) -> tuple[datasets.Dataset, list[tuple[str, int]]]:
    from datasets import concatenate_datasets

    if root.suffix.lower() not in READERS and root.is_file():
        raise UserError(f"{key}: {root} is not a {', '.join(READERS)} file.")
    files = _files_of_split(root, files, split, key)
    kinds = {READERS[file.suffix.lower()] for file in files}
    if len(kinds) > 1:
        raise UserError(
            f"{key}: {root} mixes {' and '.join(sorted(kinds))} files; name the files one by one."
        )
    parts, segments, start = [], [], 0
    for file in files:
        part = _read(kinds.copy().pop(), file, key)
        if len(part):
            parts.append(part)
            segments.append((file.name if root == file else str(file.relative_to(root)), start))
            start += len(part)
    if not parts:
        raise UserError(f"{key}: {root} has no rows.")
    try:
        return concatenate_datasets(parts), segments
    except ValueError as error:
        raise UserError(f"{key}: the files of {root} do not have the same columns: {error}") from error


def _files_of_split(root: Path, files: list[Path], split: str, key: str) -> list[Path]:
    """The files whose name or folder says `split`; those that say none are `train`."""
    by_split: dict[str, list[Path]] = {}
    for file in files:
        text = "/" + str(file.relative_to(root) if root != file else file.name).lower()
        found = [
            name
            for name, words in _SPLIT_NAMES.items()
            if re.search(rf"(?<![a-z0-9])({'|'.join(words)})(?![a-z])", text)
        ]
        by_split.setdefault(found[-1] if found else "train", []).append(file)
    canonical = next((name for name, words in _SPLIT_NAMES.items() if split in words), split)
    if root.is_file() and canonical == "train":
        return files
    if canonical in by_split:
        return by_split[canonical]
    have = ", ".join(sorted(by_split))
    raise UserError(f"{key}: {root} has no split {split!r}. It has: {have}.")


def _read(kind: str, file: Path, key: str) -> datasets.Dataset:
    from datasets import disable_progress_bars, load_dataset
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import parquet

    if file.stat().st_size == 0:
        raise UserError(f"{key}: {file} is empty (0 bytes).")
    disable_progress_bars()
    try:
        if kind == "parquet" and parquet.read_metadata(file).num_rows == 0:
            raise UserError(f"{key}: {file} has no rows.")
        with _datasets_silent():
            return load_dataset(kind, data_files=str(file), split="train")
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            raise  # a full disk or the like, not the file's fault
        raise UserError(f"{key}: {file} cannot be read as {kind}: {error.__cause__ or error}") from error
    except ValueError as error:
        if "no data" in str(error):
            raise UserError(f"{key}: {file} has no rows.") from error
        raise UserError(f"{key}: {file} cannot be read as {kind}: {error}") from error


@contextmanager
def _datasets_silent() -> Iterator[None]:
    """Without the log lines of datasets: what is wrong with a file is said once, by us."""
    from datasets.utils import logging as datasets_logging

    before = datasets_logging.get_verbosity()
    datasets_logging.set_verbosity(datasets_logging.CRITICAL)
    try:
        yield
    finally:
        datasets_logging.set_verbosity(before)


def _slice(
    dataset: datasets.Dataset, segments: list[tuple[str, int]], entry: Entry, key: str
) -> tuple[datasets.Dataset, list[tuple[str, int]]]:
    from datasets import ReadInstruction

    name = entry.split.partition("[")[0]
    try:
        (part,) = ReadInstruction.from_spec(entry.split).to_absolute({name: len(dataset)})
    except (AssertionError, ValueError) as error:
        raise UserError(f"{key}: {entry.path} has no slice {entry.split}: {error}") from error
    first, last = part.from_ or 0, len(dataset) if part.to is None else part.to
    # starts may become negative: a row's number in its file stays what it is there
    return dataset.select(range(first, last)), [(file, start - first) for file, start in segments]


def _load_hub(entry: Entry, key: str) -> datasets.Dataset:
    """From the Hugging Face Hub, or ModelScope with USE_MODELSCOPE_HUB=1."""
    if not _HUB_ID.fullmatch(entry.path) or os.path.splitext(entry.path)[1].lower() in READERS:
        raise UserError(f"{key}: {entry.path} does not exist.")
    modelscope = os.environ.get("USE_MODELSCOPE_HUB", "0").lower() in ("1", "true", "yes")
    hub = "ModelScope" if modelscope else "the Hugging Face Hub"
    try:
        return _load_modelscope(entry) if modelscope else _load_huggingface(entry)
    except UserError:
        raise
    except (
        Exception
    ) as error:  # the hub's clients raise a menagerie: of requests, httpx, their own, ValueError
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{key}: {entry.path} (split {entry.split}) is not a local path and could not be loaded from "
            f"{hub}: {reason}. Without access to the hub, copy the data set here and give the path of its "
            "file or folder instead."
        ) from error


def _load_huggingface(entry: Entry) -> datasets.Dataset:
    from datasets import load_dataset

    return load_dataset(entry.path, split=entry.split)


def _load_modelscope(entry: Entry) -> datasets.Dataset:
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise UserError(
            "USE_MODELSCOPE_HUB=1 needs the package modelscope: pip install 'modelscope[datasets]'."
        ) from error
    loaded = MsDataset.load(entry.path, split=entry.split)
    return loaded.to_hf_dataset() if hasattr(loaded, "to_hf_dataset") else loaded


def _undecoded(feature: Any) -> Any:
    """The feature with pictures, sound and video left as stored."""
    from datasets import Audio, Image, LargeList, List, Video

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, (Audio, Video)):
        return type(feature)(decode=False)
    if isinstance(feature, (List, LargeList)):
        return type(feature)(_undecoded(feature.feature))
    if isinstance(feature, dict):
        return {name: _undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(inner) for inner in feature]
    return feature
