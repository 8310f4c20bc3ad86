"""Contents of the wheel, and its commands in an empty folder without a checkout.

The dependencies come from this environment, so that nothing is downloaded.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkout import tracked_files
from tests.recipes.datasets.images.pictures import write_root

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[1]
SHORT = [
    "trainer.max_steps=2",
    "trainer.enable_progress_bar=false",
    "callbacks=none",
    "trainer.limit_test_batches=1",
]


@dataclass(frozen=True)
class Installed:
    wheel: Path
    programs: Path
    folder: Path

    def run(self, *words, code=0):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {
            "PATH": f"{self.programs}:{environment['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment |= {"OMP_NUM_THREADS": "1", "HYDRA_FULL_ERROR": "0"}
        command = [str(self.programs / words[0]), *words[1:]]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        if code:
            return done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    pytest.importorskip("hatch_fancy_pypi_readme")
    base = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(base)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = base.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(base / "env")], check=True)
    [packages] = (base / "env").glob("lib/python*/site-packages")
    # Python searches a folder that a .pth file names, but ignores .pth files in it, such as that of an editable
    # install.
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("\n".join(here))
    install = [
        "--python",
        str(base / "env" / "bin" / "python"),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    folder = base / "empty"
    folder.mkdir()
    return Installed(wheel, base / "env" / "bin", folder)


def test_the_wheel_holds_what_runs_and_neither_records_nor_tests(installed):
    names = zipfile.ZipFile(installed.wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "lightning_hybrid"
    }
    assert {
        "lightning_hybrid/_app/conf/train.yaml",
        "lightning_hybrid/_app/recipes/train.py",
    } <= set(names)
    pages = tracked_files("lightning_hybrid/*/templates/*") + tracked_files("recipes/*/templates/*")
    assert (
        len({path.name for path in pages} & {Path(name).name for name in names}) == len(pages) >= 6
    )
    assert not [
        name for name in names if "record" in name or "evidence" in name or "/tests/" in name
    ]
    files = zipfile.ZipFile(installed.wheel).infolist()
    code = (".py", ".yaml", ".cpp", ".h", ".html", ".css")
    assert max(file.compress_size for file in files if ".dist-info" not in file.filename) < 20_000
    assert sum(file.compress_size for file in files if not file.filename.endswith(code)) < 60_000
    assert installed.wheel.stat().st_size < 1_200_000  # 1.08 MB of code
    page = (
        zipfile.ZipFile(installed.wheel)
        .read(next(name for name in names if name.endswith("METADATA")))
        .decode()
    )
    assert re.findall(r"\]\((?!https?:)[^)]*\)|(?:src|href)=\"(?!https?:)", page) == []
    for name in names:
        if "/_app/" in name:
            assert not re.search(
                rb"^\s*(from|import|_target_:) tests\b",
                zipfile.ZipFile(installed.wheel).read(name),
                re.M,
            )


def test_nothing_of_the_checkout_is_imported(installed):
    said = installed.run(
        "python", "-c", "import lightning_hybrid, sys; print(lightning_hybrid.__file__, *sys.path)"
    )
    file, *path = said.split()
    assert str(ROOT) not in path
    assert file.startswith(str(installed.programs.parent))
    assert Path(file).with_name("py.typed").exists()


def test_train_and_report(installed):
    installed.run(
        "lightning-hybrid", "train", *SHORT, "logger=csv", "callbacks=default", "hydra.run.dir=run"
    )
    summary = json.loads((installed.folder / "run" / "summary.json").read_text())
    assert summary["environment"]["commit"] is None
    assert "run" in installed.run(
        "lightning-hybrid", "report", "runs=[run]", "hydra.run.dir=report"
    )
    assert (installed.folder / "report" / "report.html").exists()


def test_train_as_a_module_under_torchrun(installed):
    torchrun = [
        "python",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "lightning_hybrid",
    ]
    installed.run(*torchrun, "train", *SHORT, "logger=csv", "hydra.run.dir=module")
    assert (installed.folder / "module" / "csv" / "metrics.csv").exists()
    wrong = installed.run(*torchrun, "train", "optm.lr=3", code=1)  # the exit code of torchrun
    assert wrong.count("Did you mean optim.lr=3?") == 1


def test_simulate_and_pack(installed):
    installed.run(
        "lightning-hybrid",
        "simulate",
        "num_steps=2",
        "scaling_ranks=[8]",
        "hydra.run.dir=simulated",
    )
    assert (installed.folder / "simulated" / "simulate.json").exists()
    write_root(installed.folder / "pictures")
    installed.run("lightning-hybrid", "pack", "root=pictures", "out=packed")
    assert (installed.folder / "packed" / "train").is_dir()
    wrong = installed.run("lightning-hybrid", "pack", "root=nowhere", "out=nothing", code=2)
    assert wrong == "error: `root` (=nowhere) does not exist. Set root to the folder to pack.\n"


def test_gpu_check_on_a_cpu(installed):
    only = "only=fits_32-true_lars,gpu_tests"
    said = installed.run("lightning-hybrid", "gpu-check", "--device", "cpu", only, "out=checked")
    assert "1 passed, 0 failed, 1 skipped; speed checks:" in said
