"""Reading a config: files, bases, overrides, and one clear line for every mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_mhar.config.load import dump_config, flatten, load_config
from megatron_mhar.errors import UserError

RECIPE = """\
model:
  num_layers: 4
  hidden_size: 64
  num_attention_heads: 4
  num_query_groups: 2
  ffn_hidden_size: 128
  vocab_size: 256
data:
  train: [a, b]
  end_of_document: 0
optimizer:
  lr: 5e-4
  warmup_steps: 2
training:
  steps: 10
  global_batch_size: 4
  micro_batch_size: 2
  sequence_length: 16
"""
RUN = """\
base: recipe.yaml
name: run

residual:
  method: mhar
  num_heads: 4
"""
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(write: Write) -> Path:
    write("recipe.yaml", RECIPE)
    return write("run.yaml", RUN)


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_reads_file_over_its_base(run: Path) -> None:
    config = load_config(run)
    assert config.name == "run"
    assert config.model.hidden_size == 64
    assert config.data.train == ("a", "b")
    assert config.optimizer.lr == 5e-4
    assert (config.residual.method, config.residual.num_heads) == ("mhar", 4)


def test_base_list_later_wins_lists_are_replaced(run: Path, write: Write) -> None:
    write("more/other.yaml", "data: {train: [c]}\noptimizer: {lr: 1e-3}\n")
    path = write("more/top.yaml", "optimizer: {beta1: 0.8}\nname: top\nbase: [../run.yaml, other.yaml]\n")
    config = load_config(path)
    assert config.name == "top"
    assert config.data.train == ("c",)
    assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.warmup_steps) == (1e-3, 0.8, 2)
    assert config.residual.num_heads == 4


def test_overrides_win_and_the_last_one_counts(run: Path) -> None:
    config = load_config(
        run,
        ["optimizer.lr=1", "optimizer.lr=2e-3", "data.train=[x]", "residual={num_heads: 2}", "tracking.uri=null",
         "output_dir=/tmp/a=b", "tracking.enabled=false"],
    )  # fmt: skip
    assert config.optimizer.lr == 2e-3
    assert config.data.train == ("x",)
    assert (config.residual.method, config.residual.num_heads) == ("mhar", 2)
    assert config.output_dir == Path("/tmp/a=b")
    assert config.tracking.enabled is False


@pytest.mark.parametrize("text", ["5e-4", "5E-4", "5.e-4", "0.0005", "+5e-4", ".5e-3", "5.0e-4"])
def test_floats_are_numbers_in_every_spelling(run: Path, text: str) -> None:
    assert load_config(run, [f"optimizer.lr={text}"]).optimizer.lr == 5e-4


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["name='5e4'", "data.train=['1e3', 'true', '2001-01-01', 'null', '08', 'a: b', 'ü # ö']", "tracking.uri='~'"],
        ["residual.method=delta_block", "residual.block_layers=2", "residual.null_source=false"],
        ["residual={method: hyper_connections, num_heads: 1, num_streams: 3}"],
        ["residual={method: baseline, num_heads: 1}", "optimizer.eps=1e-300", "optimizer.lr=0.1234567890123456"],
        ["optimizer.schedule=wsd", "optimizer.wsd_decay_steps=3", "data.train_weights=[0.25, 3]"],
    ],
)
def test_dumped_config_loads_to_an_equal_one(run: Path, write: Write, overrides: list[str]) -> None:
    config = load_config(run, overrides)
    text = dump_config(config)
    again = load_config(write("resolved.yaml", text))
    assert again == config
    assert dump_config(again) == text


def test_the_config_of_a_run_made_earlier_loads_with_the_values_that_it_had() -> None:
    """Run folders outlive versions: keys may come and defaults may change, but what is there must mean the same."""
    path = Path(__file__).parent / "kept_run.yaml"
    kept = yaml.safe_load(path.read_text())
    config = load_config(path).model_dump(mode="json")
    kept["training"]["fp8"]["format"] = None  # that of the recipe, which had to be said then
    for section, values in kept.items():
        found = config[section]
        assert (found | values if isinstance(values, dict) else values) == found, section


@pytest.mark.parametrize(
    ("given", "kept", "format"),
    [
        ([], None, "hybrid"),
        (["precision=fp8"], None, "hybrid"),
        (["fp8.format=hybrid"], None, "hybrid"),  # as dumps of bf16 runs once had it
        (["precision=fp8", "fp8.format=e4m3"], "e4m3", "e4m3"),
        (["precision=fp8", "fp8.recipe=delayed"], None, "hybrid"),
        (["precision=fp8", "fp8.recipe=blockwise"], None, "e4m3"),
        (["precision=fp8", "fp8.recipe=mxfp8", "fp8.format=null"], None, "e4m3"),
        (["precision=fp8", "fp8.recipe=blockwise", "fp8.format=e4m3"], None, "e4m3"),
        (["precision=fp8", "fp8.recipe=blockwise", "fp8.format=hybrid"], "hybrid", "hybrid"),
    ],
)
def test_the_format_of_a_recipe_is_as_good_as_none(run: Path, given: list[str], kept: str | None, format: str) -> None:
    """A run goes on with either, and another recipe brings its own."""
    sizes = ["model.hidden_size=128", "model.vocab_size=256"]
    config = load_config(run, [*sizes, *(f"training.{override}" for override in given)])
    assert flatten(config)["training.fp8.format"] == kept
    assert config.training.fp8.resolved_format == format


def test_dump_has_every_key(run: Path) -> None:
    config = load_config(run)
    dumped = yaml.safe_load(dump_config(config))
    assert dumped["checkpoint"] == {"interval": 1000, "keep": 2, "keep_every": None, "asynchronous": False}
    assert dumped["model"]["head_dim"] is None
    assert dumped["output_dir"] == "runs"
    assert set(dumped) == set(type(config).model_fields)
    for section in ("model", "residual", "data", "optimizer", "training", "parallel", "evaluation", "tracking"):
        assert set(dumped[section]) == set(type(getattr(config, section)).model_fields)


def test_flatten_gives_dotted_paths(run: Path) -> None:
    flat = flatten(load_config(run))
    assert flat["name"] == "run"
    assert flat["optimizer.lr"] == 5e-4
    assert flat["data.train"] == ["a", "b"]
    assert flat["model.head_dim"] is None
    assert "model" not in flat


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("optimizer.lrr=1", "optimizer.lr"),
        ("lr=1", "optimizer.lr"),
        ("optimizer.z_los=1", "optimizer.z_loss"),
        ("residual.num_head=3", "residual.num_heads"),
        ("model.num_heads=3", "residual.num_heads"),
        ("train.steps=3", "training"),
        ("modle.hidden_size=3", "model"),
        ("training.learning_rate_warmup=3", None),
        ("zzz=1", None),
    ],
)
def test_unknown_key_names_the_nearest(run: Path, given: str, meant: str | None) -> None:
    text = message(run, given)
    assert text.startswith(f"command line: {given}: ")
    assert "unknown key; " in text
    if meant is None:
        assert "did you mean" not in text
        assert "allowed" in text
    else:
        assert text.endswith(f"did you mean {meant}?")


def test_unknown_key_in_a_file_names_file_and_line(run: Path, write: Write) -> None:
    write("recipe.yaml", RECIPE.replace("  warmup_steps: 2", "  warmup_step: 2"))
    expected = f"{run.parent / 'recipe.yaml'}:13: optimizer.warmup_step: unknown key; did you mean "
    assert message(run) == expected + "optimizer.warmup_steps?"


@pytest.mark.parametrize(
    ("override", "rest"),
    [
        ("residual.num_heads=true", "true given, but it must be a whole number"),
        ("residual.num_heads=8.0", "8.0 given, but it must be a whole number"),
        ("residual.num_heads='8'", '"8" given, but it must be a whole number'),
        ("residual.num_heads=0", "0 given, but it must be greater than or equal to 1"),
        ("residual.num_heads=3",
         "3 given, but it must divide hidden_size 64; allowed up to 64: 1, 2, 4, 8, 16, 32, 64"),
        ("residual.method=mhr", "\"mhr\" given, but it must be 'baseline', 'attnres', 'mhar', 'attnres_block', "
         "'mhar_block', 'delta', 'delta_block' or 'hyper_connections'"),
        ("training.precision=fp16", "\"fp16\" given, but it must be 'bf16', 'fp32' or 'fp8'"),
        ("training.steps=null", "null given, but it must be a whole number"),
        ("optimizer.lr=fast", '"fast" given, but it must be a number'),
        ("optimizer.lr=true", "true given, but it must be a number"),
        ("optimizer.lr=.inf", "Infinity given, but it must be a finite number"),
        ("optimizer.lr=.nan", "NaN given, but it must be a finite number"),
        ("optimizer.beta1=1", "1 given, but it must be less than 1"),
        ("optimizer.min_lr=1", "1.0 given, but it must not exceed lr 0.0005"),
        ("optimizer=3", "3 given, but it must be a section of keys"),
        ("optimizer=null", "null given, but it must be a section of keys"),
        ("tracking.enabled=1", "1 given, but it must be true or false"),
        ("data.train=x", '"x" given, but it must be a list'),
        ("data.train=[]", "[] given, but it needs at least 1"),
        ("data.train=[a, 3]", "data.train.1: 3 given, but it must be text"),
        ("name=5", "5 given, but it must be text"),
        ("name=../x", "'../x' given; allowed: letters, digits, '.', '_' and '-'"),
        ("name", "an override is written dot.path=value, for example optimizer.lr=5e-4"),
        ("=3", "an override is written dot.path=value, for example optimizer.lr=5e-4"),
        ("a..b=3", "an override is written dot.path=value, for example optimizer.lr=5e-4"),
        ("name=", "no value given; nothing at all is written name=null"),
        ("optimizer.lr={", "not YAML: while parsing a flow node, expected the node content, but found '<stream end>'"),
        ("optimizer.lr=*a", "not YAML: aliases (*name) are not supported"),
        ("optimizer.lr=!!int abc", "invalid literal for int() with base 10: 'abc'"),
    ],
)  # fmt: skip
def test_wrong_override_in_one_line(run: Path, override: str, rest: str) -> None:
    assert message(run, override) == f"command line: {override}: {rest}"


def test_only_plain_data_is_read(run: Path) -> None:
    assert "not YAML: could not determine a constructor" in message(run, "name=!!python/object/apply:os.getcwd []")
    assert "is not supported" in message(run, "optimizer=!!python/object:int {lr: 1}")


def test_a_check_of_one_key_against_another_names_the_key(run: Path) -> None:
    text = message(run, "training.steps=2")
    assert text == (
        f"{run.parent / 'recipe.yaml'}:13: optimizer.warmup_steps: 2 given, but the schedule ends at step 2"
    )


def test_a_missing_key_names_its_section_and_meaning(run: Path, write: Write) -> None:
    assert message(run, "residual.method=mhar_block") == (
        f"{run}:4: residual.block_layers: missing: mhar_block needs the number of transformer layers in a block"
    )
    write("recipe.yaml", RECIPE.replace("  ffn_hidden_size: 128\n", ""))
    assert message(run) == (
        f"{run.parent / 'recipe.yaml'}:1: model.ffn_hidden_size: missing, and it has no default (SwiGLU inner width)"
    )
    alone = write("alone.yaml", RECIPE)
    assert message(alone) == f"{alone}: name: missing, and it has no default (folder of the run below output_dir)"


def test_every_mistake_gets_a_line(run: Path) -> None:
    lines = message(run, "optimizer.lr=x", "residual.num_head=2", "training.steps=0").splitlines()
    assert lines[0] == "3 mistakes in the config:"
    assert len(lines) == 4
    for key in ("optimizer.lr=x", "residual.num_head=2", "training.steps=0"):
        assert sum(line.startswith(f"  command line: {key}: ") for line in lines) == 1


def test_base_circle_is_refused(write: Write) -> None:
    first = write("first.yaml", "base: second.yaml\n")
    second = write("second.yaml", f"name: x\nbase: ../{first.parent.name}/first.yaml\n")
    text = message(first)
    assert text.startswith(f"{second}:2: base: ../{first.parent.name}/first.yaml leads back to itself: ")
    assert text.count("first.yaml") == 3


def test_one_base_may_be_reached_twice(run: Path, write: Write) -> None:
    write("left.yaml", "base: recipe.yaml\noptimizer: {lr: 1e-3}\n")
    path = write("both.yaml", "base: [left.yaml, run.yaml]\n")
    assert load_config(path).optimizer.lr == 5e-4


@pytest.mark.parametrize("value", ["3", "[]", "[1]", "{a: b}"])
def test_base_must_be_file_names(write: Write, value: str) -> None:
    path = write("x.yaml", f"name: x\nbase: {value}\n")
    assert message(path).endswith("given, but it must be a file name or a list of file names")
    assert message(path).startswith(f"{path}:2: base: ")


def test_files_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    missing = tmp_path / "none.yaml"
    assert message(missing) == f"{missing}: no such config file"
    child = write("child.yaml", "base: none.yaml\n")
    assert message(child) == f"{missing}: no such config file (base of {child})"
    assert message(tmp_path).startswith(f"{tmp_path}: cannot read the config file: ")
    empty = write("empty.yaml", "# nothing\n")
    assert message(empty) == f"{empty}: nothing given, but a config file holds sections of keys"
    scalar = write("scalar.yaml", "\n- a\n")
    assert message(scalar) == f'{scalar}:2: ["a"] given, but a config file holds sections of keys'
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe")
    assert message(binary) == f"{binary}: not YAML: no UTF-8 text (byte 6)"
    control = write("control.yaml", "name: \x00\n")
    assert message(control).startswith(f"{control}: not YAML: unacceptable character #x0000")


def test_yaml_mistakes_name_the_line(write: Write) -> None:
    twice = write("twice.yaml", "name: x\nmodel:\n  num_layers: 1\n  num_layers: 2\n")
    assert message(twice) == f"{twice}:4: num_layers: given twice, the first time at {twice}:3"
    tab = write("tab.yaml", "name: x\nmodel:\n\tnum_layers: 1\n")
    assert message(tab).startswith(f"{tab}:3: not YAML: ")
    number = write("number.yaml", "name: x\n? [a]\n: 3\n")
    assert message(number) == f"{number}:2: a key must be a name"
    two = write("two.yaml", "name: x\n---\nname: y\n")
    assert message(two).startswith(f"{two}:2: not YAML: ")


def test_deep_nesting_is_an_error_not_a_crash(write: Write) -> None:
    path = write("deep.yaml", "name: " + "[" * 5000 + "]" * 5000 + "\n")
    assert message(path).startswith(f"{path}: not YAML: ")


def test_home_folder_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(
        Path(__file__).parents[2] / "configs/demo/mhar.yaml", ["output_dir=~/runs", "data.train=[~/corpus/train]"]
    )
    assert config.output_dir == tmp_path / "runs"
    assert config.data.train == (f"{tmp_path}/corpus/train",)
