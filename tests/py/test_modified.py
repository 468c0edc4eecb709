"""A GPU input that the worker's code changed in place is found out. On the simulated driver, with a stand-in for torch's version counter."""
from __future__ import annotations

import pytest
from conftest import WORKERS
from test_rungs import NO_POOL, script  # noqa: F401

pytestmark = pytest.mark.usefixtures("deadline")

VERSIONS = f"""
        def start(**options):
            return zcx.Worker({str(WORKERS / 'versions.py')!r}, **{{"timeout": 40, **options}})

        def noise(n, make=lambda data: filled_with(zcx.empty((len(data),), "uint8", "cuda"), data)):
            data = os.urandom(n)
            return make(data), data
"""


def test_an_edited_input_is_an_error_that_names_it(script):  # noqa: F811
    script(VERSIONS + """
        with start() as w:
            x, data = noise(5000)
            y, _ = noise(300)
            for _ in range(2):
                got, out = w.call("look", {"a": [y, x]})
                assert got["a"][1] is x and got["a"][0] is y and out.tobytes() == b"abc" and x.tobytes() == data
            pid = w.pid
            for name, call in (("args[0]['a'][1]", lambda: w.call("edit_in", {"a": [y, x]}, "a", 1)), ("args[0]", lambda: w.call("edit_in", x)),
                               ("kwargs['image']", lambda: w.call("edit_in", None, image=x)),
                               ("args[0][0]", lambda: w.call("edit_in", [part(x, 0, 100), part(x, 50, 100)], 0))):
                try:
                    call()
                except zcx.InputModified as error:
                    assert str(error).startswith(f"versions.edit_in: {name} was changed in place"), error
                else:
                    raise AssertionError(name)
                assert crossed(w)[0] == ("input", "pool", False) and (w.status()["transfers"], w.status()["kept"]) == (0, 0)
                assert x.tobytes() == data[:10] + b"\\x2a" * 5 + data[15:], "the bytes were the parent's own"
                x.copy_from(data)
            assert w.call("look", x)[0] is x and w.pid == pid
    """)


def test_a_copied_input_may_be_edited(script):  # noqa: F811
    """It comes back as a new tensor then, and as the caller's own when it was not."""
    script(VERSIONS + f"""
        with start({NO_POOL}) as w:
            for _ in range(2):
                x, data = noise(5000, unshareable)
                assert w.call("look", [x])[0][0] is x and crossed(w)[0] == ("input", "staged", True)
                got = w.call("edit_in", x)
                assert got is not x and got.tobytes() == data[:10] + b"\\x2a" * 5 + data[15:] and x.tobytes() == data
            del x, got
        settled()
    """)
