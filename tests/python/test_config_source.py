"""The sources of configurations, and the settings that ``initialize`` requires; no ranks are needed."""

import base64
import json
import sys

import pytest
import strata
import torch
from strata.config_source import document_of, read_config
from tiny_models import config_of, make_model

HJSON = """
# as people write it
train_batch_size: 8
optimizer: {
  type: AdamW
  params: {lr: 0.25, betas: [0.5, 0.75]}
}
zero_optimization: {
  stage: 2   // a comment ends a number
  overlap_comm: true
}
"""


def _digest(source):
    return read_config(source).digest()


def test_hjson_is_read_from_a_file_and_from_text(tmp_path):
    same = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.5, 0.75]}},
            "zero_optimization": {"stage": 2, "overlap_comm": True}}
    path = tmp_path / "config.hjson"
    path.write_text(HJSON, encoding="utf-8")
    assert _digest(path) == _digest(str(path)) == _digest("{" + HJSON + "}") == _digest(same)


def test_json_with_comments_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 8, // comment\n "zero_optimization": {"stage": 1,},}', encoding="utf-8")
    encoded = base64.urlsafe_b64encode(b'{"train_batch_size": 8, "zero_optimization": {"stage": 1}}').decode()
    assert _digest(path) == _digest(encoded)
    assert document_of(path) == document_of(encoded) == {"train_batch_size": 8, "zero_optimization": {"stage": 1}}


def test_the_document_of_a_configuration_is_what_was_written(tmp_path):
    written = {"train_batch_size": 8, "steps_per_print": float("inf"), "zero_optimization": {"stage": 1}}
    assert document_of(written) is written and document_of(json.dumps(written)) == written
    (tmp_path / "config.hjson").write_text(HJSON, encoding="utf-8")
    assert document_of(tmp_path / "config.hjson")["optimizer"]["params"] == {"lr": 0.25, "betas": [0.5, 0.75]}
    with pytest.raises(strata.ConfigError, match="bf16.enabled"):
        document_of('{"bf16": {"enabled": "maybe"}}')


def test_hjson_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = tmp_path / "config.hjson"
    path.write_text(HJSON, encoding="utf-8")
    with pytest.raises(strata.ConfigError, match="is not JSON; correct line 3.*pip install hjson"):
        read_config(path)


@pytest.mark.parametrize("text, words", [
    ("train_batch_size: 8\nzero_optimization: {stage: 2", "is not JSON; correct line 1.*it is not Hjson, either"),
    ("a: 1\na: 2", "a: the key is given twice in the configuration"),
    ("[1, 2", "is not JSON"),
    ("bf16: {enabled: maybe\n}", 'bf16.enabled: wanted true or false .*found "maybe"'),
])
def test_what_is_wrong_is_told(tmp_path, text, words):
    path = tmp_path / "config.hjson"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(strata.ConfigError, match=words):
        read_config(str(path))


def test_a_dict_of_other_objects_is_refused():
    with pytest.raises(strata.ConfigError, match="what JSON cannot say; write numbers and texts: .*object"):
        read_config({"train_batch_size": object()})


def _initialize(config, **arguments):
    engine, *rest = strata.initialize(model=make_model(), config={"train_batch_size": 4, **config}, **arguments)
    engine.destroy()
    return rest


ADAMW = {"type": "AdamW", "params": {"lr": "auto"}}
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}


@pytest.mark.parametrize("config, words", [
    ({"optimizer": ADAMW}, r'optimizer.params.lr: "auto" is filled in by frameworks .*"lr": 0.001'),
    ({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}}, "optimizer.params.momentum: .*torch.optim.SGD"),
    ({"scheduler": DECAY}, "scheduler.params.total_num_steps: .*an integer"),
    ({"gradient_clipping": "auto"}, r'gradient_clipping: .*"gradient_clipping": 1.0'),
    ({"bf16": {"enabled": "auto"}}, r'bf16.enabled: "auto" is filled in by .*"enabled": true'),
    ({"fp16": {"enabled": "auto"}}, r'fp16.enabled: "auto" is filled in by .*"enabled": true'),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": None}}}, "warmup_num_steps: null is no value"),
    ({"optimizer": {"params": {"lr": 1e-3}}}, 'optimizer.type: wanted the optimizer\'s class.*"type": "AdamW"'),
])
def test_initialize_wants_what_nobody_filled_in(config, words):
    with pytest.raises(strata.ConfigError, match=words):
        _initialize(config)


def test_what_a_caller_brings_need_not_be_in_the_configuration():
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    _initialize({"optimizer": ADAMW, "scheduler": DECAY}, optimizer=optimizer, lr_scheduler=scheduler)


def test_init_takes_what_is_not_filled_in_yet():
    model = make_model()
    config = config_of(3, optimizer=False, gradient_clipping="auto", scheduler=DECAY) | {"optimizer": ADAMW}
    strata.zero.Init(module=model, config_dict_or_path=config)
