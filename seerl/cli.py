"""The commands. `seerl train`, `check`, `explain`, `export`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from seerl import __version__
from seerl.errors import UserError

if TYPE_CHECKING:
    from seerl.trainer import Trainer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement learning for models that see.",
)

OVERRIDES = typer.Argument(
    help="config=FILE key.path=value ... (later wins; values are YAML)", show_default=False
)
PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": False}


_TOO_EARLY = "seerl: interrupted before the first step; nothing was saved"


class Interrupted(Exception):
    """The run was asked to stop by a signal, and has saved what it had."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


@app.command(context_settings=PASS_THROUGH)
def train(arguments: Annotated[list[str], OVERRIDES] = []) -> None:  # noqa: B006  (typer needs the literal)
    """Train: sample, score, update, step by step. Run again with the same arguments to resume."""
    from seerl.config import check_or_raise, load_config
    from seerl.reward.loading import check_reward

    _log_to_stderr()
    try:
        loaded = load_config(arguments)
        _say_all(loaded.notes)
        _say_all(check_or_raise(loaded.config, extra_checks=[check_reward]))
        from seerl.run import build_run
        from seerl.trainer import Trainer

        run, checkpoint = build_run(loaded.config)
    except KeyboardInterrupt:
        print(_TOO_EARLY, file=sys.stderr)
        raise
    exit_code = 1
    try:
        trainer = Trainer(run)
        if checkpoint is not None:
            trainer.resume(checkpoint)
        asyncio.run(_train_until_signal(trainer))
        exit_code = 0
    except Interrupted as stop:
        exit_code = stop.exit_code
        raise
    except UserError:
        exit_code = 2
        raise
    except KeyboardInterrupt:  # while a checkpoint was read: later the signal is handled
        print(_TOO_EARLY, file=sys.stderr)
        exit_code = 130
        raise
    finally:
        run.close(exit_code)


async def _train_until_signal(trainer: Trainer) -> None:
    """Trains; at the first Ctrl-C or SIGTERM stops, saves and says where; at the second ends at once."""
    task = asyncio.ensure_future(trainer.train())
    received: list[int] = []
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        received.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):  # the loop would hear of another after the saving only
            loop.remove_signal_handler(each)
            signal.signal(each, _end_at_once)
        print("\nStopping: the last finished step is being saved; once more ends at once.", file=sys.stderr)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if received:
        saved, last = trainer.save(), trainer.last_checkpoint
        where = f"saved {saved}" if saved else f"the last checkpoint is {last}"
        if last is None:
            where = "nothing was learned yet, so nothing was saved"
        print(f"Stopped at step {trainer.step}: {where}. {trainer.how_to_resume}", file=sys.stderr)
        raise Interrupted(received[0])


def _end_at_once(number: int, _: FrameType | None) -> None:
    Console(file=sys.__stdout__).show_cursor()  # nothing that would do it at the end gets to run
    os._exit(128 + number)


@app.command(context_settings=PASS_THROUGH)
def check(
    arguments: Annotated[list[str], OVERRIDES] = [],  # noqa: B006
    here: Annotated[
        bool, typer.Option("--here", help="what this machine lacks (devices, hub, mounts) is an error too")
    ] = False,
) -> None:
    """Check a configuration without training: every constraint, the batch arithmetic, a memory estimate."""
    from seerl.config import check_config, describe, load_config
    from seerl.reward.loading import check_reward

    loaded = load_config(arguments)
    report = check_config(loaded.config, here=here, extra_checks=[check_reward])
    print(describe(loaded.config))
    _say_all([*loaded.notes, *report.notes])
    if report.errors:
        raise UserError("\n".join(report.errors))
    print("The configuration is sound.")


@app.command()
def explain(key: Annotated[str, typer.Argument(help="a key such as worker.rollout.n, or a section")]) -> None:
    """Explain a configuration key: meaning, type, default, constraints."""
    from seerl.config import explain as explain_key

    print(explain_key(key))


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="global_step_N, or the folder that holds them (the last is taken)")
    ],
    out: Annotated[Path, typer.Argument(help="the Hugging Face folder to write")],
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; else the base model's")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
) -> None:
    """Export a checkpoint to a Hugging Face folder that transformers and vLLM load."""
    from seerl.checkpoint.export import export as export_checkpoint

    print(export_checkpoint(checkpoint, out, dtype=dtype, trust_remote_code=trust_remote_code))


@app.command()
def version() -> None:
    """Print SeeRL's version."""
    print(__version__)


def _log_to_stderr() -> None:
    """This package's own messages, and other libraries' warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("seerl").setLevel(logging.INFO)


def _say_all(notes: list[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def main(argv: list[str] | None = None) -> Any:
    """The console script. A user's mistake prints one message and exits with 2; SEERL_TRACEBACK=1 shows
    where."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    try:
        app(argv)
    except UserError as error:
        if os.environ.get("SEERL_TRACEBACK") == "1":
            raise
        print(f"seerl: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        sys.exit(stop.exit_code)


if __name__ == "__main__":
    main()
