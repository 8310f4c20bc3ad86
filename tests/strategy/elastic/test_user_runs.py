"""Runs of users: a plain `DataLoader(shuffle=True)`, hosts that come and go in the middle of an epoch, and resumes."""

from dataclasses import replace
from pathlib import Path

from tests.strategy.elastic.user_runs import UserHosts, UserScene, undisturbed, wanted_images


def test_a_host_that_joins_in_mid_epoch_reads_its_shard_from_there(tmp_path: Path) -> None:
    scene = UserScene(max_steps=40, hold_after=(4,))
    run = UserHosts(tmp_path / "run", scene)
    run.start("a")
    run.wait("steps of a", run.has_made(4, "a"))
    run.start("b")
    run.finish("a", "b")
    assert run.has_made(0, "b", num_hosts=2)()
    reference = undisturbed(tmp_path / "reference", scene)
    assert run.images_of_steps() == wanted_images(scene, 40)
    assert run.digests() == reference.digests()


def test_a_run_that_max_steps_ended_in_mid_epoch_resumes_with_the_images_that_were_left(tmp_path: Path) -> None:
    scene = UserScene(max_hosts=1, num_images=16, max_steps=3)
    checkpoint = str(tmp_path / "x.ckpt")
    undisturbed(tmp_path / "first", replace(scene, save_to=checkpoint))
    resumed = undisturbed(tmp_path / "resumed", replace(scene, max_steps=-1, max_epochs=2, ckpt_path=checkpoint))
    whole = undisturbed(tmp_path / "whole", replace(scene, max_steps=16))
    wanted = wanted_images(scene, 16)
    assert whole.images_of_steps() == wanted
    assert resumed.images_of_steps() == {step: wanted[step] for step in range(3, 16)}
    assert resumed.digests() == {step: digest for step, digest in whole.digests().items() if step >= 3}
