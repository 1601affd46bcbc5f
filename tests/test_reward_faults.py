"""What a reward function does wrong costs the samples it does it to, and nothing else."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from rich.live import Live

from seerl.errors import UserError
from seerl.reward import pool
from tests.reward_helpers import group_of, overalls, score_all, scorer_of, write

# Does what the response says, or scores 1.
ACTS = """
import os, re, sys
def act(response):
    if response == "raise": raise KeyError("lost")
    if response == "exit": sys.exit(3)
    if response == "die": os.kill(os.getpid(), 9)
    if response == "segfault": os.kill(os.getpid(), 11)
    if response == "leave": os._exit(5)
    if response == "recurse": act(response)
    if response == "sleep": import time; time.sleep(60)
    if response == "regex": re.match(r"(a|a)*$", "a" * 60 + "b")
    wrong = {"nan": {"overall": float("nan")}, "inf": {"overall": 1e400}, "none": None, "huge": 10 ** 400}
    wrong |= {"text": {"overall": "1"}, "empty": {}, "missing": {"score": 1.0}}
    wrong |= {"part": {"overall": 1.0, "part": float("nan")}}
    return wrong.get(response, {"overall": 1.0})
def batch(reward_inputs):
    return [act(x["response"]) for x in reward_inputs]
def single(reward_input):
    return act(reward_input["response"])
def short(reward_inputs):
    return [1.0] * (len(reward_inputs) - any(x["response"] == "lose" for x in reward_inputs))
"""
FAULTS = {
    "raise": "KeyError",
    "exit": "SystemExit",
    "nan": "not_finite",
    "inf": "not_finite",
    "huge": "not_finite",
    "part": "not_finite",
    "text": "not_a_number",
    "none": "not_a_number",
    "empty": "no_overall",
    "missing": "no_overall",
    "die": "worker_died",
    "segfault": "worker_died",
    "leave": "worker_died",
    "recurse": "RecursionError",
    "sleep": "timeout",
    "regex": "timeout",
}


@pytest.mark.parametrize("form", ["batch", "single"])
def test_a_fault_scores_0_and_its_neighbours_keep_their_score(tmp_path: Path, form: str) -> None:
    responses = [text for fault in FAULTS for text in ("fine", fault)]
    with scorer_of(write(tmp_path, ACTS) + f":{form}", timeout_s=1, num_workers=2) as scorer:
        [scored] = score_all(scorer, group_of(*responses))
        metrics = scorer.metrics()
        assert scorer.metrics() == {"reward/errors": 0.0}
    assert scored is not None
    assert [(s.overall, s.error) for s in scored.scores] == [
        pair for kind in FAULTS.values() for pair in ((1.0, None), (0.0, kind))
    ]
    assert metrics["reward/errors"] == len(FAULTS)
    assert metrics["reward/errors/timeout"] == 2


def test_a_list_of_the_wrong_length_is_laid_at_the_door_of_its_sample(tmp_path: Path) -> None:
    with scorer_of(write(tmp_path, ACTS) + ":short") as scorer:
        [scored] = score_all(scorer, group_of("fine", "lose", "fine"))
    assert scored is not None
    assert [s.error for s in scored.scores] == [None, "wrong_length", None]


def test_a_slow_function_is_given_its_time_limit_per_sample_where_a_group_takes_longer(
    tmp_path: Path,
) -> None:
    code = """
    import time
    def main(reward_input):
        with open(reward_input["extra"]["log"], "a") as log:
            log.write(reward_input["response"])
        time.sleep(0.5)
        return 1.0
    """
    log = tmp_path / "log"
    group = group_of("a", "b", columns={"log": str(log)})
    with scorer_of(write(tmp_path, code), timeout_s=0.9) as scorer:
        assert overalls(scorer, group) == [1.0, 1.0]
        log.write_text("")
        assert overalls(scorer, group) == [1.0, 1.0]
    assert sorted(log.read_text()) == ["a", "b"]  # not tried together a second time


def test_with_skip_a_faulty_completion_leaves_its_group_and_an_empty_group_is_none(tmp_path: Path) -> None:
    with scorer_of(write(tmp_path, ACTS) + ":batch", on_error="skip") as scorer:
        mixed, empty = score_all(scorer, group_of("fine", "raise", "ok"), group_of("nan", "nan"))
    assert empty is None
    assert mixed is not None
    assert [s.overall for s in mixed.scores] == [1.0, 1.0]
    assert [c.token_ids.size for c in mixed.completions] == [4, 2]


def test_with_raise_the_run_stops_with_traceback_response_and_row(tmp_path: Path) -> None:
    with (
        scorer_of(write(tmp_path, ACTS) + ":batch", on_error="raise") as scorer,
        pytest.raises(UserError, match=r"data.jsonl:0 \(KeyError\)(.|\n)*in act(.|\n)*lost(.|\n)*'raise'"),
    ):
        score_all(scorer, group_of("fine", "raise"))


def test_the_first_fault_of_each_kind_is_told_and_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scorer_of(write(tmp_path, ACTS) + ":batch") as scorer:
        score_all(scorer, group_of("raise", "raise", "nan"), group_of("raise"))
    assert len(caplog.records) == 2
    assert "KeyError: 'lost'" in caplog.text
    assert "data.jsonl:0" in caplog.text


def test_a_group_that_loops_for_ever_is_over_after_a_time_limit_a_sample(tmp_path: Path) -> None:
    started = time.monotonic()
    with scorer_of(write(tmp_path, ACTS) + ":batch", timeout_s=0.5) as scorer:
        assert overalls(scorer, group_of("regex", "regex", "regex")) == [0.0] * 3
        assert scorer.metrics()["reward/errors/timeout"] == 3
    assert time.monotonic() - started < 20


def test_a_function_that_has_never_returned_stops_the_run_rather_than_taking_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_HOPELESS", 4)
    path = write(tmp_path, "import time\ndef main(reward_inputs): time.sleep(60)")
    with (
        scorer_of(path, timeout_s=0.1, num_workers=2) as scorer,
        pytest.raises(UserError, match=r"'main' has not returned once: 4 calls passed .*timeout_s=0\.1"),
    ):
        score_all(scorer, group_of(*"abcdefgh"))


def test_what_workers_print_is_passed_on_in_whole_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
    import os, sys
    def main(reward_input):
        print("looked at", reward_input["response"])
        print("a warning", file=sys.stderr)
        os.system("echo from a child")
        print("unfinished \N{SNOWMAN}", end="")
        return 1.0
    """
    with scorer_of(write(tmp_path, code)) as scorer:
        assert overalls(scorer, group_of("x")) == [1.0]
    shown = capfd.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("[reward]")] == [
        "[reward] looked at x",
        "[reward] a warning",
        "[reward] from a child",
        "[reward] unfinished \N{SNOWMAN}",
    ]


def test_what_workers_print_appears_above_a_progress_display(tmp_path: Path) -> None:
    screen = io.StringIO()
    code = "def main(reward_input):\n    print('1%\\r2%\\r[red]done')\n    return 1.0"
    with (
        Live("the display", console=Console(file=screen, force_terminal=True)),
        scorer_of(write(tmp_path, code)) as scorer,
    ):
        assert overalls(scorer, group_of("x")) == [1.0]
    assert screen.getvalue().count("[reward] [red]done\n") == 1


def test_workers_that_print_without_end_go_on_when_nobody_can_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    code = "def main(reward_input):\n    print('x' * 1_000_000)\n    return 1.0"
    with scorer_of(write(tmp_path, code), timeout_s=10) as scorer:
        assert overalls(scorer, group_of(*"abc")) == [1.0] * 3


def test_a_worker_that_dies_while_idle_is_replaced(tmp_path: Path) -> None:
    with scorer_of(write(tmp_path, ACTS) + ":batch") as scorer:
        assert overalls(scorer, group_of("fine")) == [1.0]
        for child in _workers(os.getpid()):
            child.kill()
        time.sleep(0.5)
        assert overalls(scorer, group_of("fine", "fine")) == [1.0, 1.0]


def test_a_file_that_ends_its_process_when_imported_stops_the_run_with_a_reason(tmp_path: Path) -> None:
    path = write(tmp_path, "import os\nos._exit(7)\n")
    with scorer_of(path) as scorer, pytest.raises(UserError, match="worker processes died"):
        score_all(scorer, group_of("x"))


def test_cancelling_gives_control_back_at_once_and_the_pool_goes_on(tmp_path: Path) -> None:
    async def cancel_one() -> None:
        task = asyncio.create_task(scorer.score(group_of("sleep")))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with scorer_of(write(tmp_path, ACTS) + ":batch") as scorer:
        assert overalls(scorer, group_of("fine")) == [1.0]
        started = time.monotonic()
        asyncio.run(cancel_one())
        assert time.monotonic() - started < 10
        assert overalls(scorer, group_of("fine")) == [1.0]


def test_workers_import_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = """
    import sys
    def main(reward_inputs):
        assert not {"torch", "transformers", "pydantic"} & set(sys.modules)
        return [1.0 for _ in reward_inputs]
    """
    with scorer_of(write(tmp_path, code)) as scorer:
        assert overalls(scorer, group_of("x")) == [1.0]


def test_workers_end_with_a_trainer_that_is_killed_even_inside_a_regex(tmp_path: Path) -> None:
    code = f"""
    from seerl.reward.loading import Entry
    from seerl.reward.output import WorkerOutput
    from seerl.reward.worker import run, start_pool
    if __name__ == "__main__":
        pool = start_pool([Entry({write(tmp_path, ACTS)!r}, "batch", "batch")], 1, WorkerOutput().writer)
        pool.schedule(run, args=[0, [{{"response": "fine"}}]]).result()
        print("up", flush=True)
        pool.schedule(run, args=[0, [{{"response": "regex"}}]]).result()
    """
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"up\n"
        time.sleep(0.5)
        workers = _workers(trainer.pid)
        assert workers
        trainer.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=5)
    for process in alive:
        process.kill()
    assert not alive


def _workers(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [c for c in children if "spawn_main" in " ".join(c.cmdline())]
