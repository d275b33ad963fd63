"""Imports point down only: the layers follow the decode loop, from arrays up to the server."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import entropic_jax

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("entropic_jax", "benchmarks", "examples")
# Folders at the top of the tree that are part of the package by a symbolic link.
FOLDERS = {"models": "entropic_jax.models", "serving": "entropic_jax.serving"}
LAYERS = (
    ("entropic_jax.mesh", "entropic_jax.parameter_tables"),
    ("entropic_jax.cpu_runtime",),
    ("entropic_jax.pallas",),
    ("entropic_jax.state.row_subset", "entropic_jax.state.layer_stacks"),
    ("entropic_jax.state.constraints",),
    ("entropic_jax.state.cache",),
    ("entropic_jax.entropy", "entropic_jax.state"),
    ("entropic_jax.control", "entropic_jax.attention", "entropic_jax.sampling"),
    ("entropic_jax.phases",),
    ("entropic_jax.speculation",),
    ("entropic_jax.loop",),
    ("entropic_jax.methods", "entropic_jax.analysis", "entropic_jax.calibration", "entropic_jax.models"),
    ("entropic_jax",),  # the package itself, which gathers the public names
    ("entropic_jax.serving",),
    ("entropic_jax.serving.options",),
    ("entropic_jax.serving.engine",),
    ("entropic_jax.serving.offline", "entropic_jax.serving.http", "entropic_jax.serving.bench"),
    ("entropic_jax.serving.llm", "entropic_jax.serving.fleet"),
    ("entropic_jax.serving.commands",),
    ("entropic_jax.serving.cli", "entropic_jax.serving.server"),
    ("entropic_jax.serving.ray_app", "entropic_jax.__main__"),
    ("benchmarks", "examples"),
)
# Most pairs (importer, imported) of modules and folders directly below a package. A module that imports from
# one more neighbour raises the number: look first for the folder in which it belongs. Most arrows of the core
# come from the folders that compose it: `methods`, `speculation`, `analysis` and `phases`.
MOST_ARROWS = {"entropic_jax": 56, "entropic_jax.serving": 29, "benchmarks": 16}
# A benchmark imports from these and from no other benchmark; `publish` finds reports by name.
SHARED_BY_BENCHMARKS = ("benchmarks.harness",)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The package exports these from a layer above it: a name is imported when it is first used, and for type
# checkers. `entropic_jax.LLM` runs the serving engine.
LAZY_EXPORTS = {"entropic_jax": ("entropic_jax.serving.llm",)}
# A model does not know that it is controlled.
PARTS = ("attention", "mesh", "pallas", "state.cache", "state.layer_stacks")
A_MODEL_KNOWS = tuple(f"entropic_jax.{name}" for name in PARTS)


def layer(module: str) -> str | None:
    """The entry of LAYERS that a module belongs to; None for other packages."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in RANK), None)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    parts = (*FOLDERS.get(parts[0], parts[0]).split("."), *parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exists(module: str, root: Path) -> bool:
    for folder, name in FOLDERS.items():
        if module == name or module.startswith(f"{name}."):
            module = folder + module.removeprefix(name)
    path = root.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and full module name of every import of our modules, at any depth in the file."""
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            named = [full if exists(full := f"{base}.{alias.name}", root) else base for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in named if name.split(".")[0] in PACKAGES)


def for_type_checkers(path: Path) -> set[int]:
    """The lines of a file below `if TYPE_CHECKING:`, which do not run."""
    blocks = (
        node
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {line for block in blocks for line in range(block.body[0].lineno, block.body[-1].end_lineno + 1)}


def violations(root: Path) -> list[str]:
    """Every import that does not point down, and every module of the core without a layer."""
    result = []
    for path in sources(root):
        module = module_name(path, root)
        importer = layer(module)
        if importer == "entropic_jax" and module != "entropic_jax":
            result.append(f"{module} has no layer: give it one in {Path(__file__).name}")
            continue
        lazy = for_type_checkers(path) if module in LAZY_EXPORTS else ()
        for line, name in sorted(set(imports(path, root))):
            other = layer(name)
            if line in lazy and name in LAZY_EXPORTS[module]:
                continue
            place = f"{path.relative_to(root)}:{line} ({importer}) imports {name}"
            if importer == "entropic_jax.models" and other != importer and other not in A_MODEL_KNOWS:
                result.append(f"{place}; a model knows {' and '.join(A_MODEL_KNOWS)}")
            elif RANK[other] > RANK[importer]:
                result.append(f"{place}, which is above it")
    return result


def sources(root: Path) -> Iterator[Path]:
    """Every file of the packages, under the name that it is imported by."""
    for path in sorted(path for package in (*PACKAGES, *FOLDERS) for path in root.glob(f"{package}/**/*.py")):
        top, inner, *_ = path.relative_to(root).parts
        if top != "entropic_jax" or inner not in FOLDERS:  # seen through its link
            yield path


def component(module: str, package: str) -> str | None:
    """The module or folder below a package that a module belongs to; None if it is part of another."""
    other_packages = {*FOLDERS.values()} - {package}
    if any(f"{module}.".startswith(f"{name}.") for name in other_packages):
        return None
    if not f"{module}.".startswith(f"{package}."):
        return None
    return ".".join(module.split(".")[: package.count(".") + 2])


def arrows(package: str, root: Path) -> set[tuple[str, str]]:
    """The pairs of different components of a package of which the first imports from the second."""
    pairs = {
        (component(module_name(path, root), package), component(name, package))
        for path in sources(root)
        for _, name in imports(path, root)
    }
    return {(importer, other) for importer, other in pairs if importer and other and importer != other}


def test_imports_point_down():
    assert violations(ROOT) == []


@pytest.mark.parametrize(("package", "most"), MOST_ARROWS.items())
def test_there_are_no_more_arrows(package, most):
    assert len(arrows(package, ROOT)) <= most, sorted(arrows(package, ROOT))


def circle(root: Path) -> list[str]:
    """Modules that import one another in a circle, the first named again at the end; empty without one.

    Imports for type checkers alone do not run. Those inside functions count: they only delay a circle.
    """
    graph: dict[str, set[str]] = {}
    for path in sources(root):
        module, lazy = module_name(path, root), for_type_checkers(path)
        others = {name for line, name in imports(path, root) if line not in lazy}
        graph[module] = others - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_there_is_no_circle():
    assert circle(ROOT) == []


@pytest.mark.parametrize("text", ["from . import scheduler", "def late():\n    from .scheduler import step"])
def test_a_circle_is_found(tmp_path, text):
    engine = {"serving/engine/scheduler.py": "from .block_manager import BlockManager"}
    write(tmp_path, {**GOOD, **engine, "serving/engine/block_manager.py": ""})
    assert circle(tmp_path) == []
    write(tmp_path, {"serving/engine/block_manager.py": text})
    names = [f"entropic_jax.serving.engine.{name}" for name in ("block_manager", "scheduler")]
    assert set(circle(tmp_path)) == {*names}
    write(tmp_path, {"serving/engine/block_manager.py": "if TYPE_CHECKING:\n    from . import scheduler"})
    assert circle(tmp_path) == []


def between_benchmarks(root: Path) -> set[tuple[str, str]]:
    return {
        (importer, other)
        for importer, other in arrows("benchmarks", root)
        if other not in SHARED_BY_BENCHMARKS
    }


def test_benchmarks_do_not_depend_on_each_other():
    assert between_benchmarks(ROOT) == set()


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


GOOD = {
    "entropic_jax/__init__.py": "from .loop import step\nfrom . import methods\n"
    "if TYPE_CHECKING:\n    from .serving.llm import LLM\n",
    "entropic_jax/entropy.py": "import jax\n",
    "entropic_jax/pallas/topk_entropy/tpu.py": "import jax.experimental.pallas\nfrom . import reference\n",
    "entropic_jax/pallas/topk_entropy/reference.py": "from ..dispatch import first\n",
    "entropic_jax/pallas/dispatch.py": "",
    "entropic_jax/state/__init__.py": "from .cache import Cache\n",
    "entropic_jax/state/cache.py": "from entropic_jax.pallas import dispatch\n",
    "entropic_jax/attention/attend.py": "from ..state import cache\n",
    "entropic_jax/control/__init__.py": "from .controller import chain\n",
    "entropic_jax/control/controller.py": "from ..state import Signal\n",
    "entropic_jax/loop.py": "from . import entropy, state\nfrom .control import chain\n",
    "entropic_jax/methods/mirostat.py": "from ..loop import step\n",
    "models/llama.py": "from entropic_jax.state.cache import ModelShape\nfrom . import layers\nimport flax\n",
    "models/layers.py": "from entropic_jax import attention\n",
    "serving/cli.py": "import entropic_jax\nfrom entropic_jax import models\nfrom .engine import run\n",
    "serving/llm/llm.py": "from ..engine import run\nfrom ..request import RequestError\n",
    "serving/http/frontend.py": "from ..engine import run\n",
    "entropic_jax/cpu_runtime/threads.py": "from ..mesh.devices import default_device\n",
    "examples/first.py": "from entropic_jax.serving import cli\n",
}


def test_what_points_down_is_accepted(tmp_path):
    write(tmp_path, GOOD)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(
    ("package", "file", "text", "new"),
    [
        ("entropic_jax", "entropic_jax/loop.py", "from .attention import attend", [("loop", "attention")]),
        (
            "entropic_jax",
            "entropic_jax/control/laws.py",
            "from .. import state",
            [],
        ),  # control has that arrow
        (
            "entropic_jax",
            "entropic_jax/new.py",
            "from . import attention, state",
            [("new", "attention"), ("new", "state")],
        ),
        (
            "entropic_jax",
            "models/llama.py",
            "from entropic_jax.state import cache",
            [],
        ),  # not between parts of the core
        ("entropic_jax", "serving/engine/run.py", "from entropic_jax import loop", []),
        ("entropic_jax.serving", "serving/memory.py", "from .engine import run", [("memory", "engine")]),
        ("entropic_jax.serving", "serving/engine/run.py", "from . import scheduler", []),
    ],
)
def test_a_new_arrow_is_counted(tmp_path, package, file, text, new):
    write(tmp_path, GOOD)
    before = arrows(package, tmp_path)
    write(tmp_path, {file: text, "serving/engine/scheduler.py": ""})
    full_names = {tuple(f"{package}.{name}" for name in pair) for pair in new}
    assert arrows(package, tmp_path) - before == full_names


def test_an_arrow_between_benchmarks_is_found(tmp_path):
    text = "from ..harness import tables\nfrom ..soak import report"
    write(tmp_path, {"benchmarks/decode/measure.py": text, "benchmarks/publish/sections.py": text})
    write(tmp_path, {"benchmarks/soak/report.py": "", "benchmarks/harness/tables.py": ""})
    assert between_benchmarks(tmp_path) == {
        ("benchmarks.decode", "benchmarks.soak"),
        ("benchmarks.publish", "benchmarks.soak"),
    }


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("entropic_jax/entropy.py", "from .loop import step", "imports entropic_jax.loop, which is above"),
        ("entropic_jax/entropy.py", "from entropic_jax.loop import step", "imports entropic_jax.loop"),
        ("entropic_jax/entropy.py", "import entropic_jax.loop", "imports entropic_jax.loop"),
        ("entropic_jax/entropy.py", "from . import loop", "imports entropic_jax.loop"),
        ("entropic_jax/entropy.py", "from entropic_jax import loop as l", "imports entropic_jax.loop"),
        ("entropic_jax/entropy.py", "import entropic_jax", "imports entropic_jax, which is above"),
        ("entropic_jax/entropy.py", "from . import step", "imports entropic_jax, which is above"),
        ("entropic_jax/entropy.py", "def f():\n    from .control import chain", "entropy.py:2"),
        (
            "entropic_jax/entropy.py",
            "if TYPE_CHECKING:\n    import entropic_jax.serving",
            "imports entropic_jax.serving, which is above",
        ),
        (
            "entropic_jax/pallas/topk_entropy/tpu.py",
            "from ...state.cache import Cache",
            "imports entropic_jax.state.cache",
        ),
        ("entropic_jax/control/controller.py", "from ..loop import step", "imports entropic_jax.loop"),
        ("entropic_jax/loop.py", "from . import models", "imports entropic_jax.models, which is above"),
        ("entropic_jax/loop.py", "from .methods import mirostat", "imports entropic_jax.methods.mirostat"),
        ("entropic_jax/methods/mirostat.py", "import benchmarks", "imports benchmarks, which is above"),
        ("models/llama.py", "from entropic_jax.loop import step", "a model knows entropic_jax.attention and"),
        ("models/llama.py", "from entropic_jax import control", "a model knows"),
        ("models/llama.py", "from entropic_jax.methods import mirostat", "a model knows"),
        ("models/llama.py", "import entropic_jax", "a model knows"),
        ("models/llama.py", "from ..serving import cli", "a model knows"),
        ("entropic_jax/misc.py", "", "entropic_jax.misc has no layer"),
        (
            "entropic_jax/__init__.py",
            "from .serving.llm import LLM",
            "imports entropic_jax.serving.llm, which",
        ),
        (
            "entropic_jax/__init__.py",
            "if TYPE_CHECKING:\n    from .serving.cli import main",
            "imports entropic_jax.serving.cli, which is above",
        ),
        (
            "entropic_jax/loop.py",
            "if TYPE_CHECKING:\n    from .serving.llm import LLM",
            "imports entropic_jax.serving.llm, which is above",
        ),
        (
            "entropic_jax/cpu_runtime/threads.py",
            "from ..pallas import dispatch",
            "imports entropic_jax.pallas",
        ),
        ("serving/engine/scheduler.py", "from ..http import frontend", "imports entropic_jax.serving.http"),
        ("serving/llm/llm.py", "from ..commands import serve", "imports entropic_jax.serving.commands"),
        ("serving/request.py", "from .engine import run", "imports entropic_jax.serving.engine"),
        ("serving/http/frontend.py", "from ..commands import serve", "imports entropic_jax.serving.commands"),
        ("serving/cli.py", "import benchmarks", "imports benchmarks, which is above"),
    ],
)
def test_what_does_not_is_found(tmp_path, file, text, said):
    write(tmp_path, {**GOOD, file: text})
    (result,) = violations(tmp_path)
    assert said in result


def test_lazy_exports_point_down_except_those_named():
    homes = {f"entropic_jax.{home}" for home in entropic_jax._HOMES}
    above = {home for home in homes if RANK[layer(home)] > RANK["entropic_jax"]}
    assert above == set(LAZY_EXPORTS["entropic_jax"])
    assert all(hasattr(entropic_jax, name) for name in entropic_jax.__all__)
    assert set(entropic_jax._HOME) == set(entropic_jax.__all__)


def test_importing_the_package_imports_nothing_else():
    code = """if True:
        import sys, entropic_jax
        print([name for name in sys.modules if name.startswith(("entropic_jax.", "jax", "numpy"))])
    """
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout == "[]\n"
