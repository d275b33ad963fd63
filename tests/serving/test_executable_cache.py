"""Executable cache: what is loaded computes what was compiled, and no key loads the program of another."""

import os
import subprocess
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import entropy
from entropic_jax.control.entropy_drop import AR1, expected_drop
from entropic_jax.control.temperature import Integral
from entropic_jax.serving import executable_cache
from entropic_jax.serving.executable_cache import (
    NotStorableError,
    describe,
    is_stored,
    key,
    load_or_compile,
    program_files,
)
from entropic_jax.state.constraints import no_constraints
from entropic_jax.state.row_subset import where_rows

LOGITS = np.linspace(-3.0, 3.0, 32, dtype=np.float32).reshape(2, 16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ENTROPIC_PROGRAM_CACHE", str(tmp_path))
    return tmp_path


def stored(folder):
    return sorted(folder.rglob("*.program"))


def test_a_stored_program_is_loaded(folder):
    assert not is_stored(entropy.entropy_statistics, (LOGITS,))
    first, compiled = load_or_compile(entropy.entropy_statistics, (LOGITS,))
    assert is_stored(entropy.entropy_statistics, (LOGITS,))
    again, compiled_again = load_or_compile(entropy.entropy_statistics, (LOGITS,))
    assert compiled and not compiled_again and len(stored(folder)) == 1
    chex.assert_trees_all_equal(again(LOGITS), first(LOGITS))
    chex.assert_trees_all_close(again(LOGITS).entropy, jax.jit(entropy.entropy_statistics)(LOGITS).entropy)


def test_structures_of_arguments_and_results_survive(folder):
    create = partial(no_constraints, 2, 40)
    load_or_compile(create, ())
    program, compiled = load_or_compile(create, ())
    assert not compiled
    chex.assert_trees_all_equal(program(), no_constraints(2, 40))
    arguments = jnp.float32(2.0), AR1(2.0, 1.0, 0.0)
    load_or_compile(expected_drop, arguments)
    program, compiled = load_or_compile(expected_drop, arguments)
    assert not compiled and float(program(*arguments)) == pytest.approx(0.3989, abs=1e-4)


def test_a_donated_argument_is_consumed(folder):
    arguments = lambda: (jnp.array([True, False]), jnp.ones((2, 4)), jnp.zeros((2, 4)))
    load_or_compile(where_rows, arguments(), donate_argnums=2)
    program, compiled = load_or_compile(where_rows, arguments(), donate_argnums=2)
    on, new, old = arguments()
    result = program(on, new, old)
    assert not compiled and result.sum() == 4 and old.is_deleted() and not new.is_deleted()


def test_the_key_is_of_all_that_a_program_depends_on(monkeypatch):
    statistics, create = entropy.entropy_statistics, lambda *static: partial(no_constraints, *static)
    keys = [
        key(statistics, (LOGITS,)),
        key(statistics, (LOGITS[:1],)),
        key(statistics, (LOGITS.astype(np.float16),)),
        key(statistics, (LOGITS,), 0),
        key(entropy.surprisal, (LOGITS,)),
        key(create(2, 40), ()),
        key(create(2, 41), ()),
        key(statistics, ([LOGITS],)),
        key(statistics, (Integral(1.0, 2.0),)),
        key(statistics, (1.0,)),
        key(statistics, (np.float32(1.0),)),
    ]
    monkeypatch.setenv("ENTROPIC_KERNELS", "xla")
    keys.append(key(statistics, (LOGITS,)))
    monkeypatch.delenv("ENTROPIC_KERNELS")
    with jax.default_matmul_precision("float32"):
        keys.append(key(statistics, (LOGITS,)))
    monkeypatch.setattr(executable_cache, "source_digest", lambda: "other text")
    keys.append(key(statistics, (LOGITS,)))
    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert key(statistics, (LOGITS,)) == keys[0] == key(statistics, (jnp.array(LOGITS),))
    assert key(statistics, (jax.ShapeDtypeStruct((2, 16), np.float32),)) == keys[0]


class StrangersLaw(AR1):
    """A class outside the package."""


def of_the_test(x):
    return x


@pytest.mark.parametrize(
    ("function", "argument", "reason"),
    [
        (lambda x: x, LOGITS, "is not a function of this package"),
        (of_the_test, LOGITS, "is not a function of this package"),
        (partial(entropy.entropy_statistics, backend=object()), LOGITS, "builtins.object"),
        (partial(no_constraints, np.ones(3)), LOGITS, "numpy.ndarray"),
        (entropy.entropy_statistics, StrangersLaw(1.0, 2.0, 3.0), "StrangersLaw"),
    ],
)
def test_what_the_key_cannot_describe_is_compiled_and_not_stored(folder, function, argument, reason):
    with pytest.raises(NotStorableError, match=reason):
        key(function, (argument,))
    if function is of_the_test:
        program, compiled = load_or_compile(function, (argument,))
        assert compiled and np.array_equal(program(argument), argument) and not stored(folder)


def test_arrays_that_were_consumed_have_their_shape(folder):
    arguments = jnp.array([True, False]), jnp.ones((2, 4)), jnp.zeros((2, 4))
    random_key = jax.random.key(0)
    keys = key(where_rows, arguments), executable_cache._array(random_key)
    for array in (*arguments, random_key):
        array.delete()
    assert keys == (key(where_rows, arguments), executable_cache._array(random_key))
    assert load_or_compile(where_rows, arguments)[1] and not load_or_compile(where_rows, arguments)[1]


def test_arrays_on_another_device_are_not_stored(monkeypatch):
    assert executable_cache._array(jnp.ones(3)) == executable_cache._array(np.ones(3, np.float32))
    monkeypatch.setattr(executable_cache, "default_device", lambda: "another device")
    with pytest.raises(NotStorableError, match="an array is not on another device alone"):
        executable_cache._array(jnp.ones(3))


@pytest.mark.parametrize("harm", ["damaged", "empty", "writable", "writable folder", "no kernel"])
def test_a_file_that_cannot_be_trusted_or_used_is_ignored(folder, harm, monkeypatch):
    load_or_compile(entropy.entropy_statistics, (LOGITS,))
    (file,) = stored(folder)
    data = file.read_bytes()
    match harm:
        case "damaged":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "empty":
            file.write_bytes(b"")
        case "writable":
            file.chmod(0o622)
        case "writable folder":
            file.parent.chmod(0o777)
        case "no kernel":
            monkeypatch.setattr(program_files, "register_stored", lambda name, package: False)
            if b"entropic_entropy_moments" not in data:
                pytest.skip("no kernel of this machine computes entropies")
    assert not is_stored(entropy.entropy_statistics, (LOGITS,))
    program, compiled = load_or_compile(entropy.entropy_statistics, (LOGITS,))
    assert compiled
    chex.assert_trees_all_close(program(LOGITS).entropy, entropy.entropy_statistics(LOGITS).entropy)


def test_a_folder_is_of_its_owner_alone_under_any_umask(folder):
    before = os.umask(0o002)
    try:
        load_or_compile(entropy.entropy_statistics, (LOGITS,))
    finally:
        os.umask(before)
    assert not load_or_compile(entropy.entropy_statistics, (LOGITS,))[1]


def test_what_could_not_be_stored_is_left_to_the_cache_of_jax(folder, monkeypatch):
    def serialize(program):
        raise ValueError("it has a callback")

    monkeypatch.setattr(program_files.serialize_executable, "serialize", serialize)
    for _ in range(2):
        program, compiled = load_or_compile(entropy.entropy_statistics, (LOGITS,))
        names = program.as_text().partition("\n")[0]
        assert compiled and program(LOGITS).entropy.shape == (2,) and not stored(folder)
    assert "HloModule jit_entropy_statistics," in names  # without a random name


def test_nothing_is_stored_where_the_variable_is_empty(folder, monkeypatch):
    monkeypatch.setenv("ENTROPIC_PROGRAM_CACHE", "")
    assert load_or_compile(entropy.entropy_statistics, (LOGITS,))[1] and not stored(folder)


def test_descriptions_tell_values_apart():
    values = [
        None,
        True,
        1,
        1.0,
        "1",
        b"1",
        (1,),
        [1, 1],
        {"a": 1},
        {"a": 2},
        AR1(1, 2, 3),
        AR1(1, 2, 4),
        AR1,
    ]
    values += [np.dtype("float32"), np.dtype("int32"), ("a", "b"), ("a,b",), ('a","b',), frozenset({1, 2})]
    assert len({describe(value) for value in values}) == len(values)
    assert describe(frozenset({3, 1, 2})) == describe(frozenset({2, 3, 1}))


SCRIPT = """
import sys, numpy as np
from entropic_jax import entropy
from entropic_jax.serving.executable_cache import load_or_compile
logits = np.linspace(-3, 3, 32, dtype=np.float32).reshape(2, 16)
program, compiled = load_or_compile(entropy.entropy_statistics, (logits,))
print(int(compiled), "numba" in sys.modules, *np.asarray(program(logits).entropy).tolist())
"""


@pytest.mark.slow
def test_a_second_process_neither_traces_nor_compiles(folder):
    # The kernels of the program are registered without being traced.
    def run():
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(
            command, env={**os.environ}, capture_output=True, text=True, check=True
        ).stdout.split()

    first, second = run(), run()
    assert first[0] == "1" and second[0] == "0" and second[1] == "False" and first[2:] == second[2:]
