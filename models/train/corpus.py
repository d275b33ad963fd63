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
    "torch transformers tensorflow sympy pandas scipy statsmodels astropy scikit-learn twisted jax "
    "keras numba wagtail numpy sqlalchemy matplotlib xarray mypy dask django apache-airflow-core "
    "nltk fonttools pygments polars sphinx pyarrow bokeh setuptools nibabel distributed ipython "
    "scikit-image pymc flax optax tornado pydantic trio pytest falcon aiohttp fastapi werkzeug "
    "jinja2 click flask requests attrs mlflow-skinny ray"
).split()
HELD_OUT_PACKAGES = "networkx celery rich scrapy sanic".split()

SMALLEST_FILE, LARGEST_FILE = 400, 200_000  # bytes
LONGEST_LINE = 1000  # a longer one marks generated data
SHINGLE_LINES = 4


class Document(NamedTuple):
    package: str
    path: str
    text: str


class Package(NamedTuple):
    name: str
    version: str
    licence: str
    documents: list[Document]


def download(names: Iterable[str], folder: Path) -> list[Path]:
    """The wheel of each package, downloaded with pip (without dependencies) if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = []
    for name in names:
        pattern = name.replace("-", "_").lower() + "-*.whl"
        matching = [w for w in folder.glob("*.whl") if Path(w.name.lower()).match(pattern)]
        if not matching:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", str(folder), name]
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
        documents = [Document(name, n, t) for n in files if (t := plausible(archive.read(n)))]
    return Package(name, version, "; ".join(licences), documents)


def read_standard_library() -> Package:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    documents = [
        Document("python", str(p.relative_to(root)), t) for p in files if (t := plausible(p.read_bytes()))
    ]
    return Package("python standard library", sys.version.split()[0], "PSF-2.0", documents)


def plausible(raw: bytes) -> str | None:
    """The text of a handwritten file; None for files that are empty, huge, generated or not UTF-8."""
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
