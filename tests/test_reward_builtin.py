"""The rewards that are named without a file."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from PIL import Image

from seerl.reward.answers import boxed, equivalent, final_answer
from seerl.reward.builtin.math import appear_in_order
from seerl.reward.forms import Form
from seerl.reward.loading import BUILT_IN, Entry, load_reward
from tests.reward_helpers import group_of, overalls, score_all, scorer_of


def score(name: str, response: str, truth: Any = "4", length: int = 10, **kwargs: Any) -> dict[str, float]:
    """The score a built-in gives one response, in this process."""
    function = importlib.import_module(f"seerl.reward.builtin.{name}").compute_score
    row = {"response": response, "ground_truth": truth, "response_length": length, "prompt": "2 + 2?"}
    row |= {"images": [], "uid": "u", "finish_reason": "stop", "extra": {}}
    result = function([row], **kwargs)
    [found] = asyncio.run(result) if inspect.iscoroutine(result) else result
    return found


@pytest.mark.parametrize(
    ("response", "overall", "form"),
    [
        ("<think>2 + 2</think>\\boxed{4}", 1.0, 1.0),
        ("<think>\nover\nlines\n</think>\n\nso \\boxed{\\frac{8}{2}}.\n", 1.0, 1.0),
        ("< think >a< / think > \\boxed{4}", 1.0, 1.0),
        ("\\boxed{5} no, \\boxed{4}", 0.9, 0.0),
        ("<think>a</think>\\boxed{5}", 0.1, 1.0),
        ("<think>\\boxed{4}</think>", 0.9, 0.0),
        ("<think>a</think> 4", 0.0, 0.0),
        ("\\boxed{4", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_math_is_a_tenth_format_and_nine_tenths_accuracy(response: str, overall: float, form: float) -> None:
    found = score("math", response)
    assert found["overall"] == pytest.approx(overall)
    assert found["format"] == form


def test_the_math_format_is_the_classic_expression_for_every_order_of_its_marks() -> None:
    classic = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
    marks = ["<think>", "</think>", "\\boxed{", "}", "\n", "x"]
    texts = ["".join(order) for n in range(6) for order in itertools.product(marks, repeat=n)]
    differ = [t for t in texts if appear_in_order(t, *marks[:4]) != bool(classic.fullmatch(t))]
    assert differ == []


def test_equal_answers_in_other_writing_are_equal_and_unequal_ones_are_not() -> None:
    equal = [("0.5", "\\frac{1}{2}"), ("\\dfrac12", "1/2"), ("1,000", "1000"), ("x=5", "5"), ("50%", "0.5")]
    equal += [
        ("\\text{Yes}", "yes"),
        ("30^\\circ", "30"),
        ("1+x^2", "x^2+1"),
        ("$4$", "\\boxed{4}"),
        (" B. ", "B"),
    ]
    unequal = [("A", "B"), ("(1,2)", "(2,1)"), ("3.14", "\\pi"), ("", "4"), ("cat", "dog"), ("\\frac{1", "1")]
    assert [pair for pair in equal if not equivalent(*pair)] == []
    assert [pair for pair in unequal if equivalent(*pair)] == []
    assert equivalent("4", 4)
    assert not equivalent("", "")
    assert not equivalent("9" * 100_000, "4")


def test_the_last_whole_box_is_the_answer_whatever_braces_it_holds() -> None:
    assert boxed(r"\boxed{\frac{1}{2}} \boxed{\{1\}} \boxed{open") == r"\{1\}"
    assert boxed("no box") is None
    assert final_answer("\\boxed{1}<answer>\n\\boxed{2}\n</answer>") == "2"


@pytest.mark.parametrize(
    ("response", "overall"),
    [
        ("<think>\na\n</think>\n<answer>\n4\n</answer>", 1.0),
        ("<think>a</think> <answer>5</answer>", 0.5),
        ("<answer>4.0</answer>", 0.5),
        ("4", 0.5),
        ("<think>a</think><answer>4</answer> more", 0.5),
        ("nothing", 0.0),
    ],
)
def test_r1v_is_half_format_and_half_accuracy(response: str, overall: float) -> None:
    assert score("r1v", response)["overall"] == overall


def test_dapo_punishes_length_softly_from_the_buffer_on() -> None:
    limits = {"max_response_length": 100, "overlong_buffer_length": 20}
    lengths = [80, 90, 100, 200]
    found = [score("dapo", "\\boxed{4}", length=n, **limits)["overall"] for n in lengths]
    assert found == [1.0, 0.5, 0.0, 0.0]
    wrong = score("dapo", "\\boxed{4}" + "x" * 300, overlong_penalty_factor=0.5, length=90, **limits)
    assert wrong == {"overall": -1.25, "accuracy": -1.0, "overlong": -0.5, "accuracy_normalized": 0.0}


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "(B)",
        "b",
        "B. a cat",
        "<answer>\nB\n</answer>",
        "\\boxed{B}",
        "A cat? The answer is **B**, not A.",
        "So B",
    ],
)
def test_choice_reads_the_letter(response: str) -> None:
    assert score("choice", response, truth="B")["overall"] == 1.0
    assert score("choice", response, truth="(C) dog")["overall"] == 0.0


def test_choice_gives_nothing_for_no_letter_and_names_a_truth_without_one() -> None:
    assert score("choice", "A banana? I don't know", truth="B")["overall"] == 0.0
    assert score("choice", "", truth="B")["overall"] == 0.0
    with pytest.raises(ValueError, match="'7' names none of ABCD"):
        score("choice", "B", truth="7")


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        ("<answer>[0, 0, 10, 10]</answer>", [0, 0, 10, 10], 1.0),
        ("the box is (10, 10, 0, 0.0)", "[0, 0, 10, 10]", 1.0),
        ("[0, 0, 10, 5]", [[0, 0, 10, 10]], 0.5),
        ("[[0,0,2,2],[8,8,9,9]]", [0, 0, 2, 2], 0.5),
        ("[[8,8,9,9],[0,0,2,2]]", [[0, 0, 2, 2], [8, 8, 9, 9]], 1.0),
        ("[5, 5, 5, 5]", [5, 5, 5, 5], 0.0),
        ("no box", [0, 0, 1, 1], 0.0),
    ],
)
def test_iou_matches_boxes(response: str, truth: Any, value: float) -> None:
    assert score("iou", response, truth)["overall"] == pytest.approx(value)
    assert score("iou", response, truth, threshold=0.5)["overall"] == float(value >= 0.5)


def test_count_takes_the_last_number_of_the_answer() -> None:
    right = ["4", "There are 3 red and 1 blue, so 4.", "<answer>4</answer> of 9", "\\boxed{4}", "4.0"]
    assert [r for r in right if score("count", r, truth=4)["overall"] != 1.0] == []
    wrong = ["5", "-4", "four", "", "42"]
    assert [r for r in wrong if score("count", r, truth=4)["overall"] != 0.0] == []
    assert score("count", "1,204", truth="1204")["overall"] == 1.0


@pytest.mark.parametrize("name", ["math", "r1v", "dapo"])
def test_an_example_file_gives_what_the_built_in_of_its_name_gives(name: str) -> None:
    limits = {"max_response_length": 20, "overlong_buffer_length": 10} if name == "dapo" else {}
    example = load_reward(Entry(f"examples/reward_function/{name}.py", "compute_score", name, kwargs=limits))
    for response in ("<think>a</think>\\boxed{4}", "\\boxed{4}", "<think>a</think>\n<answer>4</answer>", "x"):
        row = {"response": response, "response_length": len(response), "ground_truth": "4"}
        assert example.function([row], **limits) == [score(name, response, length=len(response), **limits)]


def test_the_example_that_looks_at_one_response_gives_part_of_the_reward_for_a_near_miss() -> None:
    found = load_reward(Entry("examples/reward_function/one_by_one.py", "partial_credit", "near"))
    assert found.form is Form.SEQUENTIAL
    row = {"ground_truth": "1,000".replace(",", ""), "finish_reason": "stop"}
    answers = ["so 1,000", "1050.0", "2000", "no number"]
    scores = [found.function({**row, "response": a})["overall"] for a in answers]
    assert scores == pytest.approx([1.0, 0.25, 0.0, 0.0])
    cut_off = found.function({**row, "response": "1000", "finish_reason": "length"})
    assert cut_off == {"overall": 0.0, "accuracy": 0.0}


def test_the_example_in_the_style_of_trl_runs_as_its_head_says() -> None:
    file = "examples/reward_function/trl_style.py"
    rewards = [{"function": f"{file}:accuracy"}]
    rewards += [{"function": f"{file}:brevity", "weight": 0.2, "kwargs": {"limit": 5}}]
    with scorer_of(rewards, on_error="raise") as scorer:
        short, proof = score_all(
            scorer,
            group_of("Answer: 4", "5", columns={"task": "short"}),
            group_of("Answer: 4", columns={"task": "proof"}),
        )
    assert short is not None
    assert proof is not None
    assert [s.overall for s in short.scores] == pytest.approx([1 + 0.2 * 5 / 9, 0.2])
    assert [dict(s.parts) for s in proof.scores] == [{"accuracy": 1.0}]


def test_every_built_in_has_its_module() -> None:
    for name in BUILT_IN:
        assert callable(importlib.import_module(f"seerl.reward.builtin.{name}").compute_score)


def test_an_expression_of_absurd_size_is_survived() -> None:
    with scorer_of("math", timeout_s=15) as scorer:
        assert overalls(scorer, group_of("\\boxed{4}", "\\boxed{10^{10^{10^{10}}}}")) == [0.9, 0.0]


Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Starts a real service that answers POSTs of JSON; gives its address."""
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, body = answer({**sent, "authorization": self.headers["Authorization"]})
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                """Nothing: the tests' output stays readable."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _verdict(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]}


def test_the_judge_is_asked_once_per_question_again_when_busy_and_its_last_score_counts(
    serve: Callable[[Answer], str],
) -> None:
    asked: list[str] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body["messages"][0]["content"])
        if len(asked) == 1:
            return 503, {}
        good = "The answer to grade:\nfour {4}" in asked[-1]
        return 200, _verdict(f"SCORE: 3? No.\n**SCORE:** {10 if good else 2}")

    kwargs = {"base_url": serve(answer), "model": "judge", "scale": 10}
    with scorer_of("llm_judge", reward_function_kwargs=kwargs, on_error="raise") as scorer:
        group = group_of("four {4}", "five", "four {4}")
        assert overalls(scorer, group) == [1.0, 0.2, 1.0]
        assert overalls(scorer, group) == [1.0, 0.2, 1.0]
    assert len(asked) == 3
    assert "What is 2 + 2?" in asked[0]


def test_a_judge_that_refuses_or_says_no_score_is_a_fault_with_its_words(
    serve: Callable[[Answer], str],
) -> None:
    url = serve(lambda _: (401, {"error": "no key"}))
    with pytest.raises(RuntimeError, match=r"refused: status 401.*no key"):
        score("llm_judge", "4", base_url=url, model="m")
    url = serve(lambda _: (200, _verdict("fine, I think")))
    with pytest.raises(RuntimeError, match="no line 'SCORE"):
        score("llm_judge", "4", base_url=url, model="m")
    with pytest.raises(RuntimeError, match="failed 1 times, at last with ConnectError"):
        score("llm_judge", "4", base_url="http://127.0.0.1:9", model="m", retries=0)


def test_a_service_gets_all_of_a_group_and_returns_its_scores(serve: Callable[[Answer], str]) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {
            "scores": [
                {"overall": len(x["response"]) + x["extra"]["n"], "k": len(x["images"])}
                for x in body["inputs"]
            ]
        }

    kwargs = {"url": serve(answer), "send_images": True}
    group = group_of("a", "bb", columns={"n": 1, "odd": {1, 2}}, image=Image.new("RGB", (4, 4)))
    with scorer_of("http", reward_function_kwargs=kwargs, on_error="raise") as scorer:
        [scored] = score_all(scorer, group)
    assert scored is not None
    assert [(s.overall, s.parts["k"]) for s in scored.scores] == [(2.0, 1.0), (3.0, 1.0)]


FAILURES: dict[str, tuple[int, Any, str]] = {
    "broken": (500, {"error": "boom"}, r"failed 2 times, at last with status 500: .*boom"),
    "refused": (403, {"error": "not you"}, r"refused: status 403: .*not you"),
    "no JSON": (
        200,
        b"<html>busy</html>",
        r"failed 2 times, at last with status 200 and no JSON: <html>busy",
    ),
    "no scores": (200, {"result": [1]}, r"answered .*result.* where \{\"scores\": \[...\]\} is expected"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_service_that_fails_is_named_with_what_it_said(
    serve: Callable[[Answer], str], failure: str
) -> None:
    status, body, message = FAILURES[failure]
    with pytest.raises(RuntimeError, match=message):
        score("http", "4", url=serve(lambda _: (status, body)), retries=1)


def test_a_service_that_is_slow_once_is_asked_again_and_a_wrong_number_of_scores_is_a_fault(
    serve: Callable[[Answer], str],
) -> None:
    asked: list[int] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(len(body["inputs"]))
        if len(asked) == 1:
            time.sleep(1)
        return 200, [1.0, 1.0][: 1 + any(x["response"] == "twice" for x in body["inputs"])]

    kwargs = {"url": serve(answer), "request_timeout_s": 0.3}
    with scorer_of("http", reward_function_kwargs=kwargs) as scorer:
        [scored] = score_all(scorer, group_of("once"))
        [wrong] = score_all(scorer, group_of("twice"))
    assert scored is not None
    assert wrong is not None
    assert scored.scores[0].overall == 1.0
    assert wrong.scores[0].error == "wrong_length"
    assert asked == [1, 1, 1]


@pytest.mark.parametrize("name", ["llm_judge", "http"])
def test_a_key_is_sent_and_is_not_repeated_in_an_error_even_if_the_service_does(
    serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    url = serve(lambda body: (401, {"wrong": body["authorization"]}))
    kwargs = {"url": url} if name == "http" else {"base_url": url, "model": "m"}
    with pytest.raises(RuntimeError, match=r"wrong.*Bearer \*\*\*") as raised:
        score(name, "4", api_key_env="JUDGE_KEY", **kwargs)
    assert "secret" not in str(raised.value)
