"""The arrows between rooms, tested: reads every #include and fails when one points upward.

python tests/architecture/includes_test.py            # the tree, and the test of the test
"""

import re
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 800

# Which rooms of src/ a room may include besides itself. include/qkv is open to all of them.
ROOMS = {
    "core": set(),
    "mask": {"core"},
    "spec": {"core", "mask"},
    "plan": {"core", "mask", "spec"},
    "reference": {"core", "mask"},  # never plan: a planner's mistake must not reach the oracle
    "jit": {"core"},  # text in, kernel out: knows no word of attention
    "cpu": {"core", "mask", "plan"},
    "cuda": {"core", "mask", "plan", "jit"},
    "parallel": {"core", "plan", "jit", "cuda"},
    "api": {"core", "mask", "spec", "plan", "reference", "jit", "cpu", "cuda", "parallel"},
}
# Users of the library: the public headers and the files beside them.
USERS = ("tools", "examples", "python")
SUFFIXES = {".hpp", ".h", ".cpp", ".c", ".cuh", ".inc"}

# Folders outside src/ whose files are included in double quotes; Highway's own documents write it so.
QUOTED = {"qkv", "hwy"}

# (in double quotes, in angle brackets): one of the two.
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
# What Highway's foreach_target.h includes again for each instruction set.
HIGHWAY_TARGET = re.compile(r'^[ \t]*#[ \t]*define[ \t]+HWY_TARGET_INCLUDE[ \t]+"([^"]+)"', re.MULTILINE)
# Standard headers have neither a folder nor a suffix.
STANDARD = re.compile(r"^[a-z_0-9]+$")
# The C header's; it must do without C++.
STANDARD_C = {"stddef.h", "stdint.h"}


def why_public_header_may_not(path, own, other):
    if path.suffix == ".h":
        return None if other in STANDARD_C else "the C header includes <stddef.h> and <stdint.h> only"
    if own is not None:
        return None if own.startswith("qkv/") else "public headers include public headers only"
    if STANDARD.match(other) or (path.name == "dlpack.hpp" and other == "dlpack/dlpack.h"):
        return None
    return "public headers include nothing but the standard library"


def why_room_may_not(root, path, own, other):
    room, *inside = path.relative_to(root / "src").parts
    if room not in ROOMS:
        return f"src/{room} is not a room; see ROOMS in this test"
    if room == "core" and inside[0] == "index":
        allowed = other == "cstdint" or (own or "").startswith("core/index/")
        return None if allowed else "src/core/index is shared with device code: only <cstdint> and each other"
    if room == "cuda" and inside[0] == "device":
        return why_device_code_may_not(root, path, own, other)
    target, *rest = (own or other).split("/")
    if rest and target in ROOMS:
        allowed = {room} | ROOMS[room]
        return None if target in allowed else f"{room} may depend on {', '.join(sorted(allowed))}"
    if own is None or target in QUOTED:
        return None
    return "write the path from src/: room/file.hpp"


def why_device_code_may_not(root, path, own, other):
    """The run-time compiler gets this text without any include folder. Structs shared with the host end in .hpp."""
    if other is not None:
        allowed = other == "cstdint" and path.suffix == ".hpp"
        return None if allowed else "device code includes no header but ours; <cstdint> in .hpp files"
    places = [path.parent, root / "src/cuda/device", root / "src/core/index"]
    if any((place / own).is_file() for place in places) or own.startswith("core/index/"):
        return None
    return "device code may depend on cuda/device and core/index"


def why_user_may_not(path, own):
    if own is None or own.startswith("qkv/") or (path.parent / own).is_file():
        return None
    return "users of the library include qkv/ and the files beside them only"


def why_not(root, path, own, other):
    """One sentence if the include is forbidden, else None."""
    top = path.relative_to(root).parts[0]
    if top == "include":
        return why_public_header_may_not(path, own, other)
    if top == "src":
        return why_room_may_not(root, path, own, other)
    return why_user_may_not(path, own)


def violations(root):
    found = []
    files = (f for top in ("include", "src", *USERS) for f in sorted((root / top).rglob("*")))
    for path in files:
        if path.suffix not in SUFFIXES:
            continue
        text = path.read_text()
        name = path.relative_to(root)
        if text.count("\n") >= MAX_LINES:
            found.append(f"{name}: {text.count(chr(10))} lines; allowed: fewer than {MAX_LINES}")
        includes = [m.groups() for m in INCLUDE.finditer(text)] + [(t, None) for t in HIGHWAY_TARGET.findall(text)]
        for own, other in includes:
            reason = why_not(root, path, own, other)
            if reason:
                found.append(f"{name}: includes {own or other}; {reason}")
    return found


class Tree(unittest.TestCase):
    def test_arrows_point_downward_and_files_are_short(self):
        self.assertEqual([], violations(ROOT))

    def test_reads_the_tree(self):
        self.assertTrue((ROOT / "include/qkv/qkv.hpp").is_file())
        self.assertTrue(any((ROOT / "src").rglob("*.cpp")))


class BadIncludeIsCaught(unittest.TestCase):
    def check(self, file, text, count):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file
            path.parent.mkdir(parents=True)
            path.write_text(text)
            found = violations(Path(folder))
            self.assertEqual(count, len(found), found)

    def test_upward_between_rooms(self):
        self.check("src/mask/parse.cpp", '#include "plan/builder.hpp"\n', 1)
        self.check("src/mask/parse.cpp", '#include "core/check.hpp"\n#include "mask/node.hpp"\n', 0)

    def test_other_spellings_of_an_include_upward(self):
        self.check("src/mask/parse.cpp", "#include <plan/builder.hpp>\n", 1)
        self.check("src/mask/parse.cpp", '#include "../plan/builder.hpp"\n', 1)

    def test_oracle_never_sees_the_planner(self):
        self.check("src/reference/attention.cpp", '#include "plan/plan_data.hpp"\n', 1)

    def test_spaces_do_not_hide_an_include(self):
        self.check("src/core/check.cpp", '  #  include   "api/attention.hpp"\n', 1)

    def test_highway_target(self):
        self.check("src/cpu/forward.cpp", '#define HWY_TARGET_INCLUDE "api/forward.cpp"\n', 1)
        self.check("src/cpu/forward.cpp", '#define HWY_TARGET_INCLUDE "cpu/forward.cpp"\n', 0)
        self.check("src/cpu/forward.cpp", '#include "hwy/foreach_target.h"\n#include <hwy/highway.h>\n', 0)

    def test_index_includes_only_cstdint(self):
        self.check("src/core/index/page.hpp", "#include <cstdint>\n", 0)
        self.check("src/core/index/page.hpp", "#include <vector>\n", 1)

    def test_device_code(self):
        self.check("src/cuda/device/forward.cuh", '#include "forward.cuh"\n', 0)
        self.check("src/cuda/device/forward.cuh", '#include "core/index/paging.hpp"\n', 0)
        self.check("src/cuda/device/forward.cuh", '#include "core/checks.hpp"\n', 1)
        self.check("src/cuda/device/forward.cuh", "#include <cstdint>\n", 1)
        self.check("src/cuda/device/params.hpp", "#include <cstdint>\n", 0)

    def test_jit_knows_no_attention(self):
        self.check("src/jit/nvrtc.cpp", '#include "mask/emit.hpp"\n', 1)

    def test_public_header(self):
        self.check("include/qkv/mask.hpp", '#include <vector>\n#include "qkv/tensor.hpp"\n', 0)
        self.check("include/qkv/mask.hpp", '#include "mask/node.hpp"\n', 1)
        self.check("include/qkv/mask.hpp", "#include <fmt/format.h>\n", 1)
        self.check("include/qkv/mask.hpp", "#include <dlpack/dlpack.h>\n", 1)
        self.check("include/qkv/dlpack.hpp", "#include <dlpack/dlpack.h>\n", 0)

    def test_c_header(self):
        self.check("include/qkv/qkv.h", "#include <stdint.h>\n", 0)
        self.check("include/qkv/qkv.h", "#include <cstdint>\n", 1)
        self.check("include/qkv/qkv.h", '#include "qkv/export.hpp"\n', 1)
        self.check("include/qkv/mask.hpp", "#include <stdint.h>\n", 1)

    def test_user_reaches_inside(self):
        self.check("tools/main.cpp", '#include "core/check.hpp"\n', 1)
        self.check("examples/page.c", '#include "core/check.hpp"\n', 1)
        self.check("tools/main.cpp", '#include "qkv/qkv.hpp"\n#include <CLI/CLI.hpp>\n', 0)

    def test_unknown_room(self):
        self.check("src/misc/page.cpp", '#include "core/check.hpp"\n', 1)

    def test_long_file(self):
        self.check("src/core/check.cpp", "\n" * MAX_LINES, 1)
        self.check("src/core/check.cpp", "\n" * (MAX_LINES - 1), 0)


if __name__ == "__main__":
    unittest.main()
