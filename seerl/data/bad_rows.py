"""Rows that cannot be used: how a part says so, and where they are listed."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from seerl.errors import UserError

log = logging.getLogger(__name__)


class BadRow(Exception):
    """This row cannot be used; the message is the reason, to which whoever holds the row adds its id."""


class OverlongRow(BadRow):
    """The prompt is longer than data.max_prompt_length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What comes from the preparation of a row instead of a prompt."""

    row_id: str
    reason: str
    overlong: bool = False
    fatal: bool = False
    """No row of its kind can work: the run is to stop, whatever `on_bad_row` says."""


class BadRowLog:
    """Counts the rows set aside and lists each once in `bad_rows.jsonl` of the run's folder, also over
    resumed runs.

    `folder` None counts only. With `on_bad_row` "raise" the first bad row raises UserError.
    """

    def __init__(self, folder: str | Path | None, on_bad_row: Literal["skip", "raise"]) -> None:
        self.path = None if folder is None else Path(folder) / "bad_rows.jsonl"
        self.reasons: dict[str, str] = {}
        self._raise = on_bad_row == "raise"
        self._listed = self._already_listed()

    def __len__(self) -> int:
        return len(self.reasons)

    def add(self, refusal: Refusal, filtering: bool = False) -> None:
        """Sets the row aside; raises UserError instead where the configuration says so.

        `filtering`: an overlong prompt is being left out on purpose, which is no fault even under "raise".
        """
        row_id, reason = refusal.row_id, refusal.reason
        if refusal.fatal:
            raise UserError(f"{row_id}: {reason}.")
        if self._raise and not (filtering and refusal.overlong):
            raise UserError(
                f"{row_id}: {reason}. Mend or remove the row, or set data.on_bad_row=skip to go on without "
                "it."
            )
        if not self.reasons and not filtering:
            where = f" and listed in {self.path}" if self.path else ""
            log.warning("%s is set aside: %s. Further rows like it are counted%s.", row_id, reason, where)
        self.reasons.setdefault(row_id, reason)
        if self.path is None or (row_id, reason) in self._listed:
            return
        self._listed.add((row_id, reason))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row_id": row_id, "reason": reason}, ensure_ascii=False) + "\n")

    def _already_listed(self) -> set[tuple[str, str]]:
        if self.path is None or not self.path.exists():
            return set()
        entries = (
            json.loads(line)
            for line in self.path.read_text(encoding="utf-8").splitlines()
            if line.endswith("}")
        )
        return {(entry["row_id"], entry["reason"]) for entry in entries}
