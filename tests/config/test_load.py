"""The configuration in and out: files, overrides, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config import Config, ModelConfig, load_config, save_config
from lockstep.config.names import OTHERWISE, fields
from lockstep.errors import LockstepError


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(*overrides: str, path: Path | None = None) -> str:
    with pytest.raises(LockstepError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)


def test_without_a_file_every_key_has_a_default():
    assert load_config() == Config()


def test_a_file_sets_values_and_an_override_goes_over_them(tmp_path):
    path = written(tmp_path, "train: {steps: 7, seed: 3}\noptimizer:\n  lr: 1e-3\n")
    config = load_config(path, ["train.steps=8", "train.steps=9"])
    assert (config.train.steps, config.train.seed, config.optimizer.lr) == (9, 3, 1e-3)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_a_mistake(tmp_path, text):
    with pytest.raises(LockstepError, match="is empty: write what differs from the defaults, or leave the file out"):
        load_config(written(tmp_path, text))
    assert load_config(written(tmp_path, "{}")) == Config()


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "0.001", ".001", "1.0e-03", "+1e-3"])
def test_every_spelling_of_a_number_is_a_number(tmp_path, number):
    assert load_config(written(tmp_path, f"optimizer: {{lr: {number}}}")).optimizer.lr == 1e-3
    assert load_config(None, [f"optimizer.lr={number}"]).optimizer.lr == 1e-3


def test_a_whole_number_stands_for_a_float():
    lr = load_config(None, ["optimizer.lr=1"]).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


def test_a_number_is_text_where_only_text_fits():
    assert load_config(None, ["train.out=2024", "model=7"]).train.out == "2024"
    assert load_config(None, ["model=7"]).model == "7"


def test_override_values_are_scalars_lists_and_mappings():
    config = load_config(
        None, ['data.sources=["a b", c]', "data.tokenizer=null", "data.text_field=a: b #c", "lora={rank: 4}"]
    )
    assert config.data.sources == ["a b", "c"]
    assert config.data.tokenizer is None
    assert config.data.text_field == "a: b #c"
    assert config.lora.rank == 4


def test_a_model_is_a_name_or_a_shape(tmp_path):
    assert load_config(written(tmp_path, "model: smollm2-135m")).model == "smollm2-135m"
    shape = load_config(None, ["model.num_layers=2", "model.num_heads=8"]).model
    assert isinstance(shape, ModelConfig)
    assert (shape.num_layers, shape.num_heads, shape.head_dim) == (2, 8, 32)


def test_a_key_below_a_single_value_is_refused(tmp_path):
    told = complaint("model.num_layers=2", path=written(tmp_path, "model: smollm2-135m"))
    assert "`model` is 'smollm2-135m'" in told


def test_a_section_that_is_null_can_be_set_below():
    shape = load_config(None, ["model.rope_scaling.kind=linear", "model.rope_scaling.factor=2"]).model
    assert isinstance(shape, ModelConfig)
    assert shape.rope_scaling is not None
    assert shape.rope_scaling.factor == 2.0


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train.stpes", "train.steps"),
        ("trian.steps", "train"),
        ("seq_len", "data.seq_len"),
        ("train.lr", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("batch_size", "train.micro_batch"),
        ("model.hidden_sise", "model.hidden_size"),
        ("model.rope_scaling.factr", "model.rope_scaling.factor"),
        ("serve.prot", "serve.port"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, near):
    told = complaint(f"{key}=1")
    assert "unknown key" in told
    assert f"`{near}`" in told


def test_a_key_like_nothing_still_names_what_there_is():
    told = complaint("train.zzzzqqq=1")
    assert "the nearest is `" in told
    assert "steps, micro_batch" in told


def test_other_tools_names_lead_to_keys_that_exist():
    assert set(OTHERWISE.values()) <= {name for name, _ in fields(Config)}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.steps=many", '`train.steps` is "many": expected a whole number'),
        ("train.steps=1.5", "`train.steps` is 1.5: expected a whole number"),
        ("train.steps=true", "`train.steps` is true: expected a whole number"),
        ("train.export=yes", '`train.export` is "yes": expected true or false'),
        ("train.export=1", "`train.export` is 1: expected true or false"),
        ("optimizer.lr=fast", '`optimizer.lr` is "fast": expected a number'),
        ("optimizer.lr=.inf", "`optimizer.lr` is Infinity: it should be a finite number"),
        ("optimizer.lr=.nan", "`optimizer.lr` is NaN: it should be a finite number"),
        ("train.dtype=fp8", '`train.dtype` is "fp8": expected one of "bfloat16", "float32"'),
        ("train.steps=0", "`train.steps` is 0: it should be greater than 0"),
        ("data.sources=x", '`data.sources` is "x": expected a list (each text)'),
        ("data.sources=[1]", "`data.sources[0]` is 1: it should be a valid string"),
        ("train=3", "`train` is 3: expected a mapping"),
        ("train.steps.x=3", '`train.steps` is the mapping {"x": 3}: expected a whole number'),
        ("model.rope_scaling=8", "`model.rope_scaling` is 8: expected a mapping, or null"),
        ("model.rope_scaling.factor=8", "`model.rope_scaling.kind` is missing"),
        ("model.num_heads=3", "set head_dim"),
        ("serve.kv_memory=lots", "'lots' is not a size"),
    ],
)
def test_a_wrong_value_is_told_with_key_value_and_expectation(override, told):
    text = complaint(override)
    assert told in text
    assert "mistakes" not in text


def test_more_dense_layers_than_layers_are_refused():
    told = complaint("model.num_experts=4", "model.experts_per_token=2", "model.num_layers=4", "model.dense_layers=9")
    assert "dense_layers 9 is more than the num_layers 4 there are" in told


def test_a_list_is_told_how_it_is_written():
    assert '; write lora.targets: ["q_proj", "v_proj"]\n' in complaint("lora.targets=q_proj, v_proj")
    assert "`data.sources` is the list []: it should have at least 1 item\n" in complaint("data.sources=[]")


def test_a_file_with_a_number_for_text_is_told_to_quote_it(tmp_path):
    assert 'write train.out: "3"' in complaint(path=written(tmp_path, "train: {out: 3}"))


def test_all_mistakes_are_told_at_once():
    told = complaint("train.steps=a", "optimizer.lr=b", "lora.rank=-1")
    assert all(key in told for key in ("3 mistakes", "train.steps", "optimizer.lr", "lora.rank"))


@pytest.mark.parametrize("override", ["train", "=3", "train..steps=1", ".=1", ""])
def test_an_override_without_key_or_value_is_refused(override):
    assert "expected KEY=VALUE" in complaint(override)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train:\n  steps: 1\n  steps: 2\n", "line 3"),
        ("train: {steps: 1}\ntrain: {seed: 1}\n", "'train' stands here and in line 1"),
        ("train: [\n", "not valid YAML"),
        ("a: b: c\n", "line 1"),
        ("- 1\n", "expected a mapping"),
        ("train:\n  3: 4\n", "3 is not a name"),
        ("data: {sources: &a [*a]}\n", "not valid YAML"),
        ("data: {sources: !!set {a, b}}\n", "not valid YAML"),
        ("--- \na: 1\n---\nb: 2\n", "not valid YAML"),
        ("x: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("x: \x00\n", "not valid YAML"),
    ],
)
def test_a_broken_file_is_told_with_its_place(tmp_path, text, told):
    path = written(tmp_path, text)
    assert told in complaint(path=path)
    assert str(path) in complaint(path=path)


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    assert "there is no configuration file" in complaint(path=tmp_path / "none.yaml")
    assert "cannot read" in complaint(path=tmp_path)
    (tmp_path / "run.yaml").write_bytes(b"model: \xff\xfe")
    assert "byte 7 is not UTF-8" in complaint(path=tmp_path / "run.yaml")


def test_a_plan_is_no_configuration(tmp_path):
    path = written(tmp_path, "plan: 1\nmodel: {}\nlayout: {pp: 2}\n")
    assert "is a plan, as `lockstep plan` writes it, and no configuration: give it as --plan" in complaint(path=path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(LockstepError, match="cannot write the configuration"):
        save_config(Config(), tmp_path / "none" / "run.yaml")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"train": {"step": 3}}, "Config: unknown key `train.step`: did you mean `train.steps`?"),
        ({"train": {"steps": "x"}}, '`train.steps` is "x": expected a whole number'),
        ({"train": {"steps": object}}, "`train.steps` is \"<class 'object'>\": expected a whole number"),
        ({"train": 3}, "`train` is 3: expected a mapping"),
    ],
)
def test_python_code_is_answered_as_a_file_is(given, told):
    with pytest.raises(LockstepError) as error:
        Config(**given)
    assert told in str(error.value)
    assert Config(train={"out": Path("here")}).train.out == "here"
