"""Example gallery and deployment files: every program runs unchanged, and every file matches its page."""

import json
import os
import re
import subprocess
import tomllib

import pytest
import yaml

from lightning_hybrid.elastic.strategy import MAX_HOSTS_VARIABLE, MEET_VARIABLE
from tests.checkout import ROOT, tracked_in
from tests.programs import run_program

EXAMPLES = ROOT / "recipes" / "examples"
DEPLOY = ROOT / "recipes" / "deploy"
LAST = {
    "own_script.py": r"accuracy: 0\.9\d\d",
    "own_loop.py": r"epoch 4: loss 0\.\d\d\d",
    "self_supervised.py": r"same label: 0\.9\d\d",
    "fine_tuning.py": "backbone unchanged: True",
    "pipeline.py": r"\nloss: 0\.[0-5]\d\d",
    "slow_links.py": "bytes over the link",
    "first_run.ipynb": r"what was trained: 0\.9\d\d",
}


def test_the_page_names_every_example():
    named = re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text())
    files = [*tracked_in(EXAMPLES, "*.py"), *tracked_in(EXAMPLES, "*.ipynb")]
    assert set(named) == set(LAST) == {path.name for path in files} - {"__init__.py"}


@pytest.mark.long
@pytest.mark.parametrize("name", LAST)
def test_an_example_runs_as_it_stands(name, tmp_path):
    path = EXAMPLES / name
    if path.suffix == ".ipynb":  # cells in order, as in a kernel
        cells = [
            cell["source"]
            for cell in json.loads(path.read_text())["cells"]
            if cell["cell_type"] == "code"
        ]
        path = tmp_path / "notebook.py"
        path.write_text("\n\n".join("".join(cell) for cell in cells))
    done = run_program(str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(LAST[name], done.stdout)
    if name == "slow_links.py":
        plain, coded = (
            float(n.replace(",", "")) for n in re.findall(r"per step: ([\d,]+)", done.stdout)
        )
        assert 1.8 < plain / coded < 2.1


def test_the_image_has_the_extras_and_files_that_there_are():
    text = (DEPLOY / "Dockerfile").read_text()
    extras = re.search(r"'\.\[(.*)\]'", text)[1].split(",")
    assert set(extras) <= set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_job_of_kubernetes_starts_what_there_is_on_pods_that_find_one_another():
    service, job = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    words = [*container["command"], *container["args"]]
    assert f"--nnodes={job['spec']['completions']}" in words
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in words
    # The name of the first pod is <job>-0 in the domain of the service.
    endpoint = f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert f"--rdzv-endpoint={endpoint}" in words
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    recipe = next(word for word in words if word.startswith("recipe=")).removeprefix("recipe=")
    assert (ROOT / "conf" / "recipe" / f"{recipe}.yaml").exists()
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_the_script_for_slurm_is_a_script_and_queues_a_preempted_job_again():
    script = DEPLOY / "train.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    assert {"--requeue", "--signal=SIGUSR1@120"} <= set(
        re.findall(r"^#SBATCH (\S+)", script.read_text(), re.M)
    )
    assert 'scontrol requeue "$SLURM_JOB_ID"' in script.read_text()


def test_the_script_for_elastic_hosts_starts_a_preemptible_job_for_each_host():
    script = DEPLOY / "elastic.sbatch"
    text = script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    assert {"--requeue", "--nodes=1", "--exclusive"} <= set(
        re.findall(r"^#SBATCH (\S+)", text, re.M)
    )
    assert "torchrun --nnodes=1 " in text
    assert "strategy=elastic" in text
    assert f"export {MAX_HOSTS_VARIABLE} {MEET_VARIABLE}" in text


@pytest.mark.parametrize("missing", [MAX_HOSTS_VARIABLE, MEET_VARIABLE])
def test_the_script_for_elastic_hosts_ends_at_once_without_a_variable(missing):
    values = {MAX_HOSTS_VARIABLE: "4", MEET_VARIABLE: "node01:29400"}
    del values[missing]
    environment = {"PATH": os.environ["PATH"], **values}
    script = ["bash", str(DEPLOY / "elastic.sbatch")]
    done = subprocess.run(
        script, env=environment, cwd="/", capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert f"{missing}: " in done.stderr
    assert "torchrun" not in done.stderr


QUICKSTART = ROOT / "recipes" / "quickstart.py"


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_last_epoch_to_the_same_bits(tmp_path):
    done = run_program(str(QUICKSTART), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"on (\d) ranks, starting at step (\d+)", done.stdout) == [
        ("2", "0"),
        ("2", "0"),
        ("2", "45"),
    ]
    assert re.search("process 1 terminated|rank 1", done.stdout)  # whichever is noticed first
    assert "identical weights: True" in done.stdout
    assert [line[:3] for line in done.stdout.splitlines() if re.match(r"\d/3 ", line)] == [
        "1/3",
        "2/3",
        "3/3",
    ]
    assert (tmp_path / re.findall(r"report: (.*)", done.stdout)[0]).is_file()
