"""Build hook: refuses to package a checkout whose symbolic links are text files. See pyproject.toml."""

from pathlib import Path

from setuptools import setup

LINKS = ("models", "serving")

for name in LINKS:
    link = Path(__file__).resolve().parent / "entropic_jax" / name
    if not link.is_dir():
        raise SystemExit(
            f"entropic_jax/{name} must be a symbolic link to ../{name}; this checkout has no symbolic links. "
            "On Windows, turn on Developer Mode, then run: git config core.symlinks true && "
            "git checkout -- entropic_jax/models entropic_jax/serving"
        )

setup()
