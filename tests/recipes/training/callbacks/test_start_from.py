"""Start from the weights of another network, completely or block by block if that network was shallower."""

import re

import pytest

from recipes.networks.resnet import ResNet
from recipes.training.build import build
from recipes.training.callbacks.start_from import sources_of
from tests.recipes.composed import composed
from tests.recipes.training.test_recipes import NO_FILES, QUIET
from tests.scenes import at, same
from tests.toy import weights

START = "callbacks=[default,start_from] callbacks.start_from.path="
SMALL = "model=alexnet_bn model.width=0.0625 trainer.max_steps=1 trainer.devices=1 trainer.limit_val_batches=0"
# A checkpoint is read as soon as it is written.
AT_ONCE = "strategy.checkpoint_io.in_background=false"


def first_weights(trainer, module):
    return weights(module)


def begun(*overrides, ckpt_path=None, save_to=None):
    """Train one step and return the weights before and after it."""
    words = [*QUIET, *NO_FILES, *SMALL.split(), AT_ONCE, "trainer.accelerator=cpu", *overrides]
    trainer, module, data = build(composed("train", *words))
    looks = at(on_train_start=first_weights)
    trainer.callbacks.append(looks)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return looks.kept["on_train_start"][0], module.state_dict()


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_a_fit_starts_from_the_weights_of_another_and_a_resumed_one_from_its_own(
    precision, tmp_path
):
    source_path = str(tmp_path / "source.ckpt")
    _, source = begun(f"precision={precision}", save_to=source_path)
    words = (
        f"precision={precision}",
        "seed=1",
        "callbacks=[default,start_from]",
        f"callbacks.start_from.path={source_path}",
    )
    path = str(tmp_path / "one_step.ckpt")
    at_start, after_one_step = begun(*words, save_to=path)
    assert same(at_start, source)
    assert not same(after_one_step, source)
    at_resume, _ = begun(*words, "trainer.max_steps=2", ckpt_path=path)
    assert same(at_resume, after_one_step)


def test_blocks_of_bert_of_3_layers_go_round_in_one_of_12():
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 60, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}

    def weights_of_bert(num_layers):
        config = transformers.BertConfig(num_hidden_layers=num_layers, **small)
        return transformers.BertForMaskedLM(config).state_dict()

    deep = weights_of_bert(12)
    sources = sources_of(deep, weights_of_bert(3))
    assert sources.keys() == deep.keys()
    for name, source in sources.items():
        if match := re.fullmatch(r"bert\.encoder\.layer\.(\d+)\.(.*)", name):
            assert source == f"bert.encoder.layer.{int(match[1]) % 3}.{match[2]}"
        else:
            assert source == name


def test_resnet_50_takes_what_has_the_shape_of_resnet_18():
    """A bottleneck gets the 3x3 convolution and the statistics of its width. Its 1x1 convolutions are initialized."""
    deep = ResNet(depth=50, num_classes=10).state_dict()
    shallow = ResNet(depth=18, num_classes=10).state_dict()
    sources = sources_of(deep, shallow)
    for name, source in sources.items():
        assert deep[name].shape == shallow[source].shape
    assert sources["conv1.weight"] == "conv1.weight"
    for block in range(6):
        source = sources[f"layer3.{block}.conv2.weight"]
        assert source == f"layer3.{block % 2}.conv2.weight"
    assert not {"layer3.0.conv1.weight", "layer3.0.conv3.weight", "fc.weight"} & sources.keys()


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    path = str(tmp_path / "one.ckpt")
    begun(save_to=path)
    resnet = "model=resnet50 model.in_channels=1 model.depth=18 model.width=0.0625 model.stem=small"
    with pytest.raises(
        ValueError, match=r"`callbacks.start_from.path` .* contains no tensor with the name"
    ):
        begun(*f"{START}{path} {resnet}".split())
    with pytest.raises(Exception, match="is not an existing checkpoint file"):
        begun(*f"{START}/nowhere".split())
