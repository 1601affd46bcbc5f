"""From arguments to a frozen configuration, or one message with every problem."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from seerl.config import Config, describe, dump_config, load_config
from seerl.config.frozen import thawed
from seerl.config.keys import known_keys
from seerl.config.loading import _escaped, _resolved
from seerl.config.yaml_values import read_yaml, write_yaml
from seerl.errors import UserError

EXAMPLES = Path(__file__).parent.parent / "examples"


def config_file(folder: Path, text: str, name: str = "run.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return f"config={folder / name}"


def refusal(*args: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(args)
    return str(caught.value)


def test_later_wins_and_overrides_win_over_files_wherever_they_stand(tmp_path: Path) -> None:
    first = config_file(tmp_path, "worker: {rollout: {n: 2, top_k: 7}}", "a.yaml")
    second = config_file(tmp_path, "worker: {rollout: {n: 3}}", "b.yaml")
    assert load_config([first, second]).config.worker.rollout.n == 3
    assert load_config([first, second]).config.worker.rollout.top_k == 7
    assert load_config(["worker.rollout.n=9", "worker.rollout.n=8", first]).config.worker.rollout.n == 8


@pytest.mark.parametrize(
    "text",
    ['{"n":16}', "{n: 16}", """'{"n":16}'""", '"{n: 16}"'],
    ids=["json", "yaml", "quoted", "quoted yaml"],
)
def test_a_mapping_may_be_json_yaml_or_quoted(text: str) -> None:
    config = load_config([f"worker.rollout.val_override_config={text}"]).config
    assert config.worker.rollout.val_override_config == {"n": 16}


@pytest.mark.parametrize("text", ["['console','wandb']", "[console,wandb]", """'["console","wandb"]'"""])
def test_a_list_may_be_written_as_shells_leave_it(text: str) -> None:
    assert load_config([f"trainer.logger={text}"]).config.trainer.logger == ("console", "wandb")


def test_numbers_are_read_as_people_mean_them() -> None:
    config = load_config(
        ["worker.actor.optim.lr=1e-6", "algorithm.kl_coef=0", "trainer.max_steps=None"]
    ).config
    assert config.worker.actor.optim.lr == 1e-6
    assert config.algorithm.kl_coef == 0.0
    assert config.trainer.max_steps is None


@pytest.mark.parametrize(
    "name", ["1e-6", "2024_01", "2024-01-01", "007", "true", "on", "a: b", "[x", "a # b", "{}"]
)
def test_text_stays_as_it_was_typed(name: str) -> None:
    assert load_config([f"trainer.experiment_name={name}"]).config.trainer.experiment_name == name


def test_values_may_contain_equal_signs_and_refer_to_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", "seven")
    config = load_config(
        [
            "data.system_prompt=a=b",
            "trainer.experiment_name=${oc.env:RUN}",
            "worker.rollout.seed=${data.seed}",
        ]
    ).config
    assert (config.data.system_prompt, config.trainer.experiment_name) == ("a=b", "seven")
    assert config.worker.rollout.seed == config.data.seed


def test_the_checkpoint_folder_is_named_after_the_run() -> None:
    config = load_config(["trainer.project_name=p", "trainer.experiment_name=e"]).config
    assert config.trainer.save_checkpoint_path == "checkpoints/p/e"
    config = load_config(["trainer.save_checkpoint_path=elsewhere"]).config
    assert config.trainer.save_checkpoint_path == "elsewhere"


def test_one_message_names_every_problem(tmp_path: Path) -> None:
    message = refusal(
        config_file(tmp_path, "trainer: {n_nodes: 2}\ndata: {seed: -1}"),
        "worker.rollout.n=0",
        "algorithm.adv_estimator=gpro",
        "worker.rollout.val_override_config=5",
        "trainer.logger=[consol]",
        "--lr=3",
        "nonsense",
        "config=missing.yaml",
    )
    for part in (
        "8 problems",
        "trainer.n_nodes: unknown key; did you mean `trainer.nnodes`?",
        "data.seed=-1: allowed is integer >= 0",
        "worker.rollout.n=0: allowed is integer > 0",
        "algorithm.adv_estimator='gpro': allowed is grpo | dr_grpo",
        "did you mean grpo?",
        "worker.rollout.val_override_config=5: allowed is mapping",
        "did you mean console?",
        "keys have no dashes or plus signs before them; write lr=3",
        "'nonsense' is not key=value",
        "config=missing.yaml: there is no such file",
    ):
        assert part in message.replace("9 problems", "8 problems")
    assert len(message.splitlines()) == 1 + 9


@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("worker.rollout.n=true", "worker.rollout.n=True: allowed is integer > 0"),
        ("worker.rollout.n=1.5", "allowed is integer > 0"),
        ("algorithm.kl_coef=.inf", "allowed is number >= 0"),
        ("algorithm.kl_coef=.nan", "allowed is number >= 0"),
        ("worker.actor.optim.betas=[0.9]", "worker.actor.optim.betas=[0.9]: allowed is list of 2 numbers"),
        ("data=5", "data=5: a section is expected"),
        ("data.train_files=[1, {}]", "allowed is text, or list of text"),
        ("trainer.n_gpus_per_node=-1", "allowed is integer >= 0, or auto"),
        ("data.seed=${nothing}", "data.seed: cannot be resolved"),
        ("data..seed=1", "a part of the key is empty"),
        ("data.seed=" + "[" * 3000, "nested too deeply"),
        ("rollout.n=4", "rollout: unknown key; did you mean `worker.rollout`?"),
        ("=4", "is not key=value"),
        ("+trainer.nnodes=2", "plus signs before them; write trainer.nnodes=2"),
        ("--config", "write config=VALUE"),
        ("run.yaml", "a file is given as config=run.yaml"),
        ("config=", "the name of a YAML file is missing"),
        ("worker.rollout.N=4", "did you mean `worker.rollout.n`?"),
        ("actor_rollout_ref.rollout.n=4", "unknown key; there are data, algorithm, worker, trainer"),
        ("worker.rollout.val_override_config={n: 1, n: 2}", "n is already given"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(argument: str, part: str) -> None:
    assert part in refusal(argument)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("[1, 2]", "sections"),
        ("data:\n  seed: [", "not a YAML file (line 2, column"),
        ("data:\n  seed: 1\n  seed: 2\n", "line 3: seed is already given in line 2"),
        ("worker.rollout.n: 2", "in a file, keys are nested: worker: {rollout: {n: ...}}"),
        ("5", "sections"),
        ("worker: 3", "a section is expected"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str, part: str) -> None:
    assert part in refusal(config_file(tmp_path, content))


def test_a_folder_or_bytes_instead_of_a_file_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(f"config={tmp_path}")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not a YAML file" in refusal(f"config={tmp_path / 'b.yaml'}")


def test_an_empty_file_and_empty_sections_are_the_defaults(tmp_path: Path) -> None:
    assert load_config([config_file(tmp_path, "")]).config == load_config([]).config
    assert load_config([config_file(tmp_path, "data:\nworker:\n  actor:\n")]).config == load_config([]).config


def test_what_is_dumped_loads_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(
        [
            "trainer.experiment_name=1e-6",
            "data.system_prompt=costs \\${5}, on 2024-01-01: yes\n  {{ x }}",
            "worker.actor.optim.lr=1e-6",
            'worker.reward.reward_function_kwargs={"a": [1, {"b": null}], "c": "1e5"}',
            "data.train_files=[a.json, b@c]",
        ]
    ).config
    assert config.data.system_prompt is not None
    assert "${5}" in config.data.system_prompt
    assert load_config([config_file(tmp_path, dump_config(config))]).config == config


def test_keys_and_passwords_are_not_dumped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-from-the-environment")
    config = load_config(
        [
            'worker.reward.reward_function_kwargs={"api_key": "sk-1234567890", "url": "http://me:pw@host/x"}',
            "data.system_prompt=say sk-from-the-environment",
            "data.answer_key=solution",
        ]
    ).config
    for text in (dump_config(config), describe(config)):
        for secret in ("sk-1234567890", "me:pw", "sk-from-the-environment"):
            assert secret not in text
        assert "solution" in text
    assert config.worker.reward.reward_function_kwargs["api_key"] == "sk-1234567890"


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_dumping(text: str) -> None:
    problems: list[str] = []
    written = write_yaml(_escaped({"data": {"system_prompt": text}}))
    assert _resolved(read_yaml(written), problems) == {"data": {"system_prompt": text}}
    assert problems == []


KEYS = [*known_keys(), "config", "trainer.n_nodes", "", "a.b", "data."]
VALUES = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["{}", "[]", "[1,", "{a: 1}", "null", "true", "${data.seed}", "${", "!!set {a}", "*x", "&a [*a]"]
    ),
)


@given(
    st.lists(
        st.one_of(st.text(max_size=12), st.tuples(st.sampled_from(KEYS), VALUES).map("=".join)), max_size=5
    )
)
@settings(max_examples=200, deadline=None)
def test_any_arguments_give_a_configuration_or_a_clear_refusal(args: list[str]) -> None:
    try:
        config = load_config(args).config
    except UserError:
        return
    assert Config.model_validate(config.model_dump()) == config


def test_a_configuration_does_not_change_after_loading() -> None:
    config = load_config(['worker.reward.reward_function_kwargs={"a": [1], "b": {"c": 2}}']).config
    kwargs = config.worker.reward.reward_function_kwargs
    with pytest.raises(ValidationError):
        config.data.seed = 2  # type: ignore[misc]
    for change in (
        lambda: kwargs.update(a=2),
        lambda: kwargs.__setitem__("a", 2),
        lambda: kwargs["a"].append(2),
        lambda: kwargs["b"].pop("c"),
        lambda: Config().worker.rollout.val_override_config.setdefault("n", 2),
    ):
        with pytest.raises(TypeError, match="does not change"):
            change()
    received = pickle.loads(pickle.dumps(kwargs))
    received["a"].append(2)  # what another process receives is its own
    assert kwargs == {"a": [1], "b": {"c": 2}}
    assert copy.deepcopy(config) == config
    thawed(kwargs)["b"]["c"] = 3  # and so is what a library gets
    assert kwargs["b"]["c"] == 2


def test_old_names_are_read_with_a_note_and_win_where_they_come_later(tmp_path: Path) -> None:
    file = config_file(tmp_path, "worker: {actor: {ulysses_size: 1}}\ntrainer: {total_episodes: 3}")
    loaded = load_config(
        [file, "worker.actor.ulysses_sequence_parallel_size=2", "worker.reward.reward_type=batch"]
    )
    assert loaded.config.worker.actor.ulysses_size == 2
    assert loaded.config.trainer.total_epochs == 3
    assert loaded.notes == [
        "trainer.total_episodes is called trainer.total_epochs now",
        "worker.actor.ulysses_sequence_parallel_size is called worker.actor.ulysses_size now",
        "worker.reward.reward_type is not needed any more: the form is read from the reward file",
    ]


def test_an_old_name_may_belong_to_a_section_that_is_not_there() -> None:
    config = load_config(["worker.actor.use_kl_loss=true", "worker.actor.clip_ratio=0.1"]).config
    assert config.algorithm.use_kl_loss is True
    assert (config.worker.actor.clip_ratio_low, config.worker.actor.clip_ratio_high) == (0.1, 0.1)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads_without_a_note(path: Path) -> None:
    loaded = load_config([f"config={path}"])
    assert loaded.notes == []
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert loaded.config.data.rollout_batch_size == given["data"]["rollout_batch_size"]


def test_reading_a_configuration_needs_no_torch() -> None:
    code = (
        "import sys, seerl.config as c; c.load_config([]); c.explain('data'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
