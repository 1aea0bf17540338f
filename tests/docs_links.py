#!/usr/bin/env python3
"""docs_links.py ROOT: what the documentation points at exists. Prints every violation as file:line.

In README.md, docs/ and the README.md of other folders: a link to a file or heading of the project resolves; a path in code
quotes that names a folder of the project (`tensor/tape.h`, also with patterns or as `x.{h,cpp}`) exists, unless it has an x of
its own (`ckpt/policies/x.cpp`); and code below a line <!-- from PATH --> is in that file.
"""
import glob
import pathlib
import re
import sys

LINK = re.compile(r"(?<!!)\[[^\]\[]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FROM = re.compile(r"<!-- from (\S+) -->")
CODE = re.compile(r"`([^`\s]+)`")


def anchor(heading):
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def prose_lines(text):
    """(number, line) outside of code fences."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchors(path):
    return {anchor(line.lstrip("#")) for _, line in prose_lines(path.read_text()) if line.startswith("#")}


def broken_link(target, page, root):
    if re.match(r"[a-z]+:", target):
        return None  # elsewhere: not asked here
    path, _, heading = target.partition("#")
    file = (page.parent / path) if path else page
    if not file.exists():
        return f"the link {target} leads nowhere"
    if not file.resolve().is_relative_to(root):
        return f"the link {target} leaves the project"
    if heading and file.suffix == ".md" and heading not in anchors(file):
        return f"{path or page.name} has no heading #{heading}"
    return None


def expand(text):
    """x.{h,cpp} -> x.h, x.cpp"""
    if match := re.search(r"\{([^{}]*)\}", text):
        return [one for part in match[1].split(",") for one in expand(text[:match.start()] + part + text[match.end():])]
    return [text]


def missing_paths(line, root, folders):
    for code in CODE.findall(line):
        if code.split("/")[0] not in folders or "/" not in code or re.search(r"[<>$=:]|(^|/)x[._]|_x\.", code):
            continue
        for path in expand(code):
            if not glob.glob(str(root / path)) and not glob.glob(f"{root / path}.*"):  # launcher/trainer: both files
                yield f"`{path}` does not exist"


def find_lines(part, lines, begin):
    """The index after `part` in lines[begin:], or None."""
    return next((at + len(part) for at in range(begin, len(lines) - len(part) + 1) if lines[at:at + len(part)] == part), None)


def misquotes(text, root):
    """(line, message) of every quotation that is not in its file. A line `...` stands for what was left out."""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not (match := FROM.fullmatch(line.strip())):
            continue
        source = root / match[1]
        if not source.is_file():
            yield number, f"quotes {match[1]}, which does not exist"
            continue
        end = next((at for at in range(number + 1, len(lines)) if lines[at].startswith("```")), number)
        if not lines[number].startswith("```") or end <= number + 1:
            yield number, f"no code below the quotation of {match[1]}"
            continue
        have, at, part = [have.strip() for have in source.read_text().split("\n")], 0, []
        for code in [code.strip() for code in lines[number + 1:end]] + ["..."]:
            if code not in ("...", "// ..."):
                part.append(code)
            elif (found := find_lines(part, have, at)) is None:
                yield number, f"{match[1]} does not say this: {part[0]} ..."
                break
            else:
                at, part = found, []


def check_page(page, root, folders):
    name, text = page.relative_to(root).as_posix(), page.read_text()
    for number, line in prose_lines(text):
        for link in (a or b for a, b in LINK.findall(re.sub(r"`[^`]*`", "", line))):
            if message := broken_link(link, page, root):
                yield name, number, message
        for message in missing_paths(line, root, folders):
            yield name, number, message
    for number, message in misquotes(text, root):
        yield name, number, message


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[1]).resolve()
    folders = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"build", "runs"}
    pages = sorted({root / "README.md", *(root / "docs").rglob("*.md"), *(path for f in folders for path in (root / f).rglob("README.md"))})
    found = [violation for page in pages for violation in check_page(page, root, folders)]
    for name, number, message in found:
        print(f"{name}:{number}: {message}")
    if found:
        sys.exit(1)
    print(f"docs: {len(pages)} pages are in order")


if __name__ == "__main__":
    main()
