"""The documents show what is: README's programs are examples/, docs/support.md is what `qkv matrix` prints, and links
lead somewhere. Run as  docs_test.py PATH_OF_QKV  (a ctest);  with --write it renews the generated parts.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "docs" / "support.md"


def quoted_programs(text):
    return {language: body for language, body in re.findall(r"```(cpp|python)\n(.*?)```", text, re.S)}


def support_page(qkv):
    matrix = subprocess.run([qkv, "matrix"], check=True, capture_output=True, text=True).stdout
    head, _, tail = SUPPORT.read_text().partition("```text\n")
    return head + "```text\n" + matrix + "```\n" + tail.partition("```\n")[2]


def broken_links(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    return [f"{page.relative_to(ROOT)}: {target}" for target in targets if not (page.parent / target).exists()]


def faults(qkv):
    programs = quoted_programs((ROOT / "README.md").read_text())
    for language, example in (("cpp", "quickstart.cpp"), ("python", "quickstart.py")):
        if programs.get(language) != (ROOT / "examples" / example).read_text():
            yield f"README.md: its {language} program is not examples/{example}"
    if support_page(qkv) != SUPPORT.read_text():
        yield f"docs/support.md is not what `qkv matrix` prints: run {sys.argv[0]} {qkv} --write"
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
        yield from broken_links(page)


def main():
    qkv = sys.argv[1]
    if "--write" in sys.argv:
        SUPPORT.write_text(support_page(qkv))
    found = list(faults(qkv))
    print("\n".join(found) if found else "documents agree with the code")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
