"""Makes the tables and pictures of README and docs from the records in benchmarks/results/.

    python benchmarks/report.py             writes them
    python benchmarks/report.py --check     fails if a page or picture does not match the data

In a page, a table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. report_tables.py and
report_peers.py make the tables. Pictures are docs/pictures/NAME.svg.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import record
import report_cells
import report_slots  # noqa: F401  registers its tables
import report_tables
import svg

PAGES = [record.ROOT / "README.md", *sorted((record.ROOT / "docs").glob("*.md"))]
PICTURES = record.ROOT / "docs" / "pictures"
PLACE = re.compile(r"<!-- table: ([a-z0-9_]+) -->\n.*?<!-- end of table -->", re.DOTALL)


def filled(page: str) -> str:
    """Returns a page with its tables made from the data."""

    def made(found: re.Match[str]) -> str:
        table = report_cells.TABLES[found[1]]()
        return f"<!-- table: {found[1]} -->\n\n{table}\n\n<!-- end of table -->"

    return PLACE.sub(made, page)


# --- pictures ---


def products_picture() -> svg.Picture:
    found = report_cells.rows("hopper_h200", "product")
    shapes = list(dict.fromkeys((r["model"], r["n"], r["k"]) for r in found))
    picture = svg.Picture(1080, 590, "Microseconds of grouped products on an H200, by tokens")
    names = {
        "floor of 16-bit rows": "w4a16_floor_us", "fp4_ops, bf16 rows": "w4a16_us",
        "fp4_ops, fp8 rows": "w4a8_us", "fastest other 4-bit kernel recorded, bf16 rows": "w4a16_peer_us",
        "torch, bf16 weights": "bf16_us",
    }  # fmt: skip
    widths = (150, 160, 160, 300, 160)
    x = 60.0
    for name, color, width in zip(names, svg.COLORS, widths):
        picture.legend(x, 24, [name], [color], 0)
        x += width + 20
    for i, (model, n, k) in enumerate(shapes):
        place = (70 + 255 * (i // 2), 70 + 265 * (i % 2), 185, 190)
        mine = [r for r in found if (r["model"], r["n"], r["k"]) == (model, n, k)]
        lines = {
            name: [(r["tokens"], r[key]) for r in mine if r[key] is not None] for name, key in names.items()
        }
        svg.loglog(picture, place, f"{model} [{n}, {k}]", lines, "tokens", "us" if i < 2 else "")
    return picture


def decode_picture() -> svg.Picture:
    picture = svg.Picture(720, 330, "Tokens a second of generate, 16 layers of Qwen3-30B-A3B on an H200")
    steps = report_tables.decode_steps()
    picture.text(360, 20, picture.title, 13, "middle")
    names = ("transformers", "transformers, decode kept on grouped_mm", "fp4_ops, nvfp4")
    for x, name, color in zip((60, 180, 470), names, svg.COLORS):
        picture.legend(x, 44, [name], [color], 0)
    groups = {
        f"batch {batch}": [None if ms is None else 1e3 * batch / ms for ms in times]
        for batch, times in steps.items()
    }
    svg.bars(picture, (40, 70, 660, 225), groups, "tokens/s")
    return picture


def perplexity_picture() -> svg.Picture:
    picture = svg.Picture(720, 340, "What 4 bits add to perplexity, per cent (110 M Mixture-of-Experts)")
    picture.text(360, 20, picture.title, 13, "middle")
    groups: dict[str, list[svg.Point]] = {}
    for row in report_cells.rows("accuracy_moe_lm_h200", "perplexity"):
        if row["activations"] == "W4A16":
            point = (row["method"], 100 * (row["ratio"] - 1), 100 * row["ratio_error"])
            groups.setdefault(row["format"], []).append(point)
    svg.points(picture, (180, 35, 510, 260), groups, "per cent; lines are one standard error to each side")
    return picture


DRAWN = {"products": products_picture, "decode": decode_picture, "perplexity": perplexity_picture}


def made() -> dict[Path, str]:
    """Returns the text that each file must have."""
    pages = {page: filled(page.read_text()) for page in PAGES}
    return {**pages, **{PICTURES / f"{name}.svg": str(draw()) for name, draw in DRAWN.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for file, text in made().items():
        if not file.exists() or file.read_text() != text:
            stale.append(str(file.relative_to(record.ROOT)))
            if not check:
                file.parent.mkdir(exist_ok=True)
                file.write_text(text)
    if check and stale:
        raise SystemExit(f"not what the data give: {', '.join(stale)}; run python benchmarks/report.py")
    print(
        f"{'written' if stale else 'nothing to write'}: {', '.join(stale)}"
        if not check
        else "as the data give"
    )


if __name__ == "__main__":
    main()
