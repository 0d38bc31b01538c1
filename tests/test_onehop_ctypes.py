# labels: asan-off tsan-off timeout=60
"""Property: tests/gpu/onehop_ctypes.py has the sizes, offsets and values of the header, and a call through it is right."""

import ctypes
import os
import subprocess
import sys
import unittest

ROOT = os.path.abspath(os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..")))
BUILD = os.environ.get("ONEHOP_BUILD_DIR", os.path.join(ROOT, "build", "release"))
sys.path.insert(0, os.path.join(ROOT, "tests", "gpu"))

import onehop_ctypes as onehop  # noqa: E402

STRUCTS = [onehop.onehop_device, onehop.onehop_config, onehop.onehop_call, onehop.onehop_stats]


def claims(structs):
    """One C condition for each thing that the module says of the header."""
    for struct in structs:
        name = struct.__name__
        yield f"sizeof({name}) == {ctypes.sizeof(struct)}"
        for field, _ in struct._fields_:
            place = getattr(struct, field)
            yield f"offsetof({name}, {field}) == {place.offset}"
            yield f"sizeof((({name} *)0)->{field}) == {place.size}"
    for name in dir(onehop):
        if name.startswith("ONEHOP_"):
            yield f"(int){name} == {getattr(onehop, name)}"


def compiles(structs):
    source = "#include <onehop.h>\n" + "".join(f'_Static_assert({claim}, "differs");\n' for claim in claims(structs))
    done = subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-fsyntax-only", f"-I{ROOT}/include", "-xc", "-"],
                          input=source, capture_output=True, text=True, timeout=30)
    return done.returncode == 0, done.stderr


class Header(unittest.TestCase):
    def test_all_is_as_in_the_header(self):
        self.assertEqual(compiles(STRUCTS), (True, ""))

    def test_a_difference_is_found(self):
        wrong = type("onehop_call", (ctypes.Structure,), {"_fields_": onehop.onehop_call._fields_[::-1]})
        self.assertFalse(compiles([wrong])[0])


class Library(unittest.TestCase):
    def setUp(self):
        self.library = onehop.load(os.path.join(BUILD, "libonehop.so"))

    def test_a_call(self):
        config = onehop.configured(onehop.onehop_config, world_size=1, name=b"alone",
                                   device=onehop.onehop_device(onehop.ONEHOP_DEVICE_HOST, 0))
        context = ctypes.c_void_p()
        self.library.onehop_create(config, context)
        given, got = (ctypes.c_float * 5)(1, 2, 3, 4, 5), (ctypes.c_float * 5)()
        call = onehop.configured(onehop.onehop_call, algorithm=onehop.ONEHOP_LOCAL_COPY)
        self.library.onehop_all_reduce(context, given, got, 5, onehop.ONEHOP_FLOAT32, onehop.ONEHOP_SUM, call,
                                       None)
        stats = onehop.onehop_stats()
        self.library.onehop_get_stats(context, stats)
        self.library.onehop_destroy(context)
        self.assertEqual(list(got), [1, 2, 3, 4, 5])
        self.assertEqual((stats.calls, stats.bytes, stats.calls_by[onehop.ONEHOP_LOCAL_COPY]), (1, 20, 1))

    def test_failures_are_told(self):
        with self.assertRaisesRegex(onehop.Failure, "world size"):
            config = onehop.configured(onehop.onehop_config, rank=0, world_size=99, name=b"x")
            self.library.onehop_create(config, ctypes.c_void_p())


if __name__ == "__main__":
    unittest.main()
