"""What is declared, what is locked and what is shipped agree."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]
LOCK = (ROOT / "requirements.lock").read_text()
PYTHONS = [f"3.{minor}" for minor in range(11, 15)]


def locked(python: str, name: str) -> list[Version]:
    """The versions of a package that the lock names for a Python on Linux."""
    environment = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    found = []
    for line in LOCK.splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate(environment)
            if applies and canonicalize_name(requirement.name) == canonicalize_name(name):
                (specifier,) = requirement.specifier
                found.append(Version(specifier.version))
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_locked_within_its_bounds(python):
    for requirement in DECLARED:
        (version,) = locked(python, requirement.name)
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}"


def test_every_dependency_has_both_bounds():
    for requirement in DECLARED:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {"=="} or {">=", "<"} <= operators, str(requirement)


def test_lock_names_no_place():
    pins = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+( ; .+)?", line) for line in pins)
    assert "://" not in LOCK


def test_extras():
    assert set(EXTRAS) == {"serve", "tpu", "cuda", "tracing", "clients", "kernels", "train", "dev", "oracle"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> list[str]:
    """Names in the wheel built from a copy of what is shipped, plus the embedded model's own."""
    import shutil

    copy = tmp_path_factory.mktemp("source")
    for name in ("entropic_jax", "models", "serving", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "embedded"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "models" / "embedded").mkdir()
    (copy / "models" / "embedded" / "config.json").write_text("{}")
    build = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(copy)], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = copy.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "entropic = serving.cli:main" in archive.read(entry_points).decode()
        return archive.namelist()


def test_wheel_holds_every_module_of_the_packages(wheel):
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("entropic_jax", "models", "serving")
        for path in ROOT.glob(f"{package}/**/*.py")
    }
    assert sources <= set(wheel)
    assert "models/embedded/config.json" in wheel
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"entropic_jax", "models", "serving"}
