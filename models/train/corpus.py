"""The training text: Python source of permissively licensed packages on PyPI, deduplicated.

Whole packages are held out for validation, so that a held-out file shares no author's habits,
no vendored copy and no near-duplicate with the training text.
"""

import hashlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TRAINING_PACKAGES = (
    "torch==2.13.0 transformers==5.23.0 tensorflow==2.21.0 sympy==1.14.0 pandas==3.1.1 scipy==1.17.1 "
    "statsmodels==0.15.0 astropy==8.0.2 scikit-learn==1.9.1 twisted==26.10.0 jax==0.10.2 keras==3.15.1 "
    "numba==0.68.1 wagtail==8.0.1 numpy==2.4.6 sqlalchemy==2.1.9 matplotlib==3.11.2 xarray==2026.9.0 "
    "mypy==2.4.1 dask==2026.8.0 django==5.2.19 apache-airflow-core==3.3.2 nltk==3.10.4 fonttools==4.68.0 "
    "pygments==2.21.0 polars==2.1.0 sphinx==9.0.4 pyarrow==26.0.1 bokeh==3.9.2 setuptools==84.2.1 "
    "nibabel==5.4.2 distributed==2026.8.0 ipython==9.18.1 scikit-image==0.26.0 pymc==5.28.5 flax==0.12.8 "
    "optax==0.2.8 tornado==6.6.1 pydantic==2.14.3 trio==0.35.0 pytest==9.2.0 falcon==4.4.0 aiohttp==3.14.5 "
    "fastapi==0.165.0 werkzeug==3.1.9 jinja2==3.1.6 click==8.5.1 flask==3.1.3 requests==2.34.2 attrs==26.1.0 "
    "mlflow-skinny==3.17.2 ray==2.60.0"
).split()
HELD_OUT_PACKAGES = "networkx==3.6.1 celery==5.7.0 rich==15.0.0 scrapy==2.19.0 sanic==25.12.1".split()

SMALLEST_FILE, LARGEST_FILE = 400, 200_000  # bytes
LONGEST_LINE = 1000  # a longer one marks generated data
SHINGLE_LINES = 4
HEAD_CHARACTERS = 3000  # where a file says that it was generated
HELD_OUT_EVERY = 20  # of the files of a folder, one in so many is held out
TEST_PATH = re.compile(r"(^|/)(_?tests?|testsuite|testcases)/|(^|/)(test_[^/]*|[^/]*_tests?|conftest)\.py$")
VENDORED_PATH = re.compile(
    r"(^|/)(_?vendor(ed|ized)?|_vendored_packages|third_?party(_files)?|_?extern(als?)?|_external|site-packages)/"
)
GENERATED_PATH = re.compile(r"(_pb2(_grpc)?|(^|/)(parsetab|lextab|_version|version|__version__))\.py$")
GENERATED_HEAD = re.compile(
    r"^\s*#.*(\b(auto|automatically|machine)[- ]?generated|\bgenerated (by|from|with|using) |\bdo not edit\b)"
    r"|\b(file|module|code|script) (is|was|has been|have been) (\w+[- ])?(auto)?generated"
    r"|@generated|generated file\b|AUTO-?\s?GENERATED|DO NOT (EDIT|MODIFY)",
    re.IGNORECASE | re.MULTILINE,
)


class Document(NamedTuple):
    """A file of a package."""

    package: str
    path: str
    text: str


class Package(NamedTuple):
    """A package with its licence and its documents."""

    name: str
    version: str
    licence: str
    documents: list[Document]


def project_name(requirement: str) -> str:
    """The normalised name in a requirement such as `Jinja2==3.1.6`."""
    return re.sub(r"[-_.]+", "-", requirement.split("==")[0]).lower()


def download(requirements: Iterable[str], folder: Path) -> list[Path]:
    """The wheel of each `name==version`, downloaded with pip (without dependencies) if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = []
    for requirement in requirements:
        name, version = requirement.split("==")
        pattern = f"{project_name(name).replace('-', '_')}-{version}[-+]*.whl"  # "+cpu", of torch
        matching = [w for w in folder.glob("*.whl") if Path(w.name.lower()).match(pattern)]
        if not matching:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", str(folder), requirement]
            subprocess.run(command, check=True)
            matching = [w for w in folder.glob("*.whl") if Path(w.name.lower()).match(pattern)]
        wheels.append(sorted(matching)[-1])
    return wheels


def read_wheel(wheel: Path) -> Package:
    """Every plausible Python file of a wheel, with the licence its metadata states."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        head = archive.read(metadata).decode("utf-8", "replace").split("\n\n")[0]
        name, version = (re.findall(rf"^{k}: (.*)$", head, re.M)[0] for k in ("Name", "Version"))
        licences = re.findall(r"^License-Expression: (.*)$", head, re.M)
        licences = licences or re.findall(r"^Classifier: License :: (?:OSI Approved :: )?(.*)$", head, re.M)
        licences = licences or re.findall(r"^License: (.*)$", head, re.M)
        files = sorted(n for n in archive.namelist() if n.endswith(".py"))
        documents = [Document(name, n, t) for n in files if (t := handwritten(n, archive.read(n)))]
    return Package(name, version, "; ".join(licences), documents)


def read_standard_library() -> Package:
    """The Python standard library, without installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    documents = [
        Document("python", path, t)
        for p in files
        if (t := handwritten(path := str(p.relative_to(root)), p.read_bytes()))
    ]
    return Package("python standard library", sys.version.split()[0], "PSF-2.0", documents)


def read_folder(folder: Path) -> Package:
    """Every plausible text file under a folder; its licence is for its owner to know."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    documents = [
        Document(folder.name, path, t)
        for p in files
        if (t := handwritten(path := str(p.relative_to(folder)), p.read_bytes()))
    ]
    if not documents:
        raise ValueError(
            f"--text must name a folder with text files of {SMALLEST_FILE} bytes or more; got {folder}"
        )
    return Package(folder.name, "", "", documents)


def plausible(raw: bytes) -> str | None:
    """The text of a file; None for files that are empty, huge, full of data or not UTF-8."""
    if not SMALLEST_FILE <= len(raw) <= LARGEST_FILE:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    if max(map(len, text.split("\n"))) > LONGEST_LINE:
        return None
    letters = sum(c.isalpha() or c in " \n_" for c in text)
    return text if letters > 0.6 * len(text) else None


def handwritten(path: str, raw: bytes) -> str | None:
    """The text of a plausible file that is neither a test nor a vendored nor a generated one; else None."""
    if any(pattern.search(path) for pattern in (TEST_PATH, VENDORED_PATH, GENERATED_PATH)):
        return None
    text = plausible(raw)
    return None if text is None or GENERATED_HEAD.search(text[:HEAD_CHARACTERS]) else text


def deduplicate(documents: Iterator[Document], seen: set[bytes] | None = None) -> Iterator[Document]:
    """Drop documents most of whose four-line shingles occur in earlier ones."""
    seen = set() if seen is None else seen
    for document in documents:
        lines = [s for line in document.text.split("\n") if (s := line.strip()) and not s.startswith("#")]
        starts = range(max(1, len(lines) - SHINGLE_LINES + 1))
        shingles = {
            hashlib.blake2b("\n".join(lines[i : i + SHINGLE_LINES]).encode(), digest_size=8).digest()
            for i in starts
        }
        known = len(shingles & seen)
        seen |= shingles
        if known <= 0.4 * len(shingles):
            yield document


def is_held_out(package: Package) -> bool:
    """Whether a package is one of `HELD_OUT_PACKAGES`."""
    return project_name(package.name) in map(project_name, HELD_OUT_PACKAGES)


def collect(folder: Path) -> tuple[list[Document], list[Document], list[Package]]:
    """Training and held-out documents, and the packages they come from.

    The held-out documents go first through the duplicate filter: whatever training text repeats
    them is dropped from the training side.
    """
    held_out = [read_wheel(w) for w in download(HELD_OUT_PACKAGES, folder)]
    training = [read_standard_library(), *(read_wheel(w) for w in download(TRAINING_PACKAGES, folder))]
    seen: set[bytes] = set()
    validation = list(deduplicate((d for p in held_out for d in p.documents), seen))
    documents = list(deduplicate((d for p in training for d in p.documents), seen))
    return documents, validation, held_out + training


def collect_text(folder: Path) -> tuple[list[Document], list[Document], list[Package]]:
    """Training and held-out documents of a folder of text, of which it holds out one file in twenty."""
    package = read_folder(folder)

    def chosen(d):
        return hashlib.blake2b(d.path.encode(), digest_size=4).digest()[0] % HELD_OUT_EVERY == 0

    seen: set[bytes] = set()
    held_out = [d for d in package.documents if chosen(d)] or package.documents[:1]
    validation = list(deduplicate(iter(held_out), seen))
    documents = list(deduplicate((d for d in package.documents if d not in held_out), seen))
    return documents, validation, [package]
