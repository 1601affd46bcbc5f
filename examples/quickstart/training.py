"""Trains with `seerl train`, exports the model, shows what came of it: what the examples have in common."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.quickstart.results import read_generations, summarise

ROOT = Path(__file__).resolve().parents[2]
console = Console()


def train(folder: Path, config: Path, overrides: Sequence[str], kinds: Sequence[str]) -> dict[str, Any]:
    """Runs `seerl train` on `config`, which writes to FOLDER/run, and exports the model to FOLDER/model.

    An interrupted run is gone on with; a finished one (there is a summary.json) is replaced. Returns the
    summary. Ends this process with the training's own exit code if that is not 0.
    """
    run, export, summary_file = folder / "run", folder / "model", folder / "summary.json"
    if summary_file.exists():
        summary_file.unlink()
        shutil.rmtree(run, ignore_errors=True)
    shutil.rmtree(export, ignore_errors=True)
    seerl("train", f"config={config}", *overrides)
    summary = summarise(run, export, kinds)
    seerl("export", summary["checkpoint"], str(export))
    summary_file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def seerl(*arguments: str) -> None:
    """The `seerl` command of this Python; its failure is this process's end."""
    code = subprocess.run([sys.executable, "-m", "seerl.cli", *arguments], cwd=ROOT, check=False).returncode
    if code != 0:
        sys.exit(code)


def show(title: str, summary: Mapping[str, Any], guesses: Mapping[str, float]) -> None:
    """The table of accuracy before and after, by kind, beside what one gets without looking."""
    table = Table(title=title)
    for column in ("question", "without looking", "before", "after"):
        table.add_column(column, justify="left" if column == "question" else "right")
    before, after = summary["accuracy_before_by_kind"], summary["accuracy_after_by_kind"]
    for kind, accuracy in after.items():
        table.add_row(kind, f"{guesses[kind]:.0%}", f"{before[kind]:.0%}", f"{accuracy:.0%}")
    table.add_section()
    rows = (guesses["all"], summary["accuracy_before"], summary["accuracy_after"])
    table.add_row("all", *(f"{accuracy:.1%}" for accuracy in rows), style="bold")
    console.print(table)
    console.print(
        f"Trained for {summary['train_seconds']:.0f} s: {summary['steps']} steps "
        f"of {summary['step_seconds_median']:.2f} s."
    )


def show_answers(folder: Path, summary: Mapping[str, Any], count: int = 8) -> None:
    """Answers to the first held-out pictures, before and after."""
    run = folder / "run"
    table = Table(title="Answers to the same held-out pictures", show_lines=True)
    for column in ("question", "right", "before", "after"):
        table.add_column(column, overflow="fold")
    pairs = zip(read_generations(run, 0), read_generations(run, summary["steps"]), strict=True)
    for before, after in list(pairs)[:count]:
        cells = (question(after["prompt"]), after["ground_truth"], before["response"], after["response"])
        table.add_row(*(Text(plain(cell)) for cell in cells))
    console.print(table)


def question(prompt: str) -> str:
    """The user's words of a rendered prompt."""
    return prompt.rpartition("<|vision_end|>")[2].partition("<|im_end|>")[0]


def plain(response: str) -> str:
    """A response without its end token, every character printable."""
    text = response.removesuffix("<|im_end|>")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def show_paths(summary: Mapping[str, Any]) -> None:
    """Where everything lies."""
    for name in ("checkpoint", "export", "metrics"):
        console.print(f"{name:>10}  {summary[name]}", highlight=False)
