"""What is refused before anything is loaded, and what is only a note away from the training machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seerl.config import Config, check_config, check_or_raise, describe, load_config, surroundings
from seerl.config.checks import NOT_YET
from seerl.config.keys import accepts, known_keys
from seerl.errors import UserError


@pytest.fixture
def sound(tmp_path: Path) -> list[str]:
    """Arguments that pass every check here, on the CPU, with a model whose shapes are known."""
    shapes = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(shapes))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    return [
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        f"worker.actor.model.model_path={tmp_path / 'model'}",
        "worker.rollout.n=4",
        "worker.rollout.name=transformers",
        "trainer.n_gpus_per_node=0",
    ]


def errors(args: list[str], *, here: bool = True) -> list[str]:
    return check_config(load_config(args).config, here=here, extra_checks=[]).errors


def notes(args: list[str]) -> list[str]:
    return check_config(load_config(args).config, here=False, extra_checks=[]).notes


def test_a_sound_configuration_has_no_findings(sound: list[str]) -> None:
    report = check_config(load_config(sound).config, here=False, extra_checks=[])
    assert (report.errors, report.notes) == ([], [])
    check_or_raise(load_config(sound).config)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["data.rollout_batch_size=6", "worker.actor.global_batch_size=4"], ["3 and 6"]),
        (["data.rollout_batch_size=2", "worker.actor.global_batch_size=4"], ["the nearest that does: 2"]),
        (["worker.rollout.n=1"], ["worker.rollout.n=1", "2 or more"]),
        (["worker.rollout.max_model_len=1000"], ["= 1024", "worker.rollout.max_model_len=1000"]),
        (["data.max_response_length=5000"], ["the model's context of 4096"]),
        (["data.min_pixels=9", "data.max_pixels=8"], ["data.min_pixels=9"]),
        (["algorithm.filter_low=1", "algorithm.filter_high=0"], ["filter_low=1.0", "filter_high=0.0"]),
        (["algorithm.kl_type=adaptive", "algorithm.kl_target=0"], ["kl_target above 0"]),
        (["algorithm.kl_type=adaptive", "algorithm.kl_horizon=409"], ["kl_horizon=409.0", "2048 responses"]),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.disable_kl=true",
                "worker.reward.reward_function=math",
            ],
            ["worker.reward.reward_function a list"],
        ),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "worker.reward.reward_function=[{function: math}, {function: count, weight: 0.5}]",
            ],
            ["algorithm.use_kl_loss=true or algorithm.disable_kl=true"],
        ),
        (["worker.rollout.temperature=0"], ["temperature=0"]),
        (["worker.rollout.val_override_config={best_of: 3}"], ["best_of: unknown key", "top_p"]),
        (["worker.rollout.val_override_config={n: 0}"], ["val_override_config.n=0", "integer > 0"]),
        (["worker.rollout.val_override_config={top_p: high}"], ["top_p='high'", "number > 0 and <= 1"]),
        (["data.val_batch_size=0"], ["data.val_batch_size=0"]),
        (["trainer.val_only=true"], ["data.val_files"]),
        (["data.train_files="], ["data.train_files is empty"]),
        (["worker.actor.model.model_path=null"], ["model_path is not set"]),
        (["data.mini_rollout_batch_size=1024"], ["online_filtering"]),
        (["data.train_files=rows/none.parquet"], ["data.train_files=rows/none.parquet", "looked in"]),
        (["data.train_files=a/b@train,rows/none.json*2"], ["data.train_files=rows/none.json"]),
        (["data.image_dir=no/such"], ["data.image_dir=no/such", "folder"]),
        (["trainer.load_checkpoint_path=no/such"], ["trainer.load_checkpoint_path=no/such"]),
        (["worker.actor.model.model_path=./no/such"], ["model_path=./no/such", "hub id"]),
        (["trainer.critic_warmup=5"], ["trainer.critic_warmup=5", "no critic"]),
        (["data.image_dir=~no-such-user/x"], ["data.image_dir=~no-such-user/x", "folder"]),
        (["data.image_dir=" + "x" * 5000], ["data.image_dir=xxx", "folder"]),
        (["data.format_prompt=no.jinja"], ["data.format_prompt=no.jinja", "no such file"]),
    ],
)
def test_what_holds_nowhere_is_an_error_everywhere(
    sound: list[str], args: list[str], parts: list[str]
) -> None:
    for here in (True, False):
        found = errors([*sound, *args], here=here)
        assert len(found) == 1
        assert all(part in found[0] for part in parts)


@pytest.mark.parametrize(
    ("args", "key", "nearest"),
    [
        (
            ["data.rollout_batch_size=512", "worker.actor.global_batch_size=128"],
            "data.rollout_batch_size=512",
            "510 and 516",
        ),
        (
            ["data.rollout_batch_size=512", "worker.actor.global_batch_size=128"],
            "worker.actor.global_batch_size=128",
            "126 and 132",
        ),
        (["worker.rollout.tensor_parallel_size=4"], "tensor_parallel_size=4", "3 and 6"),
        (["worker.actor.ulysses_size=4"], "ulysses_size=4", "3 and 6"),
    ],
)
def test_six_devices_are_told_the_nearest_legal_values(
    sound: list[str], args: list[str], key: str, nearest: str
) -> None:
    found = [e for e in errors([*sound, "trainer.n_gpus_per_node=6", *args], here=False) if key in e]
    assert len(found) == 1
    assert nearest in found[0]


def test_what_only_this_machine_lacks_is_a_note_elsewhere(sound: list[str]) -> None:
    lacking = [
        *sound,
        "trainer.n_gpus_per_node=1",
        "data.image_dir=/mnt/no/such",
        "data.val_files=/mnt/no/such.parquet",
        "worker.actor.model.tokenizer_path=/mnt/no/such",
    ]
    assert errors(lacking, here=False) == []
    assert len(notes(lacking)) == len(errors(lacking)) >= 3


def test_a_missing_file_is_told_with_its_nearest_neighbour(sound: list[str], tmp_path: Path) -> None:
    (tmp_path / "math.jinja").write_text("{{ content }}")
    found = errors([*sound, f"data.format_prompt={tmp_path / 'math_format.jinja'}"])
    assert f"did you mean {tmp_path / 'math.jinja'}?" in found[0]


def test_a_package_that_is_not_installed_is_missed_before_anything_is_loaded(
    sound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "find_spec", lambda _: None)
    args = [*sound, "trainer.logger=[console,file,wandb]", "worker.rollout.name=vllm"]
    found = errors(args)
    assert len(found) == 2
    assert "pip install 'seerl[wandb]'" in found[0]
    assert "vLLM is not installed" in found[1]
    assert errors(args, here=False) == []
    assert notes(args) == found


def test_checkpoints_need_a_folder(sound: list[str], tmp_path: Path) -> None:
    assert errors([*sound, f"trainer.save_checkpoint_path={tmp_path / 'new' / 'run'}"]) == []
    found = errors([*sound, f"trainer.save_checkpoint_path={tmp_path / 'rows.jsonl' / 'run'}"])
    assert len(found) == 1
    assert "is a file, not a folder" in found[0]


def test_vllm_leaves_the_policy_its_memory() -> None:
    gib = 2.0**30
    assert list(surroundings.share_finding(0.6, 20 * gib, "a GPU", 80 * gib)) == []
    (found,) = surroundings.share_finding(0.6, 40 * gib, "a GPU", 80 * gib)
    assert "gpu_memory_utilization=0.6" in found.text
    assert "set it to 0.5 or less" in found.text


def test_nearest_divisors_of_a_huge_batch_are_found_at_once(sound: list[str]) -> None:
    found = errors([*sound, "data.rollout_batch_size=1000000000000", "worker.actor.global_batch_size=3"])
    assert "the nearest that do: 2 and 4" in found[0]


def test_hub_ids_are_notes_elsewhere_and_left_to_loading_here(sound: list[str]) -> None:
    hub = [
        *sound,
        "data.train_files=org/rows@train[:90%],org/more*0.5",
        "worker.actor.model.model_path=org/model",
    ]
    assert errors(hub) == []
    assert len(notes(hub)) == 3


UNSUPPORTED = {
    "algorithm.adv_estimator": "remax",
    "algorithm.kl_penalty": "full",
    "algorithm.adv_scale": "batch",
    "algorithm.entropy_top_share": "0.2",
    "algorithm.off_policy_mask": "0.1",
    "algorithm.unbiased_kl": "true",
    "algorithm.mask_truncated": "true",
    "algorithm.entropy_target": "0.2",
    "algorithm.ref_sync_steps": "10",
    "worker.actor.loss_type": "vespo",
    "worker.actor.model.lora.rank": "8",
    "worker.actor.ulysses_size": "2",
    "trainer.nnodes": "2",
    "trainer.n_gpus_per_node": "2",
    "trainer.ray_timeline": "t.json",
}


def test_the_table_of_what_is_not_done_yet_names_real_keys_and_allows_their_defaults() -> None:
    assert set(UNSUPPORTED) == {key for key, _, _ in NOT_YET}
    for key, unsupported, _ in NOT_YET:
        assert not unsupported(known_keys()[key].default)


@pytest.mark.parametrize("key", [key for key, _, _ in NOT_YET])
def test_what_is_not_done_yet_is_refused_in_training_and_a_note_in_a_check(
    sound: list[str], key: str
) -> None:
    args = [*sound, f"{key}={UNSUPPORTED[key]}"]
    with pytest.raises(UserError, match=f"{key}={UNSUPPORTED[key]}".replace("true", "True")):
        check_or_raise(load_config(args).config)
    assert errors(args, here=False) == []
    assert sum(note.startswith(f"{key}=") and "this version" in note for note in notes(args)) == 1


@pytest.mark.parametrize("cut", ["worker.rollout.top_p=0.9", "worker.rollout.top_k=20"])
def test_rollout_correction_needs_untruncated_probabilities(sound: list[str], cut: str) -> None:
    args = [*sound, "algorithm.rollout_correction=tis", cut]
    assert errors(args) == []
    found = errors([*args, "worker.rollout.name=vllm"])
    assert len(found) == 1
    assert "before truncation" in found[0]
    assert errors([*args, "worker.rollout.name=vllm", "algorithm.rollout_correction=none"]) == []


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ content }", "does not render"),
        ("{% for x in 5 %}{{ content }}{% endfor %}", "does not render"),
        ("Answer the question.", "every prompt would be the same"),
        ("{{ content | upper }}", None),
        ("{{ question.text }} {{ content }}", None),
    ],
)
def test_a_prompt_template_is_rendered_once(
    sound: list[str], tmp_path: Path, template: str, part: str | None
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    found = errors([*sound, f"data.format_prompt={tmp_path / 't.jinja'}"])
    assert len(found) == (part is not None)
    assert part is None or part in found[0]


def test_a_chat_template_with_generation_tags_is_sound(sound: list[str], tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{%- generation -%}{{ m }}{% endgeneration %}{% endfor %}")
    assert errors([*sound, f"data.override_chat_template={path}"]) == []
    path.write_text("{% for m in messages %}")
    assert "does not render" in errors([*sound, f"data.override_chat_template={path}"])[0]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "\xff", '{"model_type": "x", "hidden_size": "big", "text_config": 3, "vision_config": []}'],
)
def test_a_strange_model_config_breaks_nothing(sound: list[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "model" / "config.json").write_bytes(text.encode("latin-1"))
    found = errors(sound)
    assert all("has no readable config.json" in error for error in found)


def test_a_model_that_does_not_fit_is_refused_with_the_key_to_change(
    sound: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "model" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "hidden_size": 100_000, "num_hidden_layers": 99})
    )
    found = errors(sound)
    assert len(found) == 1
    assert "GiB" in found[0]
    assert "worker.actor.optim.strategy=adamw_bf16" in found[0]


def test_a_folder_that_is_no_whole_model_is_an_error_everywhere(sound: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    assert any("no weights" in error for error in errors(sound, here=False))
    (tmp_path / "model" / "config.json").write_text("{}")
    assert any("names no model_type" in error for error in errors(sound, here=False))
    file = f"worker.actor.model.model_path={tmp_path / 'rows.jsonl'}"
    assert errors([*sound, file], here=False) == [f"{file}: a file, where a folder is needed"]


@pytest.mark.parametrize("name", ["/abs", "a/../../b", "a\nb"])
def test_names_stay_below_the_place_of_all_runs(sound: list[str], name: str) -> None:
    assert any("trainer.experiment_name" in e for e in errors([*sound, f"trainer.experiment_name={name}"]))


def test_what_has_no_effect_is_said(sound: list[str]) -> None:
    assert notes(sound) == []
    told = notes([*sound, "worker.actor.offload.offload_params=true"])
    assert len(told) == 1
    assert "worker.actor.offload.offload_params=true has no effect" in told[0]


def test_every_finding_is_in_the_one_error(sound: list[str]) -> None:
    config = load_config([*sound, "worker.rollout.n=1", "trainer.nnodes=2", "data.min_pixels=9999999"]).config
    with pytest.raises(UserError) as caught:
        check_or_raise(config, extra_checks=[lambda _: ["and a reward that is not there"]])
    assert len(str(caught.value).splitlines()) >= 4
    assert "and a reward that is not there" in str(caught.value)


def test_checks_can_be_made_of_any_configuration() -> None:
    assert check_config(Config(), here=False, extra_checks=[]).errors


PLACES = [
    key for key, field in known_keys().items() if "path" in key or "files" in key or accepts(field, str)
]
NAMES = st.sampled_from(
    ["", "~", "~no-such-user/x", "/", "/dev/null", "@", "a@b@c*3", "*2", ",", "[]", "[a, b]", "x" * 5000]
)
SHAPES: st.SearchStrategy[dict[str, object]] = st.dictionaries(
    st.sampled_from(["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "text_config"]),
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just({})),
)


@given(st.dictionaries(st.sampled_from(PLACES), st.one_of(NAMES, st.text(max_size=8)), max_size=4), SHAPES)
@settings(max_examples=60, deadline=None)
def test_strange_names_and_shapes_are_findings_and_never_break_a_check(
    places: dict[str, str], shapes: dict[str, object]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shapes))
        args = [f"worker.actor.model.model_path={folder}", "worker.rollout.n=2", "trainer.n_gpus_per_node=0"]
        try:
            config = load_config([*args, *(f"{key}={value}" for key, value in places.items())]).config
        except UserError:
            return
        strict = check_config(config, here=True).errors
        assert set(check_config(config, here=False).errors) <= set(strict)
        assert "Memory per device" in describe(config)
