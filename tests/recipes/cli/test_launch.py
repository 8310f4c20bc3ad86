"""Configuration of runs: computed values, rejected settings, and the messages for them."""

import inspect
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import OmegaConf

from lightning_hybrid import HybridAllReduceStrategy
from recipes.cli import config_check, key_note, launch
from recipes.cli.world import accumulation, num_ranks, world_from_launcher
from recipes.pack import KEYS as PACK_KEYS
from recipes.training.build import build
from recipes.training.keys import TRAIN_KEYS
from tests.checkout import ROOT
from tests.recipes.composed import composed

CONF = Path(__file__).resolve().parents[3] / "conf"
ALONE = [
    "trainer.devices=1",
    "logger=none",
    "run_dir=/nowhere",
    "trainer.enable_progress_bar=false",
]


def configured(*overrides):
    return composed("train", *ALONE, *overrides)


def test_the_defaults_are_the_main_job():
    trainer, module, data = build(configured("trainer.devices=2"))
    assert isinstance(trainer.strategy, HybridAllReduceStrategy)
    assert (trainer.world_size, str(trainer.precision), trainer.accumulate_grad_batches) == (
        2,
        "16-true",
        1,
    )
    assert module.optimizer.func.__name__ == "LARS"
    assert data.seed == 0
    cfg = configured("+mine=0.5", "optim.lr=${mine}")  # users may refer to their own keys
    config_check.check(cfg, TRAIN_KEYS)
    assert cfg.optim.lr == 0.5


@pytest.mark.parametrize(
    ("trainer", "overrides", "log_every", "ask_to_stop_every"),
    [
        ("cpu", [], 5, 1),
        ("auto", ["trainer.devices=2"], 50, 1),  # no GPU here
        ("gpu", ["trainer.devices=2"], 50, 20),
        # Steps of 4 batches.
        ("gpu", ["trainer.devices=2", "global_batch_size=64", "batch_size_per_rank=8"], 50, 1),
    ],
)
def test_on_gpus_the_host_seldom_waits(
    trainer, overrides, log_every, ask_to_stop_every, monkeypatch
):
    """In addition, cuDNN may benchmark its convolutions. The test only composes, because there is no GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cfg = configured(f"trainer={trainer}", *overrides)
    assert cfg.trainer.log_every_n_steps == log_every
    assert cfg.callbacks.stop.every_n_steps == ask_to_stop_every
    assert cfg.trainer.get("benchmark", False) is (trainer != "cpu")


def test_tracking_is_offline_by_default(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert configured("logger=wandb").logger.offline is True
    assert configured("logger=wandb", "logger.offline=false").logger.offline is False
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert configured("logger=wandb").logger.offline is False  # leaves the choice to WANDB_MODE


IMAGENET = "recipe=resnet50_64k data=synthetic"
MISTAKES = {
    "global_batch_size=127 trainer.devices=2": r"`global_batch_size` \(=127\).* Set global_batch_size=126 or 128\.",
    "batch_size_per_rank=60": r"`global_batch_size` \(=128\).*consist of 2\.13 accumulation steps\..*=120 or 180\.",
    "global_batch_size=2048": r"`global_batch_size` \(=2048\) must be at most the number of training images \(=1257\)",
    "recipe=resnet50_64k": r"`data\.root` \(=\?\?\?\) is required, but has no value\. Missing keys: data\.root\. Set",
    "recipe=resnet50_64k data.root=/nowhere": r"`root` \(=/nowhere\)",
    f"{IMAGENET} global_batch_size=65522": r"`global_batch_size` \(=65522\) cannot be split into equal.*=65408 or",
    f"{IMAGENET} warmup_epochs=5": r"`warmup_epochs` \(=5\) and `warmup_steps` \(=606\) cannot both be set",
    "+optim.trust_coef=1": r"unexpected keyword argument 'trust_coef'",
    "+precison=16-true": r"`precison` .* no other key refers to .*\. Did you mean precision\?",
    "trainer.devices=0": r"`trainer.devices` \(=0\) must be -1 or a number above 0",
    "precision=17-true": r"`trainer.precision` \(='17-true'\) must be .*16-true",
    "strategy.comm.algorithm=ring": r"`strategy.comm.algorithm` \(='ring'\) must be auto or flat",
    "strategy.between_nodes=adasum": r"`strategy.between_nodes` \(='adasum'\) .*\. Set strategy/between_nodes=adasum\.",
    "strategy.ranks_per_node=3 trainer.devices=4": r"`ranks_per_node` \(=3\) must divide",
    "data=synthetic model=resnet50 model.bn_eps=-inf": r"`bn_eps` \(=-inf\) must be a number in \(0, inf\).*\[model\]",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_message_before_training(mistake, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with (
        pytest.raises(SystemExit, match=r"^error: .*" + MISTAKES[mistake]) as raised,
        launch.short_errors(),
    ):
        build(configured(*mistake.split()))
    assert "full_key" not in str(raised.value)
    assert "raised while resolving" not in str(raised.value)


WITH_KEYS = {
    "strategy.ranks_per_node=3 trainer.devices=4": [
        "`ranks_per_node` (=3) must",
        "`ranks_per_node` is strategy.ranks_per",
    ],
    "strategy/between_nodes=local_steps strategy.between_nodes.every=1": [
        "`between_nodes.every` (=1) must",
        "`between_nodes.every` is strategy.between_nodes.every",
        "between_nodes=Mean() is strategy/between_nodes=mean",
    ],
    "strategy.comm.algorithm=flat strategy/between_nodes=adasum": [
        "Leave `comm.algorithm` out, or set between_nodes=Mean()",
        "`comm.algorithm` is strategy.comm.algorithm",
        "between_nodes=Mean() is strategy/between_nodes=mean",
    ],
    "strategy.report.link_bytes_per_s=-1": ["is strategy.report.link_bytes_per_s"],
    "callbacks.replicas.every_n_steps=0": [
        "Set every_n_steps=100",
        "`every_n_steps` is callbacks.replicas.every_n_steps",
    ],
    "strategy=pipeline strategy.num_microbatches=1": [
        "Set num_microbatches=8",
        "is strategy.num_microbatches",
    ],
}


@pytest.mark.parametrize("mistake", WITH_KEYS)
def test_an_error_of_the_library_names_the_argument_and_a_recipe_adds_its_key(mistake, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    cfg = configured(*mistake.split())
    with pytest.raises(SystemExit) as raised, launch.short_errors(cfg):
        build(cfg)
    message, note = str(raised.value).splitlines()
    assert note.startswith("Keys of the recipe: ")
    for text in WITH_KEYS[mistake]:
        assert text in f"{message} {note}"
    assert "strategy." not in message


def test_an_argument_that_conf_leaves_out_is_named_with_the_plus_that_adds_it():
    cfg = configured()
    message = "`node_slices` cuts nothing. Leave `start_method` out, or `no_such_argument`."
    keys = "`node_slices` is model.slice_fc, `start_method` is +strategy.start_method"
    assert key_note.note_of(message, cfg) == f"Keys of the recipe: {keys}."
    assert key_note.note_of("nothing is named here", cfg) == ""


def test_an_override_may_replace_the_only_reference_to_a_key(monkeypatch):
    def check(*overrides):
        cfg = compose("pack", ["root=x", "out=y", "run_dir=z", *overrides], True)
        monkeypatch.setattr(HydraConfig, "get", lambda: cfg.hydra)
        monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
        job_cfg = OmegaConf.masked_copy(cfg, [name for name in cfg if name != "hydra"])
        config_check.check(job_cfg, PACK_KEYS)

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        check("packing.short_side=16")
        check("packing.short_side=16", "packing.verify=false", "packing=images")
        for wrong in (["+shrot_side=3"], ["packing=text", "+short_side=3"]):
            with pytest.raises(ValueError, match=r"\(=3\) is not a key of this recipe"):
                check("packing.root=x", *wrong)


def test_a_key_that_hydra_notes_on_an_error_is_named_as_one_in_its_message():
    """Hydra 1.4 adds the note, and 1.3 changes the message."""
    error = ValueError("`width` (=0) must be above zero.")
    error.add_note("full_key: model")
    in_message = ValueError("`width` (=0) must be above zero.\nfull_key: model")
    assert (
        launch.message_of(error)
        == launch.message_of(in_message)
        == "`width` (=0) must be above zero. [model]"
    )


@pytest.mark.parametrize(
    ("partial", "message"),
    [
        (0, r"`steps.trainer._partial_` \(=0\) must be true or false"),
        (False, r"`steps.trainer` .*`_partial_: true`"),
    ],
)
def test_a_part_that_must_be_partial_says_so(partial, message):
    trainer = {"_target_": "lightning.pytorch.Trainer", "_partial_": partial}
    steps = {"_target_": "recipes.benchmarks.steps.StepBench", "trainer": trainer}
    with pytest.raises(ValueError, match=message):
        config_check.check(OmegaConf.create({"steps": steps}), {"steps": dict})


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "2026/12"),
        ({"TORCHELASTIC_RUN_ID": "7f3a"}, "torchrun-7f3a"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "2026/12"),
        (
            {
                "SLURM_NTASKS": "4",
                "SLURM_JOB_ID": "9",
                "SLURM_STEP_ID": "2",
                "SLURM_JOB_NAME": "train",
            },
            "slurm-9.2",
        ),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "9", "SLURM_JOB_NAME": "bash"}, "2026/12"),
    ],
    ids=str,
)
def test_the_directory_is_named_by_the_launcher_of_the_ranks(monkeypatch, variables, name):
    for variable in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_JOB_NAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert launch.launch_id("2026/12") == name


def test_an_interpolation_reaches_the_other_processes_as_it_was_given(monkeypatch, tmp_path):
    overrides = ["+cluster=netlab", "+num_nodes=1", "strategy.comm.plan=${cluster.links}"]
    cfg = composed("train", *overrides, return_hydra_config=True)
    OmegaConf.set_readonly(cfg.hydra, False)
    cfg.hydra.runtime.output_dir = str(tmp_path)
    monkeypatch.setattr(HydraConfig, "get", lambda: cfg.hydra)
    cfg.hydra.job.config_name = "train"
    cfg.hydra.runtime.config_sources = []
    assert launch.command_of_this_job()[-4:] == [*overrides, "hydra.mode=RUN"]


FROM_THE_RECIPE = {"root", "global_batch_size", "seed", "num_classes"}
MODELS = ("alexnet_bn_imagenet", "alexnet", "resnet50")


@pytest.mark.parametrize(
    "name", [*(f"model/{name}" for name in MODELS), "data/imagenet", "data/synthetic"]
)
def test_a_file_holds_exactly_the_arguments_and_for_data_their_defaults(name):
    conf = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / f"{name}.yaml"))
    arguments = inspect.signature(get_class(conf.pop("_target_"))).parameters
    assert conf.keys() == arguments.keys()
    for key in arguments.keys() - FROM_THE_RECIPE if name.startswith("data") else ():
        default = arguments[key].default
        assert conf[key] == (list(default) if isinstance(default, tuple) else default), key


LAUNCHERS = "LOCAL_WORLD_SIZE GROUP_WORLD_SIZE SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_NNODES SLURM_JOB_NAME".split()
SLURM = {
    "SLURM_NTASKS": "16",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NAME": "train",
}


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        ({}, ("auto", 1)),
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "3"}, (4, 3)),
        (SLURM, (8, 2)),
        # In an interactive shell, Lightning starts the ranks.
        (
            SLURM | {"SLURM_JOB_NAME": "bash"},
            ("auto", 1),
        ),
        ({name: SLURM[name] for name in ("SLURM_NTASKS", "SLURM_NNODES")}, ("auto", 2)),
        # Torchrun in a SLURM job.
        (
            SLURM | {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
            (4, 2),
        ),
    ],
    ids=str,
)
def test_the_world_is_the_launchers(monkeypatch, variables, world):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (world_from_launcher("devices", "auto"), world_from_launcher("num_nodes", 1)) == world


@pytest.mark.parametrize(
    ("share", "limit", "rounds"),
    [
        (100, 100, 1),
        (101, 101, 1),
        (100, 99, 2),
        (99, 50, 3),
        (90, 40, 3),
        (1, 1, 1),
        (121, 70, None),
        (106, 32, None),
    ],
)
def test_a_limit_takes_the_fewest_equal_batches(share, limit, rounds):
    if rounds is not None:
        assert accumulation(2 * share, None, limit, 2, 1) == rounds
        assert all(share % fewer or share // fewer > limit for fewer in range(1, rounds))
        return
    with pytest.raises(
        ValueError,
        match=rf"`global_batch_size` \(={2 * share}\) cannot be split into equal batches",
    ) as told:
        accumulation(2 * share, None, limit, 2, 1)
    for advised in re.findall(r"=(\d+) or (\d+), or", str(told.value))[0]:  # the advised values fit
        assert accumulation(int(advised), None, limit, 2, 1) >= 1


def test_the_paper_s_batch_reaches_any_number_of_gpus_and_a_batch_of_a_rank_wins_over_the_limit():
    """The paper uses 65,536 images per step, and at most 128 at a time."""
    for ranks, rounds in ((2048, 1), (512, 1), (256, 2), (8, 64), (1, 512)):
        assert accumulation(65536, None, 128, 1, ranks) == rounds
    assert accumulation(256, 64, 8, 2, 1) == 2


def test_devices_that_are_to_be_found_are_the_gpus_but_one_on_a_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert num_ranks("auto", 3) == num_ranks(-1, 3, "gpu") == 12
    assert num_ranks("auto", 3, "cpu") == num_ranks(-1, 3, "cpu") == 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert num_ranks("auto", 3) == 3
