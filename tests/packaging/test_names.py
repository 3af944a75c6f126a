"""The project's folders must not be taken for Hugging Face's package `kernels`, nor hide it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ("kernels==0.16.0", "kernels-data==0.16.2")
"""The release that the oldest supported transformers uses, and what it needs to be imported."""


def _run(*command: object, cwd: Path = ROOT, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    inherited = os.environ.get("PYTHONPATH")
    parts = [str(path)] * (path is not None) + [inherited] * bool(inherited)
    if parts:
        environment["PYTHONPATH"] = os.pathsep.join(parts)
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def real_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `kernels` of the package index in it."""
    folder = tmp_path_factory.mktemp("kernels")
    _run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *KERNELS)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy so that no build folders stay behind."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = _run("git", "ls-files", "-co", "--exclude-standard")
    for name in listed.splitlines():
        source, target = ROOT / name, folder / "source" / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    _run(*pip, "--wheel-dir", folder, folder / "source")
    return next(folder.glob("*.whl"))


FROM_THE_ROOT = """
import os, sys
assert os.path.isdir("kernels") and sys.path[0] == "", sys.path
import transformers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import _is_package_available
LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8,
                             num_attention_heads=1, vocab_size=8))
print(*_is_package_available("kernels", return_version=True))
"""


def test_kernels_is_a_bare_folder() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), (ROOT / "kernels/README.md").read_text()


def test_from_the_root_transformers_sees_no_kernels() -> None:
    assert _run(sys.executable, "-c", FROM_THE_ROOT).strip() == "False N/A"


def test_from_the_root_transformers_finds_the_real_kernels(real_kernels: Path) -> None:
    answer = _run(sys.executable, "-c", FROM_THE_ROOT, path=real_kernels).strip()
    assert answer == f"True {KERNELS[0].partition('==')[2]}"


def test_our_kernels_import_under_their_installed_name() -> None:
    where = "import sparse_cache.kernels as k; print(*k.__path__)"
    assert str(ROOT / "kernels") in _run(sys.executable, "-c", where)


def test_the_wheel_installs_nothing_else_at_the_top(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sparse_cache"}
    for inside in (
        "kernels.py",
        "kernels/README.md",
        "recipe/__init__.py",
        "recipe/presets/tiny.yaml",
        "recipe/accelerate/fsdp2.yaml",
        "demo/__init__.py",
        "py.typed",
    ):
        assert f"sparse_cache/{inside}" in names
    for module in (ROOT / "sparse_cache").rglob("*.py"):
        assert module.relative_to(ROOT).as_posix() in names


def test_the_wheel_lives_beside_the_real_kernels(
    wheel: Path, real_kernels: Path, tmp_path: Path
) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps")
    _run(*pip, wheel, *KERNELS)
    site = Path(
        _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    # torch and transformers from the environment of the tests; a plain line adds the folder only,
    # without its own .pth files, so that an editable install of ours there does not count.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    check = (
        "import kernels, sparse_cache, sparse_cache.kernels, sparse_cache.recipe as recipe;"
        "print(kernels.__file__, sparse_cache.__file__, *sparse_cache.kernels.__path__, sep='\\n')"
    )
    real, ours, inner = _run(python, "-c", check, cwd=tmp_path).splitlines()
    assert Path(real) == site / "kernels" / "__init__.py"
    assert Path(ours) == site / "sparse_cache" / "__init__.py"
    assert Path(inner) == site / "sparse_cache" / "kernels"
