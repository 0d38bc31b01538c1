# labels: quick
"""Property: src/protocol/algorithms.def is the one list of algorithms: the header's enum, Python's and the names that tables,
instances and documents use are those of the list, and nothing else is."""

import ast
import os
import re
import unittest

SOURCE = os.environ.get("ONEHOP_SOURCE_DIR", os.path.join(os.path.dirname(__file__), ".."))
SPELT = {"ONESHOT": "1SHOT", "TWOSHOT": "2SHOT"}


def read(*path):
    with open(os.path.join(SOURCE, *path), encoding="utf-8") as file:
        return file.read()


def without_comments(text):
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)


def listed():
    """{name: (constant, number, collective, family, device, blocks)}"""
    rows = re.findall(r"^OH_ALGORITHM\(([^)]*)\)$", without_comments(read("src", "protocol", "algorithms.def")), re.MULTILINE)
    words = [[word.strip() for word in row.split(",")] for row in rows]
    return {name: (constant, int(number), *rest) for name, constant, number, *rest in words}


class Algorithms(unittest.TestCase):
    def test_list(self):
        rows = listed()
        self.assertEqual([row[1] for row in rows.values()], list(range(1, len(rows) + 1)), "numbers without a gap")
        for name, (constant, *_) in rows.items():
            self.assertEqual(constant, "ONEHOP_" + name.upper())

    def test_header(self):
        body = re.search(r"typedef enum onehop_algorithm \{(.*?)\} onehop_algorithm;",
                         without_comments(read("include", "onehop.h")), re.DOTALL).group(1)
        found = {name: int(value) for name, value in re.findall(r"(\w+)\s*=\s*(\d+)", body)}
        self.assertEqual(found.pop("ONEHOP_ALGORITHM_AUTO"), 0)
        self.assertEqual(found, {row[0]: row[1] for row in listed().values()})

    def test_python(self):
        module = ast.parse(read("python", "onehop", "_types.py"))
        body = next(one for one in module.body if isinstance(one, ast.ClassDef) and one.name == "Algorithm").body
        found = {one.targets[0].id: one.value.value for one in body if isinstance(one, ast.Assign)}
        self.assertEqual(found.pop("AUTO"), 0)
        spelt = {"_".join(SPELT.get(word, word) for word in name.split("_")): value for name, value in found.items()}
        self.assertEqual(spelt, {name.upper(): row[1] for name, row in listed().items()})

    def test_instances(self):
        """GPU-shaped algorithms have kernels, the host's have a body, the others neither."""
        text = without_comments(read("src", "kernels", "instances.def"))
        stamped = set(re.findall(r"^OH_\w*INSTANCES?\w*\((\w+), ", text, re.MULTILINE))
        stamped |= set(re.findall(r"^    OH_INSTANCE\((\w+_\w+), ", text, re.MULTILINE)) - {"algorithm"}
        rows = listed()
        self.assertEqual(stamped, {name for name, row in rows.items() if row[4] == "ANY" and row[5] != "0"})
        bodies = set(re.findall(r"void oh_(host_\w+)\(", read("src", "kernels", "kernels.h"))) - {"host_norm"}
        self.assertEqual(bodies, {name for name, row in rows.items() if row[3] == "HOST"})


if __name__ == "__main__":
    unittest.main()
