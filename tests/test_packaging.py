"""Declared, locked and shipped dependencies agree."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
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
DECLARED = [
    requirement
    for lines in (PROJECT["dependencies"], *EXTRAS.values())
    for requirement in map(Requirement, lines)
    if requirement.name != PROJECT["name"]  # another extra of ours
]
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
    versions = []
    for line in LOCK.splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate(environment)
            if applies and canonicalize_name(requirement.name) == canonicalize_name(name):
                (specifier,) = requirement.specifier
                versions.append(Version(specifier.version))
    return versions


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


def test_the_page_of_usage_names_every_extra():
    text = (ROOT / "docs" / "usage.md").read_text("utf-8")
    table = text.split("| extra | for |")[1].split("\n\n")[0]
    named = {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert named == {*EXTRAS}


def test_extras():
    assert set(EXTRAS) == {
        "serve",
        "tpu",
        "cuda",
        "tracing",
        "completion",
        "clients",
        "kernels",
        "manifests",
        "train",
        "docs",
        "dev",
        "oracle",
        "ray",
    }


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a `wheel` or an `sdist` of a source tree with the declared build backend."""
    target.mkdir()
    code = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
    process = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    (path,) = target.iterdir()
    return path


def test_modules_that_are_collected_need_no_ray():
    """`./run test` installs no Ray: pytest is told to leave out the modules that import it."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    left_out = {option.removeprefix("--ignore=") for option in options if option.startswith("--ignore=")}
    files = [*(ROOT / "serving" / "fleet").glob("*.py"), ROOT / "serving" / "ray_app.py"]
    paths = [f"entropic_jax/{file.relative_to(ROOT)}" for file in files]
    assert left_out & set(paths), "the test looks in the wrong place"
    names = [path[:-3].replace("/", ".") for path in paths if path not in left_out]
    code = f"import sys; sys.modules['ray'] = None\nfor name in {names}: __import__(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_citation_and_changelog_name_the_version():
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_workflow_runs_what_ci_runs():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert "- run: .ci/run\n" in workflow
    assert '["3.11", "3.12"]' in workflow


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the tree as it is committed, links included, in which a build may leave its files."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("entropic_jax", "models", "serving", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(checkout, tmp_path_factory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist") / "dist")


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel") / "dist")


def shipped() -> set[str]:
    """What a distribution holds: every module, the embedded model, the dashboard and the type marker."""
    packages = {"entropic_jax": ROOT / "entropic_jax"}
    packages |= {f"entropic_jax/{name}": ROOT / name for name in ("models", "serving")}
    names = {"entropic_jax/py.typed"}
    for package, folder in packages.items():
        patterns = ("*.py", "embedded/*", "embedded/draft_head/*", "http/dashboard/*")
        files = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
        names |= {f"{package}/{path.relative_to(folder).as_posix()}" for path in files}
    return {name for name in names if "__pycache__" not in name}


def test_wheel_holds_every_module_of_the_packages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "entropic = entropic_jax.serving.cli:main" in archive.read(entry_points).decode()
    assert shipped() <= set(names)
    embedded = (
        "config.json",
        "model.safetensors",
        "draft_head/config.json",
        "draft_head/draft_head.safetensors",
    )
    for name in (*(f"models/embedded/{file}" for file in embedded), "serving/server.py"):
        assert f"entropic_jax/{name}" in shipped()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_holds_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == shipped()  # and so neither `models` nor `serving` at the top


def test_sdist_holds_real_files_and_no_folder_beside_the_package(sdist):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert shipped() <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {"entropic_jax", "entropic_jax.egg-info"}


def test_wheel_of_the_sdist_is_the_same(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 has none yet
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    again = build("wheel", source, tmp_path / "dist")
    assert again.name == wheel.name
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert {x.filename: x.CRC for x in first.infolist()} == {x.filename: x.CRC for x in second.infolist()}


def test_wheel_is_imported_from_where_it_is_installed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = """if True:
        import sys
        from entropic_jax import models, serving
        from entropic_jax.serving.options.model import EMBEDDED
        print(models.__file__, serving.__file__, EMBEDDED, sep="\\n")
        assert models.load(EMBEDDED).tokenizer is not None
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    installed = str(tmp_path / "site" / "entropic_jax")
    assert all(line.startswith(installed) for line in process.stdout.splitlines())


def test_a_checkout_without_symbolic_links_is_not_built(checkout, tmp_path):
    copy = shutil.copytree(checkout, tmp_path / "checkout", symlinks=True)
    (copy / "entropic_jax" / "serving").unlink()
    (copy / "entropic_jax" / "serving").write_text("../serving")
    process = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=copy, capture_output=True, text=True
    )
    assert process.returncode == 1
    assert "entropic_jax/serving must be a symbolic link to ../serving" in process.stderr
    assert "git config core.symlinks true" in process.stderr
